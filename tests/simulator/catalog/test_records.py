import pytest

from meshwise.simulator.catalog import (
    STATUSES,
    accelerator,
    accelerator_names,
    cluster,
    cluster_names,
    list_assumed_figures,
    sources,
    statuses,
)
from meshwise.simulator.catalog.records import list_names, read_record
from meshwise.simulator.machine.topology import Dragonfly, FatTree, LeafSpine, Mesh, Switch

KINDS = [(kind, name) for kind in ("accelerators", "clusters") for name in list_names(kind)]
IDENTITY = ("accelerator",)
"""Which accelerator a cluster has is its name, not a figure."""


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_every_figure_has_a_source_and_a_status(kind: str, name: str) -> None:
    found = read_record(kind, name)
    paths = found.paths()
    without = [path for path in paths if found.find_origin(path) is None and path not in IDENTITY]
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
            assert path in list_assumed_figures(name)
    assert {path for path, status in statuses(name).items() if status == "assumed"} <= list_assumed_figures(name).keys()


def test_a_clusters_assumptions_include_those_of_its_accelerator() -> None:
    assert {"accelerator.memory_bandwidth", "accelerator.matmul", "host"} <= list_assumed_figures("local-cpu").keys()
    assert list_assumed_figures("dgx-a100-80gb") == {}


def test_a_record_that_is_like_another_drops_the_sources_of_what_it_states_itself() -> None:
    parent, child = read_record("clusters", "dgx-a100-80gb"), read_record("clusters", "jean-zay-a100")
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
    one = cluster(name).first_node
    for nodes, devices in ((2, None), (2, max(one.devices // 2, 1)), (1, 1)):
        made = cluster(name, nodes, devices)
        node = made.first_node
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
        found = cluster(name).first_node.network.link.bandwidth / links
        assert counted * 1e9 * 0.92 < found <= sheet * 1e9
        assert found < counted * 1e9 * 1.01 or name == "dgx-2-v100-32gb"  # NVLink 2 is measured at 22 to 24 GB/s


def test_nics_of_unmeasured_machines_reach_what_is_usual_for_their_fabric() -> None:
    """0.84 of line rate on InfiniBand: 10.5 GB/s per 100 Gb/s of a NIC."""
    nics = {"dgx-1-v100-32gb": 100, "dgx-a100-40gb": 200, "dgx-h100": 400, "gb300-nvl72": 800, "azure-nd-h200-v5": 400}
    for name, gigabits in nics.items():
        assert cluster(name).first_node.nic.bandwidth == pytest.approx(0.84 * 1e9 * gigabits / 8)


def test_only_nvlink_4_and_later_switches_reduce() -> None:
    reducing = {
        cluster(name).accelerator.name.split()[0]
        for name in cluster_names()
        if isinstance(network := cluster(name).first_node.network, Switch) and network.reduces
    }
    assert reducing == {"H100", "H200", "B200", "B300", "GB200", "GB300"}


def test_meshes_have_the_published_links() -> None:
    """DGX-1: six links a GPU, twelve cube edges and four diagonals; a GCD has at most eight links."""

    def degrees(name: str) -> list[int]:
        network = cluster(name).first_node.network
        assert isinstance(network, Mesh)
        return [sum(links for a, b, links in network.pairs if device in (a, b)) for device in range(8)]

    assert degrees("dgx-1-v100-32gb") == [6] * 8
    assert len(cluster("dgx-1-v100-32gb").first_node.network.pairs) == 12 + 4
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
    assert cluster("gb200-nvl72").first_node.devices == 72 == 4 * cluster("gb200-nvl72").first_node.hosts


def test_a_larger_switch_has_no_more_nics() -> None:
    assert cluster("dgx-h100", 1, 16).first_node.nics == cluster("dgx-h100").first_node.nics


def test_clocks_in_training_follow_steps_and_power() -> None:
    # in loops of products the B200 sinks 1.416 times; with 1200 W instead of 1000 W the clock is 1.2 ** (1 / 3) = 1.063
    # times as high
    assert accelerator("gb200-186gb").sustained == pytest.approx(
        accelerator("b200-180gb").sustained / 1.2 ** (1 / 3), rel=1e-3
    )
    # in steps the H100 sinks more than in loops (1.17), and what nobody timed under load as much as the median
    assert accelerator("h100-80gb").sustained == accelerator("mi300x-192gb").sustained == 1.25
    # chips with a fixed clock do not
    assert accelerator("tpu-v5p-95gb").sustained == 1.0
