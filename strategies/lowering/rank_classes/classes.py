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
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray, RankClass
from meshwise.strategies.lowering.rank_classes.placement import GroupLoads, PlacedMesh
from meshwise.strategies.lowering.rank_classes.refinement import (
    Colours,
    FloatArray,
    Groups,
    Partition,
    combine,
    find_first_equal,
    mix,
    quantise,
    refine,
)
from meshwise.strategies.plan.mesh import GROUPS, PIPELINE, TABLE_NODE, list_data_ranks
from meshwise.strategies.plan.offloading import HOST_KINDS


@dataclass(frozen=True, eq=False)
class GroupTable:
    """The groups of one kind, and their group classes.

    ``devices`` has one row of devices per group, ``class_of`` the group class of each row, ``representatives`` the row
    that stands for each group class, and ``classes[i]`` the rank classes of the members of group class ``i``.
    """

    kind: str
    devices: IntArray
    class_of: IntArray
    representatives: IntArray
    classes: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.representatives)


class PhasePattern(NamedTuple):
    """One phase of a collective for every group class: latencies, and loads on link classes for one byte of its size.

    ``busiest_load`` is what one group puts on its own busiest link, and ``alone_seconds`` the seconds that its bytes
    take when no other group runs: a class may stand for several groups that share links.
    """

    phase: Phase
    busiest_load: FloatArray
    alone_seconds: FloatArray


class PhaseRow(NamedTuple):
    """One phase of a collective on one group class, for one byte of its size.

    ``latency`` are the seconds before bytes move, ``loads`` the bytes on link classes; ``launch`` and ``messages`` are
    as in `Phase`, ``busiest_load`` and ``alone_seconds`` as in `PhasePattern`.
    """

    latency: float
    launch: float | None
    messages: bool
    busiest_load: float
    alone_seconds: float
    loads: tuple[tuple[int, float], ...]


