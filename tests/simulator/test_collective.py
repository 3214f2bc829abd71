"""Collectives on an idle group follow their closed forms exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster import Accelerator, Cluster, Collective, CollectiveCurve, Host, Link
from simulator.collective import NO_COST, collective_cost

CPU = Accelerator("cpu", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e9)
INSIDE, OUTSIDE = Link(latency=0.25, bandwidth=8.0), Link(latency=0.5, bandwidth=2.0)


def machine(devices: int = 8, nics: int = 8, curves: tuple[CollectiveCurve, ...] = ()) -> Cluster:
    return Cluster("m", CPU, Host("h", 1e9), 64, devices, INSIDE, OUTSIDE, nics, curves)


def time(collective: Collective, span: tuple[int, ...], size: float, nics: int = 8) -> float:
    cluster = machine(nics=nics)
    return collective_cost(cluster, collective, span, size).idle_time(cluster)


def test_ring_all_reduce_inside_a_node() -> None:
    # 4 ranks, 32 bytes: 2 * 3 steps of 0.25 s, and 2 * 3/4 * 32 = 48 bytes at 8 byte/s = 6 s
    assert time(Collective.ALL_REDUCE, (4,), 32.0) == 6 * 0.25 + 6.0


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    parts = time(Collective.REDUCE_SCATTER, (8,), 64.0) + time(Collective.ALL_GATHER, (8,), 64.0)
    assert time(Collective.ALL_REDUCE, (8,), 64.0) == parts


def test_ring_across_nodes_with_one_rank_each() -> None:
    # 4 ranks on 4 nodes, all-gather of 32 bytes: 3 steps of 0.5 s, 3/4 * 32 = 24 bytes at 2 byte/s
    assert time(Collective.ALL_GATHER, (1, 1, 1, 1), 32.0) == 3 * 0.5 + 12.0


def test_ranks_of_one_node_use_their_nics_together() -> None:
    # 8 ranks on 2 nodes: 7/8 * 64 = 56 bytes cross each node's border, over 4 NICs 14 bytes each
    cost = collective_cost(machine(), Collective.ALL_GATHER, (4, 4), 64.0)
    assert (cost.device_bytes, cost.nic_bytes) == (56.0, 14.0)
    # with 2 NICs for 8 devices the 4 ranks share one
    assert collective_cost(machine(nics=2), Collective.ALL_GATHER, (4, 4), 64.0).nic_bytes == 56.0


def test_tree_takes_over_where_a_ring_has_too_many_steps() -> None:
    # 64 nodes: a ring has 126 steps of 0.5 s; the double tree 2 * log2(64) = 12
    assert collective_cost(machine(), Collective.ALL_REDUCE, (1,) * 64, 1.0).latency == 12 * 0.5


def test_nothing_moves_alone_or_empty() -> None:
    assert collective_cost(machine(), Collective.ALL_REDUCE, (1,), 1e9) == NO_COST
    assert collective_cost(machine(), Collective.ALL_REDUCE, (4,), 0.0) == NO_COST


def test_a_measured_curve_replaces_the_model_for_its_group_only() -> None:
    curve = CollectiveCurve(Collective.ALL_REDUCE, 2, ((1.0, 7.0),))
    cluster = machine(curves=(curve,))
    assert collective_cost(cluster, Collective.ALL_REDUCE, (2,), 1.0).idle_time(cluster) == 7.0
    assert collective_cost(cluster, Collective.ALL_REDUCE, (3,), 1.0).idle_time(cluster) != 7.0


@given(
    st.sampled_from([c for c in Collective if c is not Collective.SEND]),
    st.sampled_from([(2,), (8,), (4, 4), (1, 1, 1), (8,) * 8]),
    st.floats(1, 1e6),
    st.floats(1, 10),
)
def test_more_bytes_and_less_bandwidth_are_never_faster(
    collective: Collective, span: tuple[int, ...], size: float, factor: float
) -> None:
    cluster = machine()
    fast = Cluster("f", CPU, cluster.host, 64, 8, Link(0.25, 8.0 * factor), Link(0.5, 2.0 * factor), 8)
    slow = collective_cost(cluster, collective, span, size).idle_time(cluster)
    assert collective_cost(fast, collective, span, size).idle_time(fast) <= slow
    assert collective_cost(cluster, collective, span, size * factor).idle_time(cluster) >= slow


@pytest.mark.parametrize(("span", "seconds"), [((2,), 0.25 + 16 / 8), ((1, 1), 0.5 + 16 / 2)])
def test_send(span: tuple[int, ...], seconds: float) -> None:
    assert time(Collective.SEND, span, 16.0) == seconds
