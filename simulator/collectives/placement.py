"""Where the ranks of groups sit, in the order in which rings visit them, and which groups lie alike.

What one of the groups that lie alike puts on links, all do on links of their own.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import IntArray
from meshwise.simulator.machine.cluster import Cluster


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


class Rows(NamedTuple):
    """What all groups put on links: ``group`` on ``link`` what its representative does in ``row`` of a phase."""

    group: IntArray
    link: IntArray
    row: IntArray


class Alike:
    """Groups, rows of devices in rank order, and which of them lie alike.

    Two groups lie alike where their devices, one after another, have the same places in nodes of the
    same kind, and where the nodes, leaf switches and pods of the one follow each other, and are the same,
    as those of the other. Renaming nodes and switches then turns one into the other, and a collective
    puts the same bytes on the links with the same places.

    Attributes
    ----------
    shape
        For every group a number, equal where groups lie alike.
    representatives
        For every shape the first group of it.
    numbers
        For every shape its number; where they are some of many groups, its number among those.
    """

    def __init__(self, cluster: Cluster, groups: IntArray, whole: IntArray | None = None) -> None:
        self.cluster, self.groups = cluster, groups
        self.shape, first = _numbered(_shapes(cluster, groups) if whole is None else whole)
        self.representatives = groups[first]
        self.numbers = np.arange(len(first)) if whole is None else whole[first]

    def among(self, chosen: IntArray) -> "Alike":
        """Return the same of some of the groups."""
        return Alike(self.cluster, self.groups[chosen], self.shape[chosen])

    def spread(self, phase: Phase) -> Phase:
        """Return the phase of all groups from that of the representatives."""
        group, link, row = self.rows(phase)
        launch = None if phase.launch is None else phase.launch[self.shape]
        return Phase(phase.latency[self.shape], group, link, phase.load[row], launch, phase.messages)

    def rows(self, phase: Phase) -> Rows:
        """Return the rows of all groups from those of the representatives, sorted by group and link."""
        if len(self.representatives) == len(self.groups):
            return Rows(phase.group, phase.link, np.arange(len(phase.group)))
        starts = np.searchsorted(phase.group, np.arange(len(self.representatives) + 1))
        count = np.diff(starts)[self.shape]
        group = np.repeat(np.arange(len(count)), count)
        row = np.repeat(starts[self.shape] - np.cumsum(count) + count, count)
        row += np.arange(len(group))
        return Rows(group, self._links(phase, group, row), row)

    def _links(self, phase: Phase, group: IntArray, row: IntArray) -> IntArray:
        """Return for every group the link that has the place of the link in a row of its representative."""
        parts, size = interconnect(self.cluster).parts, self.groups.shape[1]
        member = self._members(phase.group, parts.owner(phase.link))
        family, place = parts.places(phase.link, self.representatives[phase.group, member])
        group = group * size
        group += member[row]
        return parts.links(family[row], place[row], self.groups.ravel()[group])

    def _members(self, shape: IntArray, part: IntArray) -> IntArray:
        """Return where parts that representatives touch are found: a member in each."""
        order, keys, num_parts = self._touched
        found: IntArray = order[np.searchsorted(keys, shape * num_parts + part)] % self.groups.shape[1]
        return found

    @cached_property
    def _touched(self) -> tuple[IntArray, IntArray, int]:
        """The parts that representatives touch as sorted keys, and where each stands in [shape, level, member]."""
        parts = interconnect(self.cluster).parts
        touched = parts.of_device[:, self.representatives].swapaxes(0, 1)
        keys = (np.arange(len(touched))[:, None, None] * parts.count + touched).ravel()
        order = np.argsort(keys, kind="stable")
        return order, keys[order], parts.count


def _shapes(cluster: Cluster, groups: IntArray) -> IntArray:
    """Return a number for every group, equal where groups lie alike."""
    network = interconnect(cluster)
    if len(groups) < 2 or not network.parts.own_all:
        return np.arange(len(groups))
    rows = network.place[groups]
    for part in network.parts.of_device:
        rows = rows * groups.shape[1] + _ranked(part[groups])
    order = np.lexsort(rows.T)
    rows = rows[order]
    number = np.empty(len(groups), dtype=np.int64)
    number[order] = np.cumsum(np.concatenate([[False], (rows[1:] != rows[:-1]).any(axis=1)]))
    return number


def _ranked(rows: IntArray) -> IntArray:
    """Return for every value its place among the different values of its row.

    >>> _ranked(np.array([[5, 2, 5], [1, 7, 9]])).tolist()
    [[1, 0, 1], [0, 1, 2]]
    """
    ranks = np.zeros_like(rows)
    if (rows[:, 1:] >= rows[:, :-1]).all():
        np.cumsum(rows[:, 1:] != rows[:, :-1], axis=1, out=ranks[:, 1:])
        return ranks
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=1, out=ranks[:, 1:])
    result = np.empty_like(rows)
    np.put_along_axis(result, order, ranks, axis=1)
    return result


def _numbered(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return small numbers from 0 instead of ``values``, in order of first appearance, and where each appears first."""
    first = np.full(int(values.max(initial=-1)) + 1, len(values))
    np.minimum.at(first, values, np.arange(len(values)))
    found = np.sort(first[first < len(values)])
    number = np.empty_like(first)
    number[values[found]] = np.arange(len(found))
    return number[values], found
