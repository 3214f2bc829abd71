"""Devices and nodes of a cluster are numbered through; what cannot be is rejected."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node, Tenant, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Fabric, Graph, Link, Ring, Switch, Torus

LINK, HOST = Link(1e-6, 1e9), Host("host", 1e12)
FAST = Accelerator("fast", (("bf16", 2e12),), memory=1e9, memory_bandwidth=2e9)
SLOW = Accelerator("slow", (("bf16", 1e12),), memory=1e9, memory_bandwidth=1e9, launch=1e-6)


def node(devices: int = 2, accelerator: Accelerator = FAST, nics: int = 1, hosts: int = 1) -> Node:
    return Node(accelerator, HOST, devices, Switch(LINK), nics, LINK, hosts)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    kinds = st.builds(node, st.integers(1, 4), st.sampled_from([FAST, SLOW]))
    nodes = tuple(draw(st.lists(st.tuples(kinds, st.integers(1, 3)), min_size=1, max_size=4)))
    devices = sum(kind.devices * count for kind, count in nodes)
    speeds = draw(st.dictionaries(st.integers(0, devices - 1), st.sampled_from([0.5, 1.0, 2.0]), max_size=4))
    return Cluster("random", nodes, speeds=tuple(speeds.items()))


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_devices_are_numbered_node_by_node(cluster: Cluster) -> None:
    nodes = [kind for kind, count in cluster.nodes for _ in range(count)]
    held = [number for number, kind in enumerate(nodes) for _ in range(kind.devices)]
    assert (cluster.num_nodes, cluster.num_devices) == (len(nodes), len(held))
    assert [cluster.node_of(device) for device in range(len(held))] == held == cluster.device_nodes.tolist()
    first = [next(group)[0] for _, group in groupby(enumerate(held), key=lambda item: item[1])]
    assert cluster.first_devices.tolist() == [*first, len(held)]
    for device, number in enumerate(held):
        factor = dict(cluster.speeds).get(device, 1.0)
        assert cluster.accelerator_of(device) == nodes[number].accelerator.at_speed(factor)


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_device_kinds_are_equal_where_devices_compute_alike(cluster: Cluster) -> None:
    devices = range(cluster.num_devices)
    alike = {device: cluster.accelerator_of(device) for device in devices}
    kinds = cluster.device_kinds.tolist()
    assert all((kinds[a] == kinds[b]) == (alike[a] == alike[b]) for a in devices for b in devices)


def test_a_homogeneous_cluster_says_what_its_nodes_are() -> None:
    cluster = build_homogeneous("c", FAST, HOST, 3, 4, LINK, Link(2e-6, 1e8), nics_per_node=2)
    assert cluster == Cluster("c", ((Node(FAST, HOST, 4, Switch(LINK), 2, Link(2e-6, 1e8)), 3),))
    assert (cluster.accelerator, cluster.host, cluster.accelerators) == (FAST, HOST, (FAST,))
    assert build_homogeneous("c", FAST, HOST, 1, 4, Ring(LINK), LINK).first_node.network == Ring(LINK)


def test_a_cluster_is_a_value() -> None:
    assert hash(Cluster("c", ((node(), 2),))) == hash(Cluster("c", ((node(), 2),)))


NONSENSE: dict[str, tuple[Fabric, dict[str, object]]] = {
    r"torus 3 \* 2 = 6 devices, the nodes have 4": (Torus((3, 2), LINK), {}),
    "none named device 1": (Graph((("device 0", "s", LINK), ("s", "device 2", LINK))), {}),
    r"device below 4, factor above 0\), met \(4, 0.5\)": (Crossbar(), {"speeds": ((4, 0.5),)}),
    r"met \(0, 0.0\)": (Crossbar(), {"speeds": ((0, 0.0),)}),
    "devices are below 4, met 9": (
        Crossbar(),
        {"tenants": (Tenant("t", (0, 9), Collective.ALL_REDUCE, 1.0, 1.0),)},
    ),
    r"overlap_slowdown lies in \[1, 2\], met 0.5": (Crossbar(), {"overlap_slowdown": 0.5}),
}


@pytest.mark.parametrize("message", NONSENSE)
def test_a_cluster_rejects_nonsense(message: str) -> None:
    fabric, others = NONSENSE[message]
    with pytest.raises(ValueError, match=message):
        Cluster("c", ((node(), 2),), fabric, **others)  # type: ignore[arg-type]


def test_nodes_are_at_least_one() -> None:
    for nodes in ((), ((node(), 0),)):
        with pytest.raises(ValueError, match="nodes are at least 1"):
            Cluster("c", nodes)


@pytest.mark.parametrize("parts", [{"devices": 0}, {"nics": 0}, {"hosts": 0}, {"devices": 4, "hosts": 3}])
def test_a_node_rejects_nonsense(parts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|hosts\(3\) divide the devices\(4\)"):
        node(**parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [(0,), (0, 0), ()])
def test_a_tenant_has_two_devices(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two different devices"):
        Tenant("t", devices, Collective.ALL_REDUCE, 1.0, 1.0)


@pytest.mark.parametrize(("size", "period", "start"), [(0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, -1.0)])
def test_a_tenant_repeats(size: float, period: float, start: float) -> None:
    with pytest.raises(ValueError, match="size and period are positive"):
        Tenant("t", (0, 1), Collective.ALL_REDUCE, size, period, start)


def test_free_devices_are_those_without_a_tenant() -> None:
    whole = build_homogeneous("c", FAST, HOST, 2, 2, LINK, LINK)
    assert whole.free_devices == range(4)  # and no list of a million, however many rows of a file ask for it
    shared = Cluster("c", whole.nodes, tenants=(Tenant("t", (0, 3), Collective.ALL_REDUCE, 1.0, 1.0),))
    assert shared.free_devices == (1, 2)
