from math import ceil, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.catalog import (
    STATUSES,
    accelerator,
    accelerator_names,
    assumed,
    cluster,
    cluster_names,
    sources,
    statuses,
)
from meshwise.simulator.catalog.records import names, record
from meshwise.simulator.catalog.slices import closed_axes, slice_pairs, slice_shape
from meshwise.simulator.machine.topology import Dragonfly, FatTree, LeafSpine, Mesh, Switch, Torus

KINDS = [(kind, name) for kind in ("accelerators", "clusters") for name in names(kind)]
IDENTITY = ("accelerator",)
"""Which accelerator a cluster has is its name, not a figure."""
TPUS = {"tpu-v4": (16, 16, 16), "tpu-v5e": (16, 16), "tpu-v5p": (16, 20, 28), "tpu-v6e": (16, 16)}


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_every_figure_has_a_source_and_a_status(kind: str, name: str) -> None:
    found = record(kind, name)
    paths = found.paths()
    without = [path for path in paths if found.origin(path) is None and path not in IDENTITY]
    assert without == []
    for path, (status, text) in found.origins.items():
        assert status in STATUSES, path
        assert len(text) >= 8, path
        assert any(figure == path or figure.startswith(f"{path}.") for figure in paths), f"{path} is no figure"
    assert sources(name).keys() == statuses(name).keys() == found.origins.keys()


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_what_no_document_states_is_listed_as_assumed(kind: str, name: str) -> None:
    words = (
        "no document",
        "not in the",
        "not stated",
        "none published",
        "not read",
        "not published",
        "order of magnitude",
    )
    for path, text in sources(name).items():
        if any(word in text for word in words):
            assert path in assumed(name)
    assert {path for path, status in statuses(name).items() if status == "assumed"} <= assumed(name).keys()


def test_a_clusters_assumptions_include_those_of_its_accelerator() -> None:
    assert {"accelerator.memory_bandwidth", "accelerator.matmul", "host"} <= assumed("local-cpu").keys()
    assert assumed("dgx-a100-80gb") == {}


def test_a_record_that_is_like_another_drops_the_sources_of_what_it_states_itself() -> None:
    parent, child = record("clusters", "dgx-a100-80gb"), record("clusters", "jean-zay-a100")
    assert child.figures["devices_per_node"] == parent.figures["devices_per_node"]
    assert "host.numa_nodes" in parent.origins
    assert "host.numa_nodes" not in child.origins


