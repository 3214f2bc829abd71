"""Time of a collective on an idle group of ranks, and the bytes it puts on every port.

A group is described by its *span*: how many of its ranks sit on each node. Rings follow
the latency-bandwidth model [1]_; a group that spans nodes runs its rings through every
NIC of its ranks at once, as NCCL's channels do; an all-reduce takes the double binary
tree [2]_ where that is faster (fewer steps, same bytes).

References
----------
.. [1] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
   workstations", J. Parallel Distrib. Comput. 69(2), 2009.
.. [2] Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
   reduction and scan", Parallel Computing 35(12), 2009.
"""

from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from simulator.cluster import Cluster, Collective


class CollectiveCost(NamedTuple):
    """What a collective costs one rank.

    ``latency`` in s is paid first; then ``device_bytes`` cross the rank's own port, in
    each direction, while ``nic_bytes`` cross its NIC.
    """

    latency: float
    device_bytes: float
    nic_bytes: float

    def idle_time(self, cluster: Cluster) -> float:
        """Return seconds where nothing else uses those ports."""
        device = self.device_bytes / cluster.intra_node.bandwidth
        return self.latency + max(device, self.nic_bytes / cluster.inter_node.bandwidth)


NO_COST = CollectiveCost(0.0, 0.0, 0.0)

_ROUNDS = {
    Collective.ALL_REDUCE: 2,
    Collective.ALL_GATHER: 1,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_TO_ALL: 1,
    Collective.BROADCAST: 1,
}
"""How often a ring passes the buffer round."""


@lru_cache(maxsize=65536)
def collective_cost(cluster: Cluster, collective: Collective, span: tuple[int, ...], size: float) -> CollectiveCost:
    """Return the cost of a collective over a group with ``span`` ranks on each of its nodes.

    ``size`` is the buffer of one rank for all-reduce, broadcast and send, and the whole
    buffer, all shards together, for all-gather, reduce-scatter and all-to-all.

    Examples
    --------
    A ring all-reduce of 8 GB over 4 ranks moves 2 * 3/4 * 8 GB = 12 GB over every port.

    >>> from simulator.catalog import cluster
    >>> collective_cost(cluster("dgx-a100-80gb"), Collective.ALL_REDUCE, (4,), 8e9).device_bytes
    12000000000.0
    """
    ranks = sum(span)
    if ranks < 2 or size <= 0:
        return NO_COST
    for curve in cluster.collectives:
        if curve.collective is collective and curve.ranks == ranks:
            return CollectiveCost(curve.time(size), 0.0, 0.0)
    if collective is Collective.SEND:
        return _send(cluster, span, size)
    crossing = _ROUNDS[collective] * (ranks - 1) / ranks * size
    device_bytes = crossing if max(span) > 1 else 0.0
    nic_bytes = crossing / _nics(cluster, min(span)) if len(span) > 1 else 0.0
    return CollectiveCost(_latency(cluster, collective, span), device_bytes, nic_bytes)


def _nics(cluster: Cluster, ranks: int) -> int:
    """Return the NICs that ``ranks`` neighbouring ranks of one node use."""
    return max(1, min(cluster.nics_per_node, ranks * cluster.nics_per_node // cluster.devices_per_node))


def _send(cluster: Cluster, span: tuple[int, ...], size: float) -> CollectiveCost:
    if len(span) == 1:
        return CollectiveCost(cluster.intra_node.latency + cluster.intra_node.launch, size, 0.0)
    return CollectiveCost(cluster.inter_node.latency + cluster.inter_node.launch, 0.0, size)


def _latency(cluster: Cluster, collective: Collective, span: tuple[int, ...]) -> float:
    """Return the steps' latency: of the ring, or of the double binary tree where that is less."""
    ranks, nodes = sum(span), len(span)
    inside, outside = cluster.intra_node, cluster.inter_node
    launch = outside.launch if nodes > 1 else inside.launch
    steps = _ROUNDS[collective] * (ranks - 1)
    between = steps * nodes // ranks if nodes > 1 else 0
    ring = between * outside.latency + (steps - between) * inside.latency
    if collective is not Collective.ALL_REDUCE or nodes == 1:
        return launch + ring
    tree = 2 * (ceil(log2(nodes)) * outside.latency + (max(span) - 1) * inside.latency)
    return launch + min(ring, tree)
