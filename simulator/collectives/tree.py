"""Double binary trees between nodes, with a chain inside each node."""

from math import ceil, log2

import numpy as np

from meshwise.simulator.collectives.placement import Placement
from meshwise.simulator.collectives.ring import channels, count_rails, node_rings
from meshwise.simulator.collectives.traffic import (
    Edges,
    Phase,
    Traffic,
    build_phase,
    merge_traffic,
    traffic,
    with_launch,
)
from meshwise.simulator.interconnect.routes import FloatArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar


def tree(cluster: Cluster, placement: Placement, rounds: int) -> tuple[Phase, ...]:
    """Return the one phase of double binary trees: up and down for 2 rounds, down for 1.

    ``latency = launch + rounds * (ceil(log2(nodes)) * between + (ranks a node - 1) * inside)``. Each of the two trees
    carries half of the data, and its leaves are inner nodes of the other, so that every NIC is busy in both directions
    [1]_. A tree has one edge less than nodes, so that a node sends ``rounds * (nodes - 1) / nodes`` of the size over
    its NICs: for two nodes of many ranks nearly half of the ``rounds * (n - 1) / n`` of a ring.

    In a tree over ``2**levels`` nodes ``2**(levels - 1)`` edges join nodes at distance 1, half as many join nodes at
    distance 2, and so on. The position of a node in the tree is not modelled: all nodes carry what the busiest does.

    References
    ----------
    .. [1] Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
       reduction and scan", Parallel Computing 35(12), 2009.
    """
    chain = traffic(cluster, placement.num_groups, [node_rings(cluster, placement, is_open=True)])
    levels, steps = node_trees(cluster, placement)
    steps = steps + (placement.max_ranks - 1) * chain.latency
    return with_launch(cluster, build_phase(merge_traffic(cluster, chain, *levels), rounds * steps, rounds))


def node_trees(cluster: Cluster, placement: Placement) -> tuple[list[Traffic], FloatArray]:
    """Return the traffic of double binary trees between nodes, by level, in one round, and the latency of its steps."""
    num_groups = placement.num_groups
    count = ceil(log2(int(placement.nodes.max())))
    is_uniform = len(cluster.nodes) == 1 and isinstance(cluster.fabric, Crossbar) and not cluster.link_speeds
    # The route between nodes does not depend on their distance: one level stands for all.
    if is_uniform and count:
        levels = [traffic(cluster, num_groups, [_level(placement, 0, share=1.0)])]
        steps = np.ceil(np.log2(np.maximum(placement.nodes, 1))) * levels[0].latency
    else:
        levels = [traffic(cluster, num_groups, [_level(placement, level)]) for level in range(count)]
        steps = sum((level.latency for level in levels), np.zeros(num_groups))
    return [level_traffic.with_size(busiest_share(placement.nodes)) for level_traffic in levels], steps


def busiest_share(nodes: IntArray) -> FloatArray:
    """Return the bytes that the busiest node sends in one round per byte of size, by number of nodes.

    Each tree carries half of the data. An inner node with two children sends half of the size up once and down twice in
    two rounds, and in the other tree, where it is a leaf, half of the size up: 2 in two rounds. Two nodes are root and
    leaf by turns: ``(1/2 + 1/2) / 2``; of three, inner nodes have one child: ``(1/2 + 1/2 + 1/2) / 2`` [2]_.

    References
    ----------
    .. [2] NVIDIA/nccl, src/graph/trees.cc: ``ncclGetDtree``.

    >>> busiest_share(np.array([1, 2, 3, 4, 100])).tolist()
    [0.0, 0.5, 0.75, 1.0, 1.0]
    """
    share: FloatArray = np.minimum(np.maximum(nodes - 1, 0) * np.where(nodes > 2, 0.375, 0.5), 1.0)
    return share


def _level(placement: Placement, level: int, share: float | None = None) -> Edges:
    """Return the edges between nodes at distance ``2**level``, in both directions, with a rank for every channel.

    ``share`` is their fraction of all edges; by default that of a binary tree.
    """
    levels = np.ceil(np.log2(placement.nodes)).astype(np.int64)[placement.group]
    rails = count_rails(placement)
    seat, channel = channels(placement, rails)
    has_level = levels[seat] > level
    seat, channel = seat[has_level], channel[has_level]
    part = 2.0 ** (levels[seat] - 1 - level) / (2.0 ** levels[seat] - 1) if share is None else share
    weight = part / 2 / rails[placement.group[seat]]
    source = placement.device[placement.start[seat] + channel]
    ends = [
        placement.device[placement.start[placement.neighbour(distance)[seat]] + channel]
        for distance in (2**level, -(2**level))
    ]
    group = placement.group[seat]
    return Edges(np.tile(group, 2), np.tile(source, 2), np.concatenate(ends), np.tile(weight, 2))
