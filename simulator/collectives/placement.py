"""Where the ranks of groups sit, in the order in which rings visit them."""

from typing import NamedTuple

import numpy as np

from simulator.cluster import Cluster
from simulator.interconnect.routes import IntArray


class Placement(NamedTuple):
    """Ranks of groups node after node, and the *seats*: the ranks that one group has on one node.

    Nodes follow each other as they first appear in the group, since libraries reorder ranks
    by node but not the nodes; inside a node ranks follow their devices.

    Parameters
    ----------
    device, seat, local
        For every rank its device, its seat, and its place in it.
    group, start, size, position
        For every seat its group, first rank, number of ranks, and its node's place in the group.
    nodes, channels, widest
        For every group its nodes, and the fewest and most ranks on one of them.
    """

    device: IntArray
    seat: IntArray
    local: IntArray
    group: IntArray
    start: IntArray
    size: IntArray
    position: IntArray
    nodes: IntArray
    channels: IntArray
    widest: IntArray

    @property
    def num_groups(self) -> int:
        """Groups in all."""
        return len(self.nodes)

    @property
    def ranks(self) -> int:
        """Ranks of one group."""
        return len(self.device) // len(self.nodes)

    @property
    def group_of(self) -> IntArray:
        """For every rank, its group."""
        return self.group[self.seat]

    def neighbour(self, distance: int) -> IntArray:
        """Return for every seat the one ``distance`` nodes further round its group."""
        nodes = self.nodes[self.group]
        return np.arange(len(self.group)) - self.position + (self.position + distance) % nodes


def place(cluster: Cluster, groups: IntArray) -> Placement:
    """Return where the ranks of ``groups``, rows of devices, sit."""
    num_groups, ranks = groups.shape
    device, row = groups.ravel(), np.repeat(np.arange(num_groups), ranks)
    node = cluster.device_nodes[device]
    order = np.lexsort((node, row))
    runs = _starts(node[order], row[order])
    first = np.empty_like(order)
    first[order] = np.repeat(order[runs], np.diff(runs, append=len(order)))
    order = np.lexsort((device, first))
    device = device[order]
    start = _starts(first[order])
    size = np.diff(start, append=len(order))
    seat = np.repeat(np.arange(len(start)), size)
    if bool(np.any((device[1:] == device[:-1]) & (seat[1:] == seat[:-1]))):
        raise ValueError("the ranks of a group are on different devices, met one device twice")
    group = row[start]
    seats = _starts(group)
    return Placement(
        device,
        seat,
        np.arange(len(order)) - start[seat],
        group,
        start,
        size,
        np.arange(len(start)) - seats[group],
        np.diff(seats, append=len(start)),
        np.minimum.reduceat(size, seats),
        np.maximum.reduceat(size, seats),
    )


def _starts(*keys: IntArray) -> IntArray:
    """Return where runs of equal keys start."""
    change = np.zeros(len(keys[0]), dtype=bool)
    change[:1] = True
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(change)
