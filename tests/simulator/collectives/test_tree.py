"""The double binary tree: few steps, and no more bytes than rings."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import phases
from meshwise.simulator.collectives.placement import place_groups
from meshwise.simulator.collectives.tree import _level, busiest_share
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import LeafSpine, Link

from .machines import MANY, latencies, loads, machine

REDUCE, BROADCAST = Collective.ALL_REDUCE, Collective.BROADCAST
TREE = Algorithm.TREE


def test_steps() -> None:
    # up and down log2(64) = 6 levels of 0.5 s; with 4 ranks a node also 3 edges of 0.25 s each way
    assert latencies(machine(64, 4), REDUCE, TREE, [4 * node for node in range(64)]) == [12 * 0.5]
    assert latencies(machine(64, 4), REDUCE, TREE, [*range(256)]) == [12 * 0.5 + 6 * 0.25]
    # the longest chain counts
    assert latencies(machine(4, 4), REDUCE, TREE, [0, 4, 5, 6]) == [2 * 0.5 + 4 * 0.25]
    # a broadcast only comes down; 5 nodes need 3 levels
    assert latencies(machine(8, 4), BROADCAST, TREE, [4 * node for node in range(5)]) == [3 * 0.5]


def test_farther_levels_cross_the_spine() -> None:
    # 2 leaves of 2 nodes, one rank each: distance 1 stays in its leaf for half of the hops (0.5 s,
    # or 0.5 + 1 s over the spine), distance 2 never
    cluster = machine(4, 1, fabric=LeafSpine(2, hop=1.0))
    assert latencies(cluster, REDUCE, TREE, [*range(4)]) == [2 * (1.0 + 1.5)]


def test_two_nodes_of_two_ranks() -> None:
    # one edge between the nodes: 16 bytes up or down in each of 2 trees of 8, so 16 out of a node over 2 NICs;
    # inside, a chain of one edge for each tree of a NIC: 8 bytes up, 8 down, over the ports of 2 ranks
    [bytes_over] = loads(machine(), REDUCE, TREE, [0, 1, 4, 5], 16.0)
    assert bytes_over == pytest.approx(
        {
            f"{part} {d} {way}": load
            for part, load in (("device", 16.0), ("nic", 8.0))
            for d in (0, 1, 4, 5)
            for way in ("in", "out")
        }
    )


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_edges_are_those_of_a_binary_tree(levels: int) -> None:
    """Nodes 1 .. 2**levels - 1 hang on the parent at the distance of their lowest set bit, node 0 on top."""
    nodes = 2**levels
    distances = [node & -node for node in range(1, nodes)]
    placement = place_groups(machine(nodes, 1), np.arange(nodes)[None, :])
    for level in range(levels):
        share = distances.count(2**level) / (nodes - 1)
        edges = _level(placement, level)
        assert edges.weight.sum() / nodes == pytest.approx(share)
        away = (edges.target - edges.source) % nodes
        assert set(away.tolist()) == {2**level, nodes - 2**level}


def test_trees_of_different_heights_at_once() -> None:
    cluster = machine(8, 4)
    groups = [[*range(8)], [8, 9, 10, 12, 13, 14, 16, 17], [11, 15, 18, 19, 20, 24, 28, 29]]
    [together] = phases(cluster, REDUCE, TREE, np.array(groups))
    for index, group in enumerate(groups):
        [alone] = phases(cluster, REDUCE, TREE, np.array([group]))
        assert together.latency[index] == alone.latency[0]
        assert together.link[together.group == index].tolist() == alone.link.tolist()
        assert together.load[together.group == index] == pytest.approx(alone.load, rel=1e-12)


@given(st.integers(2, 9), st.integers(1, 4), st.sampled_from([REDUCE, BROADCAST]))
@MANY
def test_every_nic_carries_what_the_busiest_node_of_two_trees_sends(
    nodes: int, ranks: int, collective: Collective
) -> None:
    """1/2, 3/4 or all of the size for 2, 3 or more nodes against ``(n - 1) / n`` for ``n`` ranks; ports 1 against that.

    An inner node with two children sends half of the size up and twice half down, and as a leaf of the other tree half
    up: 2 of the size in the two rounds of an all-reduce.
    """
    cluster = machine(9, 4)
    groups = np.array([[4 * node + rank for node in range(nodes) for rank in range(ranks)]])
    sums = []
    for algorithm in (Algorithm.RING, TREE):
        [phase] = phases(cluster, collective, algorithm, groups)
        by_link = np.zeros(interconnect(cluster).num_links)
        by_link[phase.link] = phase.load
        sums.append(by_link)
    of_nic = np.array([interconnect(cluster).kind(link).startswith("nic") for link in range(len(sums[0]))])
    busiest = {2: 0.5, 3: 0.75}.get(nodes, 1.0)
    share = np.where(of_nic, busiest, 1.0) / ((nodes * ranks - 1) / (nodes * ranks))
    assert sums[0] * share == pytest.approx(sums[1], rel=1e-12)


def test_no_tree_of_nccl_sends_more_than_the_busiest_node_here() -> None:
    """Both trees built as NCCL's ``ncclGetDtree`` does, for every number of nodes: the most any node sends."""
    for nodes in range(2, 40):
        sent = np.zeros(nodes)
        for tree in (0, 1):
            for node in range(1, nodes):
                low = node & -node
                parent = (node ^ low) | (low << 1)
                parent = parent if parent < nodes else node ^ low
                if nodes % 2:  # an odd number shifts, an even one mirrors
                    child, father = ((x + tree) % nodes for x in (node, parent))
                else:
                    child, father = ((nodes - 1 - x if tree else x) for x in (node, parent))
                sent[child] += 0.5  # half of the size up
                sent[father] += 0.5  # and down
        assert sent.max() == 2 * busiest_share(np.array([nodes]))[0]


DEVICE = Accelerator("d", (("fp32", 1e12),), 1e9, 1e12)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_one_level_is_as_all_levels(nodes: int, devices: int, nics: int, groups: int) -> None:
    inside, outside = Link(1e-6, 1e11, 1e-5), Link(3e-6, 1e10, 1e-5)
    alike = build_homogeneous("alike", DEVICE, Host("h", 1e9), nodes * groups, devices, inside, outside, nics)
    ((node, count),) = alike.nodes
    twins = replace(alike, nodes=((node, 1), (node, count - 1)))  # two kinds of node that are the same
    members = np.arange(nodes * groups * devices).reshape(groups, -1)
    short, long = (phases(c, Collective.ALL_REDUCE, Algorithm.TREE, members)[0] for c in (alike, twins))
    assert short.group.tolist() == long.group.tolist() and short.link.tolist() == long.link.tolist()
    assert short.load == pytest.approx(long.load, rel=1e-12)
    assert short.latency == pytest.approx(long.latency, rel=1e-12)