@pytest.mark.parametrize("name", accelerator_names())
def test_matmul_figures_are_physical(name: str) -> None:
    device = accelerator(name)
    peaks = dict(device.peak_flops)
    order = [peaks[dtype] for dtype in ("fp8", "fp16", "tf32", "fp32", "fp64") if dtype in peaks]
    assert order == sorted(order, reverse=True), "a wider dtype is not faster"
    assert peaks.get("fp16", 0) in (0, peaks.get("bf16", peaks.get("fp16")))
    assert device.matmul.waves == 0 or device.matmul.units == 0 or name.startswith("a100"), "wave steps are the A100's"
    assert device.reserved < device.memory


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_stands_in_several_sizes(name: str) -> None:
    one = cluster(name).first
    for nodes, devices in ((2, None), (2, max(one.devices // 2, 1)), (1, 1)):
        made = cluster(name, nodes, devices)
        node = made.first
        assert made.num_devices == nodes * node.devices and node.devices == (devices or one.devices)
        assert node.devices // node.hosts <= one.devices // one.hosts  # no host holds more than it has slots
        assert node.nics / node.devices >= one.nics / one.devices * 0.999  # nor does a device lose its share
        if isinstance(node.network, Mesh):
            assert all(max(a, b) < node.devices for a, b, _ in node.network.pairs)


def test_links_are_near_what_nccl_counts_and_below_the_data_sheet() -> None:
    """Links a GPU times what NCCL counts for one, and its data sheet, in GB/s (NVLink 2, 3, 4, 5)."""
    nvlink = {
        "dgx-2-v100-32gb": (6, 20.0, 25),
        "dgx-a100-80gb": (12, 20.0, 25),
        "dgx-h100": (18, 20.6, 25),
        "dgx-b200": (18, 40.1, 50),
    }
    for name, (links, counted, sheet) in nvlink.items():
        found = cluster(name).first.network.link.bandwidth / links
        assert counted * 1e9 * 0.92 < found <= sheet * 1e9
        assert found < counted * 1e9 * 1.01 or name == "dgx-2-v100-32gb"  # NVLink 2 is measured at 22 to 24 GB/s


def test_nics_are_what_nccl_counts() -> None:
    """12.0 GB/s per 100 Gb/s of a NIC."""
    nics = {"dgx-1-v100-32gb": 100, "dgx-a100-40gb": 200, "dgx-h100": 400, "gb300-nvl72": 800, "azure-nd-h200-v5": 400}
    for name, gigabits in nics.items():
        assert cluster(name).first.nic.bandwidth == 12e9 * gigabits / 100


def test_only_nvlink_4_and_later_switches_reduce() -> None:
    reducing = {
        cluster(name).accelerator.name.split()[0]
        for name in cluster_names()
        if isinstance(network := cluster(name).first.network, Switch) and network.reduces
    }
    assert reducing == {"H100", "H200", "B200", "B300", "GB200", "GB300"}


def test_meshes_have_the_published_links() -> None:
    """DGX-1: six links a GPU, twelve cube edges and four diagonals; a GCD has at most eight links."""

    def degrees(name: str) -> list[int]:
        network = cluster(name).first.network
        assert isinstance(network, Mesh)
        return [sum(links for a, b, links in network.pairs if device in (a, b)) for device in range(8)]

    assert degrees("dgx-1-v100-32gb") == [6] * 8
    assert len(cluster("dgx-1-v100-32gb").first.network.pairs) == 12 + 4
    assert max(degrees("frontier-mi250x")) <= 8


def test_named_fabrics_have_their_published_figures() -> None:
    pod, meta, frontier = (
        cluster(name, 4).fabric for name in ("superpod-h100", "meta-24k-roce-h100", "frontier-mi250x")
    )
    assert isinstance(pod, LeafSpine) and pod.rail_optimized and pod.nodes_per_leaf * 8 == 256
    assert isinstance(meta, FatTree) and meta.core_oversubscription == 7
    assert meta.nodes_per_leaf * meta.leaves_per_pod * 8 == 3072
    assert isinstance(frontier, Dragonfly) and frontier.nodes_per_router * frontier.routers_per_group == 128
    # 512 endpoints of 25 GB/s against 73 other groups: blocking factor 1.753
    assert 512 * 25e9 / (73 * frontier.group_link.bandwidth) == pytest.approx(1.753, abs=0.001)
    assert cluster("gb200-nvl72").first.devices == 72 == 4 * cluster("gb200-nvl72").first.hosts


@pytest.mark.parametrize("name", TPUS)
def test_a_torus_has_as_many_places_as_devices(name: str) -> None:
    a_node = cluster(name).first.devices
    for nodes in (1, 2, 4, 8, 16, 32):
        fabric = cluster(name, nodes).fabric
        assert isinstance(fabric, Torus)
        assert prod(fabric.shape) == nodes * a_node
    with pytest.raises(ValueError, match=r"fill a grid within .*; nearest: "):
        cluster(name, ceil(prod(TPUS[name]) / a_node) + 1)


@pytest.mark.parametrize(("name", "chips_a_nic"), [("tpu-v5p-slices", 1), ("tpu-v5e-slices", 4)])
@pytest.mark.parametrize("chips", [64, 256])
def test_slices_of_any_size_have_the_nics_of_their_hosts(name: str, chips_a_nic: int, chips: int) -> None:
    assert cluster(name, 2, chips).first.nics == chips // chips_a_nic


def test_a_larger_switch_has_no_more_nics() -> None:
    assert cluster("dgx-h100", 1, 16).first.nics == cluster("dgx-h100").first.nics


def test_slices_are_those_that_google_offers() -> None:
    assert [slice_shape(n, (16, 16, 16), 4) for n in (4, 8, 32, 128, 192)] == [
        (1, 2, 2), (2, 2, 2), (2, 4, 4), (4, 4, 8), (4, 4, 12),
    ]  # fmt: skip
    assert [slice_shape(n, (16, 16), 16) for n in (1, 8, 32, 128, 256)] == [(1, 1), (2, 4), (4, 8), (8, 16), (16, 16)]
    # axes close: of v4 where it is made of 4x4x4 cubes, of v5e where it spans the pod
    assert closed_axes((4, 4, 8), 4) == (True,) * 3
    assert closed_axes((2, 2, 4), 4) == (False,) * 3
    assert closed_axes((8, 16), 16) == (False, True)


@given(st.integers(1, 16))
def test_a_cube_is_the_shape_of_a_cubic_number(side: int) -> None:
    assert slice_shape(side**3, (16, 16, 16), 4) == (side,) * 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
@settings(max_examples=1000, deadline=None)
def test_every_chip_is_wired_to_its_neighbours_on_every_axis(shape: list[int], data: st.DataObject) -> None:
    closed = [data.draw(st.booleans()) for _ in shape]
    pairs = slice_pairs(tuple(shape), closed)
    # an axis of n places has n - 1 steps, and one more where it closes to a ring of at least 3
    steps = [length - 1 + (ring and length > 2) for length, ring in zip(shape, closed, strict=True)]
    assert len(pairs) == sum(prod(shape) // length * step for length, step in zip(shape, steps, strict=True))
    assert len(set(pairs)) == len(pairs)
    for a, b, _ in pairs:
        places = [(a // stride % n, b // stride % n, n) for n, stride in zip(shape, _strides(shape), strict=True)]
        moved = [(x, y, n) for x, y, n in places if x != y]
        assert len(moved) == 1
        (x, y, n) = moved[0]
        assert abs(x - y) in (1, n - 1)


def _strides(shape: list[int]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mi300x-8", 1, 9), "devices_per_node is at most 8 on mi300x-8, met 9"),
        (("dgx-h100", 0), "nodes and devices_per_node are at least 1, met 0 and 8"),
        (("tpu-v4", 1, 0), "nodes and devices_per_node are at least 1, met 1 and 0"),
        (("gb200-nvl72", 1, 6 * 4 + 1), "hosts(7) divide the devices(25) of a node"),
        (("tpu-v5p", 1_000_000, 4096), "fill a grid within 16 x 20 x 28, met 4096000000; nearest: 8960"),
        (("dgx-9000",), "cluster is one of"),
    ],
)
def test_sizes_that_cannot_be_built_say_why(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        cluster(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
