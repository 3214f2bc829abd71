"""Rings through all ranks of a group, as many at once as its nodes can feed."""

import numpy as np

from simulator.cluster import Cluster
from simulator.collectives.inside import inside
from simulator.collectives.phase import Phase
from simulator.collectives.placement import Placement
from simulator.collectives.traffic import Edges, launched, phase, traffic
from simulator.interconnect.routes import IntArray


def ring(cluster: Cluster, placement: Placement, rounds: int) -> tuple[Phase, ...]:
    """Return the one phase of rings that pass the buffer round ``rounds`` times.

    A step costs the mean latency of a ring's edges, and ``rounds * (n - 1) / n`` bytes
    cross each edge for every byte of size [1]_. A group that spans nodes has as many rings
    (channels) as ranks on the node where it has fewest, so that their NICs work at once.
    Channel ``c`` enters even nodes at rank ``c`` and leaves at ``c + 1``, odd nodes the
    other way round: both ends of a hop are on the same rail, except for the hop that
    closes an odd number of nodes. Inside a node the copy of a rank's own part counts (`Library`).

    References
    ----------
    .. [1] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
       workstations", J. Parallel Distrib. Comput. 69(2), 2009.
    """
    edges = [inside(cluster, placement, through=True), _hops(placement)]
    used = traffic(cluster, placement.num_groups, edges)
    rate = rounds * (placement.ranks - 1) / placement.ranks
    own = np.where(placement.nodes == 1, cluster.library.own, 0.0) / placement.ranks
    return launched(cluster, phase(used, rate * used.delay, rate + own))


def _hops(placement: Placement) -> Edges:
    """Return the hops from every node to the next, one byte a node over all channels."""
    seat, channel = channels(placement)
    following = placement.neighbour(1)[seat]
    count = placement.channels[placement.group[seat]]
    after = (channel + 1) % count
    source = placement.start[seat] + np.where(placement.position[seat] % 2 == 0, after, channel)
    target = placement.start[following] + np.where(placement.position[following] % 2 == 0, channel, after)
    return Edges(placement.group[seat], placement.device[source], placement.device[target], 1.0 / count)


def channels(placement: Placement) -> tuple[IntArray, IntArray]:
    """Return (seat, channel) for every seat of a group that spans nodes."""
    width = np.where(placement.nodes > 1, placement.channels, 0)[placement.group]
    seat = np.repeat(np.arange(len(width)), width)
    return seat, np.arange(len(seat)) - np.repeat(np.cumsum(width) - width, width)
