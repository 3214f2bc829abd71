"""Where each device sits: its node, its host and the NIC it uses, all numbered through the cluster."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simulator.cluster import Cluster, Node
from simulator.interconnect.routes import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Numbering:
    """Numbers of the parts of a cluster, node by node.

    Parameters
    ----------
    kinds
        The different kinds of node.
    node_kind, node_rank
        For every node its kind, and its place among the nodes of that kind.
    node, local, kind, rank
        For every device its node, its place in it, the node's kind, and the device's place
        among the devices of all nodes of that kind.
    host, host_local
        For every device its host, and its place among that host's devices.
    nic
        For every device the NIC it uses.
    """

    kinds: tuple[Node, ...]
    node_kind: IntArray
    node_rank: IntArray
    node: IntArray
    local: IntArray
    kind: IntArray
    rank: IntArray
    host: IntArray
    host_local: IntArray
    nic: IntArray

    def counts(self, count: Callable[[Node], int]) -> IntArray:
        """Return for every node a count of its kind."""
        return np.array([count(kind) for kind in self.kinds], dtype=np.int64)[self.node_kind]

    def figures(self, figure: Callable[[Node], float]) -> FloatArray:
        """Return for every node a figure of its kind."""
        return np.array([figure(kind) for kind in self.kinds], dtype=np.float64)[self.node_kind]

    def nodes_of(self, kind: int) -> IntArray:
        """Return the nodes of a kind."""
        return np.flatnonzero(self.node_kind == kind)

    def devices_of(self, kind: int) -> IntArray:
        """Return the devices of the nodes of a kind."""
        return np.flatnonzero(self.kind == kind)


def owners(counts: IntArray) -> IntArray:
    """Return the owner of every part, where owner ``i`` has ``counts[i]`` of them."""
    return np.repeat(np.arange(len(counts)), counts)


def starts(counts: IntArray) -> IntArray:
    """Return the number of the first part of every owner."""
    return np.cumsum(counts) - counts


def numbering(cluster: Cluster) -> Numbering:
    """Return where every device of ``cluster`` sits."""
    number = {node: index for index, node in enumerate(dict.fromkeys(node for node, _ in cluster.nodes))}
    kinds = tuple(number)
    of_node = np.array([number[node] for node, _ in cluster.nodes])[cluster.node_kinds]
    devices, hosts, nics = (
        np.array([getattr(kind, part) for kind in kinds])[of_node] for part in ("devices", "hosts", "nics")
    )
    node = owners(devices)
    local = np.arange(len(node)) - starts(devices)[node]
    in_host = (devices // hosts)[node]
    host = starts(hosts)[node] + local // in_host
    nic = starts(nics)[node] + local * nics[node] // devices[node]
    kind = of_node[node]
    ranks = (_ranks(column, len(kinds)) for column in (of_node, kind))
    return Numbering(kinds, of_node, next(ranks), node, local, kind, next(ranks), host, local % in_host, nic)


def _ranks(kinds: IntArray, count: int) -> IntArray:
    """Return the place of every member among those of its kind."""
    ranks = np.zeros(len(kinds), dtype=np.int64)
    for kind in range(count):
        members = np.flatnonzero(kinds == kind)
        ranks[members] = np.arange(len(members))
    return ranks
