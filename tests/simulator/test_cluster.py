"""Routes of a cluster are shortest paths of its topology; curves interpolate."""

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalog import accelerator, accelerator_names, cluster, cluster_names, sources
from simulator.cluster import Accelerator, Cluster, Collective, CollectiveCurve, Host, Link, Port, PortKind

CPU = Accelerator("cpu", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e9)


def small(nodes: int, devices: int, nics: int) -> Cluster:
    return Cluster("small", CPU, Host("host", 1e9), nodes, devices, Link(1e-6, 100.0), Link(2e-6, 10.0), nics)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.data())
def test_route_is_the_shortest_path_of_the_topology(nodes: int, devices: int, nics: int, data: st.DataObject) -> None:
    machine = small(nodes, devices, min(nics, devices))
    device = st.integers(0, machine.num_devices - 1)
    source, target = data.draw(device), data.draw(device)
    path = nx.shortest_path(machine.topology(), ("device", source), ("device", target))
    edges = [machine.topology().edges[edge]["link"] for edge in pairwise(path)]
    route = machine.route(source, target)
    assert [machine.port_link(port) for port in route] == [link for link in edges if link is not None]


def test_ranks_share_nics_evenly() -> None:
    machine = small(nodes=2, devices=8, nics=4)
    assert [machine.nic(device) for device in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert machine.route(0, 8) == (Port(PortKind.NIC_OUT, 0), Port(PortKind.NIC_IN, 4))
    assert machine.spans((6, 7, 8)) == (2, 1)


def test_curve_is_linear_between_points_and_beyond() -> None:
    curve = CollectiveCurve(Collective.ALL_REDUCE, 2, ((10.0, 1.0), (20.0, 3.0)))
    assert [curve.time(size) for size in (1, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 0.0),), ((0.0, 1.0),)])
def test_curve_rejects_nonsense(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="sizes rise and times are positive"):
        CollectiveCurve(Collective.ALL_REDUCE, 2, points)


@pytest.mark.parametrize("name", accelerator_names())
def test_every_figure_of_an_accelerator_has_a_source(name: str) -> None:
    assert {"peak", "memory", "memory_bandwidth", "launch", "matmul"} <= sources(name).keys()
    assert accelerator(name).peak("fp32") > 0


@pytest.mark.parametrize("name", cluster_names())
def test_every_figure_of_a_cluster_has_a_source(name: str) -> None:
    assert {"devices_per_node", "nics_per_node", "host", "intra_node", "inter_node"} == sources(name).keys()
    assert cluster(name, 2).num_devices == 2 * cluster(name).devices_per_node


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match="dgx-a100-80gb"):
        cluster("dgx-z9")
    with pytest.raises(ValueError, match="no peak for fp8; known: fp32"):
        CPU.peak("fp8")
