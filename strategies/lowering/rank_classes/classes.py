"""Rank classes: ranks that do the same work at the same time, with the classes of their groups and links.

`fold` finds the coarsest classes by colour refinement over ranks, groups and links;
`unfold` gives every rank a class of its own, the reference that folding must equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import measured_time
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.program import IntArray, RankClass
from meshwise.strategies.lowering.rank_classes.placement import BACKWARD, FORWARD, Loads, Placed, tied_kind
from meshwise.strategies.lowering.rank_classes.refinement import (
    Colours,
    FloatArray,
    Groups,
    Partition,
    combine,
    first_equal,
    mix,
    quantised,
    refine,
)
from meshwise.strategies.plan.mesh import GROUPS, PIPELINE, data_ranks

__all__ = ["BACKWARD", "FORWARD", "ClassTable", "Row", "each_once", "fold", "tied_kind", "unfolded"]


@dataclass(frozen=True, eq=False)
class GroupTable:
    """The groups of one kind, and their group classes.

    ``devices`` has one row of devices per group, ``class_of`` the group class of each row, ``representatives`` the row
    that stands for each group class, and ``classes[i]`` the rank classes of the members of group class ``i``.
    """

    kind: str
    devices: IntArray
    class_of: IntArray
    first: IntArray
    classes: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.first)


class Pattern(NamedTuple):
    """One phase of a collective for every group class: latencies, and loads on link classes for one byte of its size.

    ``busiest_load`` is what one group puts on its own busiest link, and ``alone_seconds`` the seconds that its bytes
    take when no other group runs: a class may stand for several groups that share links.
    """

    phase: Phase
    unit: FloatArray
    alone: FloatArray


class Row(NamedTuple):
    """One phase of a collective on one group class, for one byte of its size.

    ``latency`` are the seconds before bytes move, ``loads`` the bytes on link classes; ``launch`` and ``messages`` are
    as in `Phase`, ``busiest_load`` and ``alone_seconds`` as in `PhasePattern`.
    """

    latency: float
    launch: float | None
    messages: bool
    unit: float
    alone: float
    loads: tuple[tuple[int, float], ...]


class ClassTable:
    """The rank classes of a placed mesh, with its group classes and its link classes."""

    def __init__(self, placed: Placed, partition: Partition, loads: Loads, kinds: Sequence[Groups]) -> None:
        self.placed, self.cluster, self.mesh = placed, placed.cluster, placed.mesh
        self.class_of, self.first = _numbered(partition.ranks)
        self.link_class, self.first_link = _numbered(partition.links)
        self.link_count = np.bincount(self.link_class)
        self._groups_at: dict[str, dict[int, tuple[int, ...]]] = {}
        self._rows: dict[tuple[str, Collective, Algorithm], tuple[tuple[Row, ...], ...]] = {}
        self._possible: dict[tuple[str, Collective, int], tuple[Algorithm, ...]] = {}
        self._patterns: dict[tuple[str, Collective, Algorithm], tuple[Pattern, ...]] = {}
        self.tables: dict[str, GroupTable] = {}
        self._loads = loads
        self._near: dict[str, IntArray] = {}
        self._shape: dict[str, list[int]] = {}
        self._signatures: dict[str, tuple[int, ...]] = {}
        for kind, groups, colours in zip(loads.kinds, kinds, partition.groups, strict=True):
            self._add(kind, groups, colours)

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def bandwidth(self) -> list[float]:
        """Bandwidth in byte/s of one link of every link class."""
        rates: list[float] = self.network.bandwidth[self.first_link].tolist()
        return rates

    def _add(self, kind: str, groups: Groups, colours: Colours) -> None:
        """Add the groups of one kind with the classes that refinement has found."""
        class_of, first = _numbered(colours)
        members, devices = self.class_of[groups.members[first]].tolist(), self._loads.groups[kind].groups
        # Members of a whole group play the same part; in a pair the sender comes first, so that their order matters.
        whole = kind in GROUPS
        classes = tuple(tuple(sorted(set(row))) if whole else tuple(dict.fromkeys(row)) for row in members)
        self._near[kind] = _near(first, groups, self.network.num_links)
        self.tables[kind] = GroupTable(kind, devices, class_of, first, classes)

    @cached_property
    def network(self) -> Interconnect:
        """The links of the machine."""
        return interconnect(self.cluster)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every rank class."""
        return tuple(self.mesh.coordinate(int(rank), PIPELINE) for rank in self.first)

    @cached_property
    def by_position(self) -> tuple[tuple[int, ...], ...]:
        """The rank classes at every pipeline position."""
        rows: list[list[int]] = [[] for _ in range(self.mesh.size(PIPELINE))]
        for index, position in enumerate(self.positions):
            rows[position].append(index)
        return tuple(map(tuple, rows))

    def groups_at(self, kind: str, position: int) -> tuple[int, ...]:
        """Return the group classes of a kind whose first member is at a pipeline position."""
        if kind not in self._groups_at:
            rows: dict[int, list[int]] = {}
            for index, members in enumerate(self.tables[kind].classes):
                rows.setdefault(self.positions[members[0]], []).append(index)
            self._groups_at[kind] = {position: tuple(row) for position, row in rows.items()}
        return self._groups_at[kind].get(position, ())

    @cached_property
    def device_kinds(self) -> tuple[int, ...]:
        """A number for the accelerator and speed of every rank class: devices of equal numbers compute alike."""
        kinds: list[int] = self.cluster.device_kinds[self.placed.devices[self.first]].tolist()
        return tuple(kinds)

    @cached_property
    def group_of(self) -> dict[str, tuple[int, ...]]:
        """The group class of every rank class, for the kinds of `GROUPS`."""
        result = {}
        for kind in GROUPS:
            if kind in self.tables:
                table = self.tables[kind]
                found = [-1] * len(self)
                for index, members in enumerate(table.classes):
                    for member in members:
                        found[member] = index
                result[kind] = tuple(found)
        return result

    def rank_classes(self, positions: Sequence[int]) -> tuple[RankClass, ...]:
        """Return the rank classes with their pipeline stages; ``positions`` are the pipeline positions of stages."""
        order = np.argsort(self.class_of, kind="stable")
        ends = np.cumsum(np.bincount(self.class_of))
        members = np.split(order, ends[:-1])
        result: list[RankClass] = []
        for position, members_of in zip(self.positions, members, strict=True):
            stages = tuple(stage for stage, at in enumerate(positions) if at == position)
            among = self.by_position[position]
            # Looking up an index is slow in rows of thousands of classes: these are named by their first rank.
            suffix = f".{among.index(len(result))}" if 1 < len(among) < 1000 else f".{members_of[0]}"
            name = f"stage {','.join(map(str, stages))}" + (suffix if len(among) > 1 else "")
            result.append(RankClass(name, stages, tuple(members_of.tolist())))
        return tuple(result)

    def possible(self, kind: str, collective: Collective, index: int) -> tuple[Algorithm, ...]:
        """Return the algorithms that a group class may choose from: the user's choice alone where it can run."""
        key = (kind, collective, self._shapes(kind)[index])
        if key not in self._possible:
            self._possible[key] = self._loads.algorithms(kind, collective, int(self.tables[kind].first[index]))
        return self._possible[key]

    def _shapes(self, kind: str) -> list[int]:
        """Return, for every group class of a kind, the number of its shape: how its devices lie on nodes."""
        if kind not in self._shape:
            self._shape[kind] = self._loads.groups[kind].shape[self.tables[kind].first].tolist()
        return self._shape[kind]

    def signatures(self, kind: str) -> tuple[int, ...]:
        """Return a number for every group class of a kind, equal where collectives on idle links cost the same."""
        if kind not in self._signatures:
            table, loads = self.tables[kind], self._loads
            every = (self.pattern(kind, c, each) for c in loads.kinds[kind] for each in loads.candidates(kind, c))
            found = tuple(chain.from_iterable(every))
            nodes = self.cluster.device_nodes[table.devices[table.first]]
            self._signatures[kind] = tuple(_signatures(nodes, np.array(self.bandwidth), found).tolist())
        return self._signatures[kind]

    def users(self, kind: str, collective: Collective) -> tuple[IntArray, IntArray]:
        """Return which group classes of a kind may load which link classes, by any algorithm, as two sorted columns."""
        table = self.tables[kind]
        if measured_time(self.cluster, collective, table.devices.shape[1], 1.0) is not None:
            # A measured collective has a time of its own and puts nothing on links.
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        usable = {algorithm for index in range(len(table)) for algorithm in self.possible(kind, collective, index)}
        found = [p for a in Algorithm if a in usable for p in self.pattern(kind, collective, a)]
        return each_once([p.phase.group for p in found], [p.phase.link for p in found], len(self.first_link))

    def pattern(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[Pattern, ...]:
        """Return the phases of a collective for every group class of a kind.

        A link class carries the loads of all groups of the class on its first link, because they run at the same time.
        """
        key = (kind, collective, algorithm)
        if key not in self._patterns:
            table, near = self.tables[kind], self._near[kind]
            every = self._loads.phases(kind, collective, algorithm, near)
            class_of, first = table.class_of[near], np.searchsorted(near, table.first)
            self._patterns[key] = tuple(self._quotient(class_of, first, phase) for phase in every)
        return self._patterns[key]

    def rows(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[tuple[Row, ...], ...]:
        """Return the phases of a collective, each as one row per group class."""
        key = (kind, collective, algorithm)
        if key not in self._rows:
            self._rows[key] = tuple(_rows(pattern) for pattern in self.pattern(kind, collective, algorithm))
        return self._rows[key]

    def _quotient(self, class_of: IntArray, first: IntArray, phase: Phase) -> Pattern:
        """Return the loads of a phase by group class and link class, where all groups of a class add up on one link."""
        standing = np.zeros(len(class_of), dtype=bool)
        standing[first] = True
        own = np.flatnonzero(standing[phase.group])
        busiest, alone = np.zeros((2, len(class_of)))
        np.maximum.at(busiest, phase.group[own], phase.load[own])
        np.maximum.at(alone, phase.group[own], phase.load[own] / self.network.bandwidth[phase.link[own]])
        seen = np.zeros(self.network.num_links, dtype=bool)
        seen[phase.link[own]] = True  # on these the first groups stand for all
        chosen = np.flatnonzero(seen[phase.link])
        group, link = class_of[phase.group[chosen]], phase.link[chosen]
        order, starts = _runs(group * self.network.num_links + link)
        # First the loads of all groups of a class are summed on each link, then the busiest link of a class is taken.
        load = np.add.reduceat(phase.load[chosen][order], starts) if len(order) else phase.load[:0]
        group, link = group[order][starts], self.link_class[link[order][starts]]
        order, starts = _runs(group * len(self.first_link) + link)
        load = np.maximum.reduceat(load[order], starts) if len(order) else load
        launch = None if phase.launch is None else phase.launch[first]
        moved = Phase(phase.latency[first], group[order][starts], link[order][starts], load, launch, phase.messages)
        return Pattern(moved, busiest[first], alone[first])


def _near(first: IntArray, groups: Groups, num_links: int) -> IntArray:
    """Return the groups that share a link with the representative of a class, representatives included."""
    standing = np.zeros(len(groups.members), dtype=bool)
    standing[first] = True
    seen = np.zeros(num_links, dtype=bool)
    seen[groups.link[standing[groups.group]]] = True
    standing[groups.group[seen[groups.link]]] = True
    return np.flatnonzero(standing)


def each_once(first: Sequence[IntArray], second: Sequence[IntArray], width: int) -> tuple[IntArray, IntArray]:
    """Return all different pairs of two columns of numbers, sorted; those of the second column are below ``width``.

    >>> [column.tolist() for column in each_once([np.array([4, 1])], [np.array([0, 2])], 3)]
    [[1, 4], [2, 0]]
    """
    keys = np.concatenate(first) * width + np.concatenate(second)
    keys.sort()
    found = np.divmod(keys[np.diff(keys, prepend=-1) > 0], width)
    return found


def _rows(pattern: Pattern) -> tuple[Row, ...]:
    """Return one phase as one row per group class."""
    phase = pattern.phase
    loads = list(zip(phase.link.tolist(), phase.load.tolist(), strict=True))
    starts = phase.group.searchsorted(np.arange(len(phase.latency) + 1)).tolist()
    latency = phase.latency.round(18)  # to a millionth of a tick, where the order of sums does not show
    launch = [None] * len(latency) if phase.launch is None else phase.launch.round(18).tolist()
    own = (column.tolist() for column in (latency, pattern.unit, pattern.alone))
    each = zip(launch, *own, pairwise(starts), strict=True)
    return tuple(
        Row(latency, once, phase.messages, unit, alone, tuple(loads[s:e]))
        for once, latency, unit, alone, (s, e) in each
    )


def _runs(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return the order that sorts ``keys``, and the indices in it at which runs of equal keys start."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    return order, starts


def _numbered(colours: Colours) -> tuple[IntArray, IntArray]:
    """Return colours as numbers in order of first appearance, and the index at which each colour first appears."""
    earliest = first_equal(colours)
    fresh = earliest == np.arange(len(colours))
    return (np.cumsum(fresh) - 1)[earliest], np.flatnonzero(fresh)


def _signatures(nodes: IntArray, bandwidth: FloatArray, patterns: tuple[Pattern, ...]) -> Colours:
    """Return a number for every group class, equal where groups have the same spans of nodes, latencies and loads."""
    nodes = np.sort(nodes, axis=1)
    # Only where a group changes nodes counts, not which nodes these are.
    spans = mix(np.cumsum(np.diff(nodes, axis=1, prepend=nodes[:, :1]) != 0, axis=1) + 1)
    with np.errstate(over="ignore"):
        result = spans.sum(axis=1)
        for phase, _, alone in patterns:
            result = combine(combine(result, quantised(phase.latency)), quantised(alone))
            result = result if phase.launch is None else combine(result, quantised(phase.launch))
            np.add.at(result, phase.group, combine(quantised(bandwidth[phase.link]), quantised(phase.load)))
    return mix(result)


def fold(placed: Placed) -> ClassTable:
    """Return the coarsest rank classes that colour refinement finds stable."""
    loads = Loads(placed)
    kinds, twins = loads.coloured()
    return ClassTable(placed, refine(_first_colours(placed), kinds, loads.links(), twins), loads, kinds)


def unfolded(placed: Placed) -> ClassTable:
    """Return every rank, group and link in a class of its own: the reference that folding must equal."""
    loads = Loads(placed)
    kinds, _ = loads.coloured()
    ranks, links = (mix(np.arange(n)) for n in (placed.mesh.num_ranks, interconnect(placed.cluster).num_links))
    groups = tuple(mix(np.arange(len(kind.members))) for kind in kinds)
    return ClassTable(placed, Partition(ranks, groups, links), loads, kinds)


def _first_colours(placed: Placed) -> Colours:
    """Return the first colour of every rank, by its pipeline position, device and size of microbatches.

    A rank that serves parameters differs from others.
    """
    positions = placed.mesh.coordinates(PIPELINE)
    found = combine(mix(positions), mix(placed.cluster.device_kinds[placed.devices]))
    if placed.central:
        found = combine(found, mix(np.minimum(data_ranks(placed.mesh), 1)))
    return combine(found, mix(placed.sequences)) if placed.batches else found