class ClassTable:
    """The rank classes of a placed mesh, with its group classes and its link classes."""

    def __init__(self, placed: PlacedMesh, partition: Partition, loads: GroupLoads, kinds: Sequence[Groups]) -> None:
        self.placed, self.cluster, self.mesh = placed, placed.cluster, placed.mesh
        self.class_of, self.representatives = _number_colours(partition.ranks)
        link_class, self.link_representatives = _number_colours(partition.links)
        self.link_class = link_class.astype(np.int32)  # the longest array, of which a search keeps hundreds
        self.link_count = np.bincount(self.link_class)
        self.tables: dict[str, GroupTable] = {}
        self._loads = loads
        self._sharers: dict[str, IntArray] = {}
        for kind, groups, colours in zip(loads.collectives, kinds, partition.groups, strict=True):
            self._add_groups(kind, groups, colours)

    def __len__(self) -> int:
        return len(self.representatives)

    @cached_property
    def bandwidth(self) -> list[float]:
        """Bandwidth in byte/s of one link of every link class."""
        rates: list[float] = self.network.bandwidth[self.link_representatives].tolist()
        return rates

    def _add_groups(self, kind: str, groups: Groups, colours: Colours) -> None:
        """Add the groups of one kind with the classes that refinement has found."""
        class_of, representatives = _number_colours(colours)
        members, devices = self.class_of[groups.members[representatives]].tolist(), self._loads.groups[kind].groups
        # Members of a whole group play the same part; in a pair the sender comes first, so that their order matters.
        is_whole = kind in GROUPS
        classes = tuple(tuple(sorted(set(row))) if is_whole else tuple(dict.fromkeys(row)) for row in members)
        self._sharers[kind] = _find_sharers(representatives, groups, self.network.num_links)
        self.tables[kind] = GroupTable(kind, devices, class_of, representatives, classes)

    @cached_property
    def network(self) -> Interconnect:
        """The links of the machine."""
        return interconnect(self.cluster)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every rank class."""
        return tuple(self.mesh.coordinate(int(rank), PIPELINE) for rank in self.representatives)

    @cached_property
    def by_position(self) -> tuple[tuple[int, ...], ...]:
        """The rank classes at every pipeline position."""
        rows: list[list[int]] = [[] for _ in range(self.mesh.size(PIPELINE))]
        for index, position in enumerate(self.positions):
            rows[position].append(index)
        return tuple(map(tuple, rows))

    def groups_at(self, kind: str, position: int) -> tuple[int, ...]:
        """Return the group classes of a kind whose first member is at a pipeline position."""
        return self._list_groups_by_position(kind).get(position, ())

    @memoise
    def _list_groups_by_position(self, kind: str) -> dict[int, tuple[int, ...]]:
        rows: dict[int, list[int]] = {}
        for index, members in enumerate(self.tables[kind].classes):
            rows.setdefault(self.positions[members[0]], []).append(index)
        return {position: tuple(row) for position, row in rows.items()}

    @cached_property
    def device_kinds(self) -> tuple[int, ...]:
        """A number for the accelerator and speed of every rank class: devices of equal numbers compute alike."""
        kinds: list[int] = self.cluster.device_kinds[self.placed.devices[self.representatives]].tolist()
        return tuple(kinds)

    @cached_property
    def group_of(self) -> dict[str, tuple[int, ...]]:
        """The group class of every rank class, for the kinds of groups that run passes or share states."""
        result = {}
        for kind in (*GROUPS, TABLE_NODE, *HOST_KINDS):
            if kind in self.tables:
                table = self.tables[kind]
                group_classes = [-1] * len(self)
                for index, members in enumerate(table.classes):
                    for member in members:
                        group_classes[member] = index
                result[kind] = tuple(group_classes)
        return result

    def list_rank_classes(self, positions: Sequence[int]) -> tuple[RankClass, ...]:
        """Return the rank classes with their pipeline stages; ``positions`` are the pipeline positions of stages."""
        order = np.argsort(self.class_of, kind="stable")
        ends = np.cumsum(np.bincount(self.class_of))
        members = np.split(order, ends[:-1])
        result: list[RankClass] = []
        for position, ranks in zip(self.positions, members, strict=True):
            stages = tuple(stage for stage, stage_position in enumerate(positions) if stage_position == position)
            position_classes = self.by_position[position]
            # Looking up an index is slow in rows of thousands of classes: these are named by their first rank.
            suffix = f".{position_classes.index(len(result))}" if 1 < len(position_classes) < 1000 else f".{ranks[0]}"
            name = f"stage {','.join(map(str, stages))}" + (suffix if len(position_classes) > 1 else "")
            result.append(RankClass(name, stages, tuple(ranks.tolist())))
        return tuple(result)

    def list_algorithms(self, kind: str, collective: Collective, index: int) -> tuple[Algorithm, ...]:
        """Return the algorithms that a group class may choose from: the user's choice alone where it can run."""
        return self._loads.list_algorithms(kind, collective, self._list_shapes(kind)[index])

    @memoise
    def _list_shapes(self, kind: str) -> list[int]:
        """Return, for every group class of a kind, the number of its shape: how its devices lie on nodes."""
        shapes: list[int] = self._loads.groups[kind].shape[self.tables[kind].representatives].tolist()
        return shapes

    @memoise
    def list_signatures(self, kind: str) -> tuple[int, ...]:
        """Return a number for every group class of a kind, equal where collectives on idle links cost the same."""
        table, loads = self.tables[kind], self._loads
        pattern_lists = (
            self.list_patterns(kind, collective, algorithm)
            for collective in loads.collectives[kind]
            for algorithm in loads.list_candidates(kind, collective)
        )
        patterns = tuple(chain.from_iterable(pattern_lists))
        nodes = self.cluster.device_nodes[table.devices[table.representatives]]
        return tuple(_compute_signatures(nodes, np.array(self.bandwidth), patterns).tolist())

    def find_users(self, kind: str, collective: Collective) -> tuple[IntArray, IntArray]:
        """Return which group classes of a kind may load which link classes, by any algorithm, as two sorted columns."""
        table = self.tables[kind]
        if measured_time(self.cluster, collective, table.devices.shape[1], 1.0) is not None:
            # A measured collective has a time of its own and puts nothing on links.
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        usable_algorithms = {
            algorithm for index in range(len(table)) for algorithm in self.list_algorithms(kind, collective, index)
        }
        patterns = [
            pattern
            for candidate in Algorithm
            if candidate in usable_algorithms
            for pattern in self.list_patterns(kind, collective, candidate)
        ]
        return find_unique_pairs(
            [pattern.phase.group for pattern in patterns],
            [pattern.phase.link for pattern in patterns],
            len(self.link_representatives),
        )

    @memoise
    def list_patterns(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[PhasePattern, ...]:
        """Return the phases of a collective for every group class of a kind.

        A link class carries the loads of all groups of the class on its first link, because they run at the same time.
        """
        table, sharers = self.tables[kind], self._sharers[kind]
        phases = self._loads.list_phases(kind, collective, algorithm, sharers)
        class_of, representatives = table.class_of[sharers], np.searchsorted(sharers, table.representatives)
        return tuple(self._fold_phase(class_of, representatives, phase) for phase in phases)

    @memoise
    def list_rows(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[tuple[PhaseRow, ...], ...]:
        """Return the phases of a collective, each as one row per group class."""
        return tuple(_build_rows(pattern) for pattern in self.list_patterns(kind, collective, algorithm))

    def _fold_phase(self, class_of: IntArray, representatives: IntArray, phase: Phase) -> PhasePattern:
        """Return the loads of a phase by group class and link class, where all groups of a class add up on one link."""
        is_representative = np.zeros(len(class_of), dtype=bool)
        is_representative[representatives] = True
        own_entries = np.flatnonzero(is_representative[phase.group])
        busiest_load, alone_seconds = np.zeros((2, len(class_of)))
        np.maximum.at(busiest_load, phase.group[own_entries], phase.load[own_entries])
        np.maximum.at(
            alone_seconds,
            phase.group[own_entries],
            phase.load[own_entries] / self.network.bandwidth[phase.link[own_entries]],
        )
        is_seen = np.zeros(self.network.num_links, dtype=bool)
        is_seen[phase.link[own_entries]] = True  # on these the first groups stand for all
        entries = np.flatnonzero(is_seen[phase.link])
        group, link = class_of[phase.group[entries]], phase.link[entries]
        order, starts = _sort_runs(group * self.network.num_links + link)
        # First the loads of all groups of a class are summed on each link, then the busiest link of a class is taken.
        load = np.add.reduceat(phase.load[entries][order], starts) if len(order) else phase.load[:0]
        group, link = group[order][starts], self.link_class[link[order][starts]].astype(np.int64)
        order, starts = _sort_runs(group * len(self.link_representatives) + link)
        load = np.maximum.reduceat(load[order], starts) if len(order) else load
        launch = None if phase.launch is None else phase.launch[representatives]
        folded_phase = Phase(
            phase.latency[representatives], group[order][starts], link[order][starts], load, launch, phase.messages
        )
        return PhasePattern(folded_phase, busiest_load[representatives], alone_seconds[representatives])


def _find_sharers(representatives: IntArray, groups: Groups, num_links: int) -> IntArray:
    """Return the groups that share a link with the representative of a class, representatives included."""
    is_included = np.zeros(len(groups.members), dtype=bool)
    is_included[representatives] = True
    is_loaded = np.zeros(num_links, dtype=bool)
    is_loaded[groups.link[is_included[groups.group]]] = True
    is_included[groups.group[is_loaded[groups.link]]] = True
    return np.flatnonzero(is_included)


def find_unique_pairs(
    first_column: Sequence[IntArray], second_column: Sequence[IntArray], width: int
) -> tuple[IntArray, IntArray]:
    """Return all different pairs of two columns of numbers, sorted; those of the second column are below ``width``.

    >>> [column.tolist() for column in find_unique_pairs([np.array([4, 1])], [np.array([0, 2])], 3)]
    [[1, 4], [2, 0]]
    """
    keys = np.concatenate(first_column) * width + np.concatenate(second_column)
    keys.sort()
    pairs = np.divmod(keys[np.diff(keys, prepend=-1) > 0], width)
    return pairs


def _build_rows(pattern: PhasePattern) -> tuple[PhaseRow, ...]:
    """Return one phase as one row per group class."""
    phase = pattern.phase
    loads = list(zip(phase.link.tolist(), phase.load.tolist(), strict=True))
    starts = phase.group.searchsorted(np.arange(len(phase.latency) + 1)).tolist()
    latency = phase.latency.round(18)  # to a millionth of a tick, where the order of sums does not show
    launch = [None] * len(latency) if phase.launch is None else phase.launch.round(18).tolist()
    float_columns = (column.tolist() for column in (latency, pattern.busiest_load, pattern.alone_seconds))
    columns = zip(launch, *float_columns, pairwise(starts), strict=True)
    return tuple(
        PhaseRow(latency, row_launch, phase.messages, busiest_load, alone_seconds, tuple(loads[start:end]))
        for row_launch, latency, busiest_load, alone_seconds, (start, end) in columns
    )


def _sort_runs(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return the order that sorts ``keys``, and the indices in it at which runs of equal keys start."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])) if len(keys) else order
    return order, starts


def _number_colours(colours: Colours) -> tuple[IntArray, IntArray]:
    """Return colours as numbers in order of first appearance, and the index at which each colour first appears."""
    earliest = find_first_equal(colours)
    is_new = earliest == np.arange(len(colours))
    return (np.cumsum(is_new) - 1)[earliest], np.flatnonzero(is_new)


def _compute_signatures(nodes: IntArray, bandwidth: FloatArray, patterns: tuple[PhasePattern, ...]) -> Colours:
    """Return a number for every group class, equal where groups have the same spans of nodes, latencies and loads."""
    nodes = np.sort(nodes, axis=1)
    # Only where a group changes nodes counts, not which nodes these are.
    spans = mix(np.cumsum(np.diff(nodes, axis=1, prepend=nodes[:, :1]) != 0, axis=1) + 1)
    with np.errstate(over="ignore"):
        result = spans.sum(axis=1)
        for phase, _, alone_seconds in patterns:
            result = combine(combine(result, quantise(phase.latency)), quantise(alone_seconds))
            result = result if phase.launch is None else combine(result, quantise(phase.launch))
            np.add.at(result, phase.group, combine(quantise(bandwidth[phase.link]), quantise(phase.load)))
    return mix(result)


def fold(placed: PlacedMesh) -> ClassTable:
    """Return the coarsest rank classes that colour refinement finds stable."""
    loads = GroupLoads(placed)
    kinds, twins = loads.colour_groups()
    return ClassTable(placed, refine(_colour_ranks(placed), kinds, loads.colour_links(), twins), loads, kinds)


def unfold(placed: PlacedMesh) -> ClassTable:
    """Return every rank, group and link in a class of its own: the reference that folding must equal."""
    loads = GroupLoads(placed)
    kinds, _ = loads.colour_groups()
    ranks, links = (mix(np.arange(n)) for n in (placed.mesh.num_ranks, interconnect(placed.cluster).num_links))
    groups = tuple(mix(np.arange(len(kind.members))) for kind in kinds)
    return ClassTable(placed, Partition(ranks, groups, links), loads, kinds)


def _colour_ranks(placed: PlacedMesh) -> Colours:
    """Return the first colour of every rank, by its pipeline position, device and size of microbatches.

    A rank that serves parameters differs from others, and so do data ranks that are simulated apart.
    """
    positions = placed.mesh.coordinates(PIPELINE)
    colours = combine(mix(positions), mix(placed.cluster.device_kinds[placed.devices]))
    if placed.central or placed.apart:
        data_ranks = list_data_ranks(placed.mesh)
        colours = combine(colours, mix(data_ranks if placed.apart else np.minimum(data_ranks, 1)))
    return combine(colours, mix(placed.sequences)) if placed.batches else colours
