"""Rings by hand: bytes over every port and NIC, rails, order of nodes, and the latency of their steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.topology import LeafSpine, Link, Mesh, Ring, Switch

from .machines import MANY, NIC, PORT, latencies, loads, machine, time

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
RING = Algorithm.RING


def test_all_reduce_inside_a_node() -> None:
    # 4 ranks, 32 bytes: 2 * 3 steps of 0.25 s; 2 * 3/4 * 32 = 48 bytes over all 8 directions of ports at 8 byte/s
    [bytes_over] = loads(machine(), REDUCE, RING, [0, 1, 2, 3], 32.0)
    assert list(bytes_over.values()) == [48.0] * 8
    assert time(machine(), REDUCE, RING, [0, 1, 2, 3], 32.0) == 6 * 0.25 + 6.0


def test_two_nodes_of_two_ranks() -> None:
    # 2 rings of 4 edges, 2 inside and 2 between: 2 * 3 steps of mean (0.25 + 0.5) / 2;
    # 2 * 3/4 * 16 = 24 bytes leave each node over 2 NICs, and each ring has half of its edges inside
    group = [0, 1, 4, 5]
    assert latencies(machine(), REDUCE, RING, group) == [6 * 0.375]
    [bytes_over] = loads(machine(), REDUCE, RING, group, 16.0)
    assert bytes_over == {
        f"{part} {d} {way}": 12.0 for part in ("device", "nic") for d in group for way in ("in", "out")
    }
    assert time(machine(), REDUCE, RING, group, 16.0) == 6 * 0.375 + 12 / 2.0


def test_the_base_cost_is_paid_once_by_the_dearest_link() -> None:
    cluster = machine(network=Switch(Link(0.25, 8.0, launch=1.0)), nic=Link(0.5, 2.0, launch=3.0))
    assert latencies(cluster, REDUCE, RING, [0, 1]) == [1.0 + 2 * 0.25]
    assert latencies(cluster, REDUCE, RING, [0, 4]) == [3.0 + 2 * 0.5]


def test_ranks_share_the_nics_that_they_have() -> None:
    # 7/8 * 64 = 56 bytes leave each of two nodes of 4 ranks: over 4 NICs 14 each, over 1 NIC all
    group = list(range(8))
    assert loads(machine(), GATHER, RING, group, 64.0)[0]["nic 0 out"] == 14.0
    assert loads(machine(nics=1), GATHER, RING, group, 64.0)[0]["nic 0 out"] == 56.0


def test_uneven_groups_have_as_many_rings_as_their_smallest_node() -> None:
    # 3 ranks on 2 nodes: 2/3 * 6 = 4 bytes over the one NIC of each node that the one ring takes
    [bytes_over] = loads(machine(), GATHER, RING, [0, 1, 4], 6.0)
    assert {name: load for name, load in bytes_over.items() if "nic" in name} == {
        f"nic {d} {way}": 4.0 for d in (0, 4) for way in ("in", "out")
    }


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from([REDUCE, GATHER]))
@MANY
def test_the_closed_form(span: list[int], nics: int, collective: Collective) -> None:
    """Steps take the mean latency; the busiest NIC carries what leaves a node over the NICs of its rings."""
    cluster, ranks, nodes = machine(nics=nics), sum(span), len(span)
    if ranks < 2:
        return
    group = [4 * node + rank for node, count in enumerate(span) for rank in range(count)]
    rounds = 2 if collective is REDUCE else 1
    crossing = rounds * (ranks - 1) / ranks * 64.0
    rings = min(span)
    widest = max(sum(c * nics // 4 == nic for c in range(rings)) for nic in range(nics)) / rings if nodes > 1 else 0.0
    inside = max((count - 1) / count if nodes > 1 else float(count > 1) for count in span)
    steps = rounds * (ranks - 1)
    mean = (nodes * NIC.latency + (ranks - nodes) * PORT.latency) / ranks if nodes > 1 else PORT.latency
    seconds = steps * mean + max(crossing * widest / NIC.bandwidth, crossing * inside / PORT.bandwidth)
    assert time(cluster, collective, RING, group, 64.0) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("network", [Switch(PORT), Mesh(PORT), Ring(PORT)])
@pytest.mark.parametrize("group", [[0, 1, 2, 3], [0, 1, 4, 5], [0, 4, 5]])
def test_all_reduce_is_reduce_scatter_and_all_gather(network: Switch | Mesh | Ring, group: list[int]) -> None:
    cluster = machine(network=network)
    parts = time(cluster, SCATTER, RING, group, 64.0) + time(cluster, GATHER, RING, group, 64.0)
    assert time(cluster, REDUCE, RING, group, 64.0) == parts


def test_hops_between_nodes_stay_on_their_rail() -> None:
    # a rail-optimized unit of 4 nodes: neighbours on a rail meet in its leaf; only where the
    # number of nodes is odd does the hop that closes the rings change rails, over the spine
    cluster = machine(fabric=LeafSpine(4, rail_optimized=True))
    assert not any(name.endswith("up") for name in loads(cluster, REDUCE, RING, [*range(16)], 1.0)[0])
    odd = loads(cluster, REDUCE, RING, [*range(12)], 12.0)[0]
    crossing = 2 * 11 / 12 * 12.0
    up = [load for name, load in odd.items() if name.endswith("up")]
    assert up == pytest.approx([crossing / 4] * 4)


def test_a_bad_order_of_nodes_costs_what_the_spine_makes_it() -> None:
    # 2 leaves of 4 nodes, uplinks 4 times too narrow: 4 * 2 / 4 = 2 byte/s. A ring in order
    # crosses each uplink once, one that changes leaf at every hop 4 times.
    cluster = machine(8, 1, fabric=LeafSpine(4, oversubscription=4.0))
    crossing = 2 * 7 / 8 * 80.0
    assert time(cluster, REDUCE, RING, [*range(8)], 80.0) == 14 * 0.5 + crossing / 2.0
    assert time(cluster, REDUCE, RING, [0, 4, 1, 5, 2, 6, 3, 7], 80.0) == 14 * 0.5 + 4 * crossing / 2.0


def test_ranks_of_a_node_stay_together_whatever_their_order() -> None:
    cluster = machine()
    for collective in (REDUCE, GATHER):
        in_order = time(cluster, collective, RING, [0, 1, 2, 3, 4, 5, 6, 7], 8.0)
        assert time(cluster, collective, RING, [0, 4, 1, 5, 2, 6, 3, 7], 8.0) == in_order


def test_a_thousand_devices_follow_the_closed_form() -> None:
    # 128 nodes of 8 with a 24 GB/s NIC each: 2 * 1023/1024 of 1 GiB over 8 NICs of every node
    port, nic = Link(1.9e-6, 240e9, 14e-6), Link(4e-6, 24e9, 14e-6)
    cluster = machine(128, 8, network=Switch(port), nic=nic, fabric=LeafSpine(16, rail_optimized=True))
    steps = 14e-6 + 2 * 1023 / 1024 * (128 * 4e-6 + 896 * 1.9e-6)
    seconds = time(cluster, REDUCE, RING, [*range(1024)], 2.0**30)
    assert seconds == pytest.approx(steps + 2 * 1023 / 1024 * 2**30 / (8 * 24e9), rel=1e-2)
    assert interconnect(cluster).num_links > 4 * 1024
