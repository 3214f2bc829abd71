"""Placement of groups on nodes, in the order in which rings visit ranks, and groups of the same shape.

Groups of the same shape put the same bytes on links, each on links of its own, so that one is computed for all.
"""

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import IntArray
from meshwise.simulator.machine.cluster import Cluster

if TYPE_CHECKING:
    from meshwise.simulator.collectives.traffic import Phase


class Placement(NamedTuple):
    """Ranks of groups, node after node, in *seats*: the ranks that one group has on one node.

    Nodes are in the order in which they first appear in the group, because libraries reorder ranks by node but not the
    nodes; inside a node ranks are in the order of their devices.

    Parameters
    ----------
    device, seat, local
        For every rank its device, its seat, and its position in the seat.
    group, start, size, position
        For every seat its group, its first rank, its number of ranks, and the position of its node in the group.
    nodes, channels, max_ranks
        For every group its number of nodes, and the fewest and the most ranks on one of them.
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
    max_ranks: IntArray

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.nodes)

    @property
    def ranks(self) -> int:
        """Number of ranks of one group."""
        return len(self.device) // len(self.nodes)

    @property
    def group_of(self) -> IntArray:
        """For every rank, its group."""
        return self.group[self.seat]

    def neighbour(self, distance: int) -> IntArray:
        """Return for every seat the seat ``distance`` nodes further around its group."""
        nodes = self.nodes[self.group]
        return np.arange(len(self.group)) - self.position + (self.position + distance) % nodes


def place_groups(cluster: Cluster, groups: IntArray) -> Placement:
    """Return the placement of ``groups``, rows of devices."""
    num_groups, ranks = groups.shape
    device, row = groups.ravel(), np.repeat(np.arange(num_groups), ranks)
    node = cluster.device_nodes[device]
    order = np.lexsort((node, row))
    runs = _run_starts(node[order], row[order])
    # The first rank of the group on the same node, by which nodes stay in order of appearance.
    first_member = np.empty_like(order)
    first_member[order] = np.repeat(order[runs], np.diff(runs, append=len(order)))
    order = np.lexsort((device, first_member))
    device = device[order]
    start = _run_starts(first_member[order])
    size = np.diff(start, append=len(order))
    seat = np.repeat(np.arange(len(start)), size)
    if bool(np.any((device[1:] == device[:-1]) & (seat[1:] == seat[:-1]))):
        raise ValueError("the ranks of a group are on different devices, met one device twice")
    group = row[start]
    seats = _run_starts(group)
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


def _run_starts(*keys: IntArray) -> IntArray:
    """Return the starts of runs of equal keys."""
    change = np.zeros(len(keys[0]), dtype=bool)
    change[:1] = True
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(change)


class Rows(NamedTuple):
    """Loads of all groups: ``group`` puts on ``link`` the load of its representative in ``row`` of a phase."""

    group: IntArray
    link: IntArray
    row: IntArray


class GroupShapes:
    """Groups, rows of devices in rank order, and their shapes.

    Two groups have the same shape if their devices, one by one, are at the same positions of nodes of the same kind,
    and if their nodes, leaf switches and pods repeat in the same pattern. Renaming nodes and switches then turns one
    group into the other, and a collective puts the same bytes on the links at the same positions.

    Attributes
    ----------
    shape
        For every group the number of its shape.
    representatives
        For every shape its first group.
    numbers
        For every shape its number; for a selection of groups, its number among the shapes of all groups.
    """

    def __init__(self, cluster: Cluster, groups: IntArray, shapes: IntArray | None = None) -> None:
        self.cluster, self.groups = cluster, groups
        self.shape, first_groups = _renumber(_number_shapes(cluster, groups) if shapes is None else shapes)
        self.representatives = groups[first_groups]
        self.numbers = np.arange(len(first_groups)) if shapes is None else shapes[first_groups]

    def select(self, indices: IntArray) -> "GroupShapes":
        """Return some of the groups, with their shapes."""
        return GroupShapes(self.cluster, self.groups[indices], self.shape[indices])

    def spread_phase(self, phase: "Phase") -> "Phase":
        """Return the phase of all groups from that of the representatives."""
        group, link, row = self.spread_rows(phase)
        launch = None if phase.launch is None else phase.launch[self.shape]
        return phase._replace(
            latency=phase.latency[self.shape], group=group, link=link, load=phase.load[row], launch=launch
        )

    def spread_rows(self, phase: "Phase") -> Rows:
        """Return the rows of all groups from those of the representatives, sorted by group and link."""
        if len(self.representatives) == len(self.groups):
            return Rows(phase.group, phase.link, np.arange(len(phase.group)))
        starts = np.searchsorted(phase.group, np.arange(len(self.representatives) + 1))
        count = np.diff(starts)[self.shape]
        group = np.repeat(np.arange(len(count)), count)
        row = np.repeat(starts[self.shape] - np.cumsum(count) + count, count)
        row += np.arange(len(group))
        return Rows(group, self._links(phase, group, row), row)

    def _links(self, phase: "Phase", group: IntArray, row: IntArray) -> IntArray:
        """Return, for every row of every group, the link that corresponds to its representative's."""
        parts, size = interconnect(self.cluster).parts, self.groups.shape[1]
        member = self._members(phase.group, parts.owner(phase.link))
        family, place = parts.places(phase.link, self.representatives[phase.group, member])
        group = group * size
        group += member[row]
        return parts.links(family[row], place[row], self.groups.ravel()[group])

    def _members(self, shape: IntArray, part: IntArray) -> IntArray:
        """Return for each part, which the representative of ``shape`` uses, the index of a member inside it."""
        order, keys, num_parts = self._touched_parts
        members: IntArray = order[np.searchsorted(keys, shape * num_parts + part)] % self.groups.shape[1]
        return members

    @cached_property
    def _touched_parts(self) -> tuple[IntArray, IntArray, int]:
        """The parts that representatives use: their order in [shape, level, member], sorted keys, number of parts."""
        parts = interconnect(self.cluster).parts
        part_table = parts.device_parts[:, self.representatives].swapaxes(0, 1)
        keys = (np.arange(len(part_table))[:, None, None] * parts.count + part_table).ravel()
        order = np.argsort(keys, kind="stable")
        return order, keys[order], parts.count


