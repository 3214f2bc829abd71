"""Hierarchical collectives: one level inside nodes, one among equal ranks of different nodes."""

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.collectives.placement import Placement
from meshwise.simulator.collectives.ring import channels, node_rings
from meshwise.simulator.collectives.traffic import Edges, Phase, Traffic, build_phase, traffic, with_launch
from meshwise.simulator.interconnect.routes import IntArray
from meshwise.simulator.machine.cluster import Cluster


def hierarchical_phases(cluster: Cluster, placement: Placement, collective: Collective) -> tuple[Phase, ...]:
    """Return the phases of a collective on groups that have ``k`` ranks on each of ``m`` nodes.

    An all-reduce is a reduce-scatter inside nodes, a ring of ``2 * (m - 1)`` steps among equal ranks on ``1/k`` of the
    size, and an all-gather inside nodes. An all-gather begins between nodes, a reduce-scatter ends there [1]_. Each
    phase is a collective of its own and pays its own launch.

    References
    ----------
    .. [1] Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash",
       arXiv:1811.05233 (2D-torus all-reduce).
    """
    link_traffic = traffic(cluster, placement.num_groups, [equal_rank_rings(placement)])
    inside_phases = with_launch(cluster, inside_phase(cluster, placement))
    node_phases = with_launch(
        cluster, _ring_phase(link_traffic, placement.nodes, 2 if collective is Collective.ALL_REDUCE else 1)
    )
    if collective is Collective.ALL_REDUCE:
        return inside_phases + node_phases + inside_phases
    return node_phases + inside_phases if collective is Collective.ALL_GATHER else inside_phases + node_phases


def inside_phase(cluster: Cluster, placement: Placement) -> Phase:
    """Return the phase of one round of rings inside all nodes of each group."""
    link_traffic = traffic(cluster, placement.num_groups, [node_rings(cluster, placement)])
    return _ring_phase(link_traffic, placement.channels, 1)


def _ring_phase(link_traffic: Traffic, ranks: IntArray, rounds: int) -> Phase:
    steps = rounds * (ranks - 1.0)
    return build_phase(link_traffic, steps * link_traffic.latency, steps / ranks)


def equal_rank_rings(placement: Placement) -> Edges:
    """Return the edges of rings among equal ranks of all nodes; the ranks of a node send one byte together."""
    seat, channel = channels(placement)
    source = placement.device[placement.start[seat] + channel]
    target = placement.device[placement.start[placement.neighbour(1)[seat]] + channel]
    group = placement.group[seat]
    return Edges(group, source, target, np.reciprocal(placement.channels[group].astype(np.float64)))