def _number_shapes(cluster: Cluster, groups: IntArray) -> IntArray:
    """Return the number of every group's shape."""
    network = interconnect(cluster)
    # A link without an owner belongs to no node that could be renamed: every group is then a shape of its own.
    if len(groups) < 2 or not network.parts.owns_all_links:
        return np.arange(len(groups))
    rows = network.place[groups]
    for part in network.parts.device_parts:
        rows = rows * groups.shape[1] + _rank_values(part[groups])
    order = np.lexsort(rows.T)
    rows = rows[order]
    number = np.empty(len(groups), dtype=np.int64)
    number[order] = np.cumsum(np.concatenate([[False], (rows[1:] != rows[:-1]).any(axis=1)]))
    return number


def _rank_values(rows: IntArray) -> IntArray:
    """Return the rank of every value among the distinct values of its row.

    >>> _rank_values(np.array([[5, 2, 5], [1, 7, 9]])).tolist()
    [[1, 0, 1], [0, 1, 2]]
    """
    ranks = np.zeros_like(rows)
    # Rows in order, those of groups that follow the numbers of nodes, need no sort.
    if (rows[:, 1:] >= rows[:, :-1]).all():
        np.cumsum(rows[:, 1:] != rows[:, :-1], axis=1, out=ranks[:, 1:])
        return ranks
    order = np.argsort(rows, axis=1, kind="stable")
    sorted_rows = np.take_along_axis(rows, order, axis=1)
    np.cumsum(sorted_rows[:, 1:] != sorted_rows[:, :-1], axis=1, out=ranks[:, 1:])
    result = np.empty_like(rows)
    np.put_along_axis(result, order, ranks, axis=1)
    return result


def _renumber(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return ``values`` as numbers from 0 in order of first appearance, and the position of each first appearance."""
    first_index = np.full(int(values.max(initial=-1)) + 1, len(values))
    np.minimum.at(first_index, values, np.arange(len(values)))
    positions = np.sort(first_index[first_index < len(values)])
    number = np.empty_like(first_index)
    number[values[positions]] = np.arange(len(positions))
    return number[values], positions
