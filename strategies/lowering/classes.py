"""Rank classes: ranks that do the same at the same time, and groups and links that go with them.

`fold` finds the coarsest classes by colour refinement over ranks, groups and links;
`unfolded` gives every rank a class of its own, the reference that folding must equal.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.collective import Phase, able, candidates, fastest, measured_time, phases
from simulator.collective_kinds import Algorithm, Collective
from simulator.interconnect.interconnect import Interconnect, interconnect
from simulator.interconnect.kinds import Crossbar
from simulator.program import IntArray, RankClass
from strategies.lowering.offload import HOST_KINDS, host_phases
from strategies.lowering.refinement import Colours, FloatArray, Groups, Partition, combine, mix, quantised, refine
from strategies.mesh import CONTEXT, DATA, EXPERT, EXPERT_DATA, GROUPS, PIPELINE, TENSOR, Mesh

BoolArray = NDArray[np.bool_]
FORWARD, BACKWARD = "forward", "backward"
"""Kinds of pairs of neighbouring pipeline ranks, sender first; those of `GROUPS` are the kinds of whole groups."""

_USUAL = {
    TENSOR: Collective.ALL_REDUCE,
    CONTEXT: Collective.ALL_GATHER,
    EXPERT: Collective.ALL_TO_ALL,
    DATA: Collective.ALL_REDUCE,
    EXPERT_DATA: Collective.ALL_REDUCE,
    FORWARD: Collective.SEND,
    BACKWARD: Collective.SEND,
}


def tied_kind(first: int, second: int) -> str:
    """Return the kind of the pairs of ranks that keep one parameter at two pipeline positions."""
    return f"tied {first} {second}"


def tenant_kind(number: int) -> str:
    """Return the kind of group that a tenant of the cluster is."""
    return f"tenant {number}"


@dataclass(frozen=True)
class Placed:
    """A mesh on a machine: ``devices[rank]``; ``looped`` where the last stage sends to the first too,
    ``offloads`` where ranks exchange data with their hosts; ``tied`` are pipeline positions that keep
    one parameter.
    """

    cluster: Cluster
    mesh: Mesh
    placement: tuple[int, ...]
    looped: bool
    offloads: bool = False
    tied: tuple[tuple[int, int], ...] = ()

    @cached_property
    def devices(self) -> IntArray:
        """The device of every rank."""
        return np.array(self.placement or range(self.mesh.num_ranks), dtype=np.int64)

    def group_devices(self, kind: str) -> tuple[IntArray, IntArray]:
        """Return the groups of a kind as rows of ranks and of devices; a tenant's devices are no ranks."""
        if kind in HOST_KINDS:
            return np.arange(self.mesh.num_ranks)[:, None], self.devices[:, None]
        pairs = {tied_kind(first, second): [first, second] for first, second in self.tied}
        if kind in _USUAL or kind in pairs:
            ranks = self.groups(kind) if kind in _USUAL else self.mesh.rows(PIPELINE)[:, pairs[kind]]
            return ranks, self.devices[ranks]
        tenant = next(t for number, t in enumerate(self.cluster.tenants) if tenant_kind(number) == kind)
        return np.empty((1, 0), dtype=np.int64), np.array([tenant.devices], dtype=np.int64)

    def groups(self, kind: str) -> IntArray:
        """Return the groups of a kind, a row of ranks each; none where they would have one member."""
        if kind == EXPERT_DATA and self.mesh.size(EXPERT) == 1:
            return self.mesh.rows()  # the same groups as along data
        if kind in GROUPS:
            return self.mesh.rows(*GROUPS[kind])
        rows = self.mesh.rows(PIPELINE)
        if len(rows) == 0:
            return np.empty((0, 2), dtype=np.int64)
        after = np.roll(rows, -1, axis=1)
        keep = rows.shape[1] if self.looped else rows.shape[1] - 1
        pairs = np.stack([rows[:, :keep].ravel(), after[:, :keep].ravel()], axis=1)
        return pairs if kind == FORWARD else pairs[:, ::-1].copy()


@dataclass(frozen=True, eq=False)
class GroupTable:
    """The groups of one kind in classes: ``classes[i]`` names the rank classes of class ``i``'s members.

    ``devices`` are rows, one a group, ``class_of`` the class of each row, ``first`` the row that stands for
    a class. ``signature`` is equal where collectives cost the same when nothing contends.
    """

    kind: str
    devices: IntArray
    class_of: IntArray
    first: IntArray
    classes: tuple[tuple[int, ...], ...]
    signature: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.first)


class Pattern(NamedTuple):
    """One phase of a collective for every class of groups, on link classes, for one byte of its size.

    ``unit`` is what one group puts on its own busiest link: a class may stand for several that share links.
    """

    phase: Phase
    unit: FloatArray


class Row(NamedTuple):
    """One phase on one class of groups, for one byte: seconds before it, its unit, and bytes by link class."""

    latency: float
    unit: float
    loads: tuple[tuple[int, float], ...]


class ClassTable:
    """The rank classes of a placed mesh, its group classes and its link classes."""

    def __init__(self, placed: Placed, partition: Partition, loads: "Loads") -> None:
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
        for kind, colours in zip(loads.kinds, partition.groups, strict=True):
            self._add(kind, *placed.group_devices(kind), colours, loads.usual(kind))

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def bandwidth(self) -> list[float]:
        """Byte/s of one link of every link class."""
        rates: list[float] = self.network.bandwidth[self.first_link].tolist()
        return rates

    def _add(self, kind: str, ranks: IntArray, devices: IntArray, colours: Colours, pattern: tuple[Phase, ...]) -> None:
        class_of, first = _numbered(colours)
        members = self.class_of[ranks[first]].tolist()
        whole = kind in GROUPS
        classes = tuple(tuple(sorted(set(row))) if whole else tuple(row) for row in members)
        self._near[kind] = _near(first, pattern, self.network.num_links)
        quotient = tuple(self._quotient(class_of, first, phase) for phase in pattern)
        nodes = self.cluster.device_nodes[devices[first]]
        signature = _signatures(nodes, np.array(self.bandwidth), tuple(p.phase for p in quotient))
        self.tables[kind] = GroupTable(kind, devices, class_of, first, classes, tuple(signature.tolist()))

    @property
    def network(self) -> Interconnect:
        """The links of the machine."""
        return interconnect(self.cluster)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every class."""
        return tuple(self.mesh.coordinate(int(rank), PIPELINE) for rank in self.first)

    @cached_property
    def by_position(self) -> tuple[tuple[int, ...], ...]:
        """The classes at every pipeline position."""
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
        """For every class, a number for its accelerator and speed: equal numbers compute alike."""
        kinds: list[int] = self.cluster.device_kinds[self.placed.devices[self.first]].tolist()
        return tuple(kinds)

    @cached_property
    def group_of(self) -> dict[str, tuple[int, ...]]:
        """For the kinds of `GROUPS`, the group class of every rank class."""
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

    def rank_classes(self, num_stages: int) -> tuple[RankClass, ...]:
        """Return the classes with the pipeline stages they hold."""
        order = np.argsort(self.class_of, kind="stable")
        ends = np.cumsum(np.bincount(self.class_of))
        members = np.split(order, ends[:-1])
        ranks = self.mesh.size(PIPELINE)
        result: list[RankClass] = []
        for position, members_of in zip(self.positions, members, strict=True):
            stages = tuple(range(position, num_stages, ranks))
            among = self.by_position[position]
            suffix = f".{among.index(len(result))}" if 1 < len(among) < 1000 else f".{members_of[0]}"
            name = f"stage {','.join(map(str, stages))}" + (suffix if len(among) > 1 else "")
            result.append(RankClass(name, stages, tuple(members_of.tolist())))
        return tuple(result)

    def possible(self, kind: str, collective: Collective, index: int) -> tuple[Algorithm, ...]:
        """Return the algorithms to choose from for a group class: the one that the user has fixed, where it can run."""
        table = self.tables[kind]
        key = (kind, collective, table.signature[index])
        if key not in self._possible:
            self._possible[key] = self._loads.algorithms(kind, collective, int(table.first[index]))
        return self._possible[key]

    def users(self, kind: str, collective: Collective) -> tuple[IntArray, IntArray]:
        """Return which group classes of a kind may use which link classes, by any algorithm: pairs, sorted."""
        table = self.tables[kind]
        if measured_time(self.cluster, collective, table.devices.shape[1], 1.0) is not None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        usable = {algorithm for index in range(len(table)) for algorithm in self.possible(kind, collective, index)}
        found = [p for a in Algorithm if a in usable for p in self.pattern(kind, collective, a)]
        keys = np.unique(np.concatenate([p.phase.group * len(self.first_link) + p.phase.link for p in found]))
        return keys // len(self.first_link), keys % len(self.first_link)

    def pattern(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[Pattern, ...]:
        """Return the phases of a collective for every *class* of groups of a kind.

        A link class carries the loads of all groups of the class on its first link: they run at once.
        """
        key = (kind, collective, algorithm)
        if key not in self._patterns:
            table, near = self.tables[kind], self._near[kind]
            every = self._loads.phases(kind, collective, algorithm, near)
            class_of, first = table.class_of[near], np.searchsorted(near, table.first)
            self._patterns[key] = tuple(self._quotient(class_of, first, phase) for phase in every)
        return self._patterns[key]

    def rows(self, kind: str, collective: Collective, algorithm: Algorithm) -> tuple[tuple[Row, ...], ...]:
        """Return the same, phase by phase, as a row for every class of groups."""
        key = (kind, collective, algorithm)
        if key not in self._rows:
            self._rows[key] = tuple(_rows(pattern) for pattern in self.pattern(kind, collective, algorithm))
        return self._rows[key]

    def _quotient(self, class_of: IntArray, first: IntArray, phase: Phase) -> Pattern:
        """Return a phase's loads by group class and link class: all groups of a class add up on one link."""
        busiest = np.zeros(len(class_of))
        np.maximum.at(busiest, phase.group, phase.load)
        standing = np.zeros(len(class_of), dtype=bool)
        standing[first] = True
        seen = np.zeros(self.network.num_links, dtype=bool)
        seen[phase.link[standing[phase.group]]] = True  # on these the first groups stand for all
        chosen = np.flatnonzero(seen[phase.link])
        group, link = class_of[phase.group[chosen]], phase.link[chosen]
        order, starts = _runs(group * self.network.num_links + link)
        load = np.add.reduceat(phase.load[chosen][order], starts) if len(order) else phase.load[:0]
        group, link = group[order][starts], self.link_class[link[order][starts]]
        order, starts = _runs(group * len(self.first_link) + link)
        load = np.maximum.reduceat(load[order], starts) if len(order) else load
        return Pattern(Phase(phase.latency[first], group[order][starts], link[order][starts], load), busiest[first])


def _near(first: IntArray, pattern: tuple[Phase, ...], num_links: int) -> IntArray:
    """Return the groups that share a link with one that stands for a class, those themselves included."""
    seen = np.zeros(num_links, dtype=bool)
    standing = np.zeros(max(len(phase.latency) for phase in pattern) if pattern else int(first.max()) + 1, dtype=bool)
    standing[first] = True
    for phase in pattern:
        seen[phase.link[standing[phase.group]]] = True
    found = standing.copy()
    for phase in pattern:
        found[phase.group[seen[phase.link]]] = True
    return np.flatnonzero(found)


def _rows(pattern: Pattern) -> tuple[Row, ...]:
    phase = pattern.phase
    loads = list(zip(phase.link.tolist(), phase.load.tolist(), strict=True))
    starts = phase.group.searchsorted(np.arange(len(phase.latency) + 1)).tolist()
    each = zip(phase.latency.tolist(), pattern.unit.tolist(), pairwise(starts), strict=True)
    return tuple(Row(latency, unit, tuple(loads[start:end])) for latency, unit, (start, end) in each)


def _runs(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return the order that sorts ``keys``, and where each run of equal ones starts in it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    return order, starts


def _numbered(colours: Colours) -> tuple[IntArray, IntArray]:
    """Return colours as numbers in order of first appearance, and where each first appears."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order]


def _signatures(nodes: IntArray, bandwidth: FloatArray, pattern: tuple[Phase, ...]) -> Colours:
    """Return for every group class a number that is equal where the groups lie alike: nodes, hops and loads."""
    nodes = np.sort(nodes, axis=1)
    spans = mix(np.cumsum(np.diff(nodes, axis=1, prepend=nodes[:, :1]) != 0, axis=1) + 1)
    with np.errstate(over="ignore"):
        result = spans.sum(axis=1)
        for phase in pattern:
            result = combine(result, quantised(phase.latency))
            np.add.at(result, phase.group, combine(quantised(bandwidth[phase.link]), quantised(phase.load)))
    return mix(result)


class Loads:
    """What the groups of every kind put on links, group by group, computed once for each algorithm."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.cluster = placed, placed.cluster
        self.kinds: dict[str, Collective] = {}
        self._ranks: dict[str, IntArray] = {}
        self._devices: dict[str, IntArray] = {}
        self._usual: dict[str, tuple[Phase, ...]] = {}
        self._same: dict[str, bool] = {}
        self._able: dict[tuple[str, Collective, Algorithm], BoolArray] = {}
        tenants = {tenant_kind(number): t.collective for number, t in enumerate(placed.cluster.tenants)}
        copies = dict.fromkeys(HOST_KINDS if placed.offloads else (), Collective.SEND)
        tied = {tied_kind(first, second): Collective.ALL_REDUCE for first, second in placed.tied}
        for kind, collective in (_USUAL | tenants | copies | tied).items():
            ranks, devices = placed.group_devices(kind)
            if len(ranks):
                self.add(kind, collective, ranks, devices)

    def add(self, kind: str, collective: Collective, ranks: IntArray, devices: IntArray) -> None:
        """Make a kind of groups known, and what they usually run."""
        self.kinds[kind], self._ranks[kind], self._devices[kind] = collective, ranks, devices

    def algorithms(self, kind: str, collective: Collective, group: int) -> tuple[Algorithm, ...]:
        """Return the algorithms to choose from for a group: the one that the user has fixed, where it can run."""
        found = tuple(a for a in self._candidates(kind, collective) if self._runs(kind, collective, a)[group])
        fixed = dict(self.cluster.algorithms).get(collective)
        return (fixed,) if fixed in found else found

    def phases(
        self, kind: str, collective: Collective, algorithm: Algorithm, groups: IntArray | None = None
    ) -> tuple[Phase, ...]:
        """Return the phases of a collective on some groups of a kind, or all; those that cannot run it have no rows."""
        chosen = slice(None) if groups is None else groups
        devices, runs = self._devices[kind][chosen], self._runs(kind, collective, algorithm)[chosen]
        if kind in HOST_KINDS:
            return host_phases(self.cluster, kind, devices)
        if runs.all():
            return phases(self.cluster, collective, algorithm, devices)
        some = phases(self.cluster, collective, algorithm, devices[runs])
        return tuple(_spread(phase, np.flatnonzero(runs), len(runs)) for phase in some)

    def usual(self, kind: str) -> tuple[Phase, ...]:
        """Return the phases of what a kind usually runs, by every algorithm that may be chosen."""
        if kind not in self._usual:
            collective = self.kinds[kind]
            found = (self.phases(kind, collective, algorithm) for algorithm in self._candidates(kind, collective))
            self._usual[kind] = tuple(phase for phases in found for phase in phases)
        return self._usual[kind]

    def groups(self) -> list[Groups]:
        """Return all kinds of groups for refinement."""
        return [
            _coloured(number, self._ranks[kind], kind in (FORWARD, BACKWARD), self.usual(kind))
            for number, kind in enumerate(self.kinds)
        ]

    def _candidates(self, kind: str, collective: Collective) -> tuple[Algorithm, ...]:
        """Return the algorithms that may be chosen for some group of a kind."""
        if kind in HOST_KINDS:
            return (Algorithm.DIRECT,)
        if self._alike(kind):
            return fastest(self.cluster, collective, self._devices[kind][0])
        every = candidates(self.cluster, collective)
        return tuple(algorithm for algorithm in every if self._runs(kind, collective, algorithm).any())

    def _alike(self, kind: str) -> bool:
        """Return whether all groups of a kind have as many ranks on each of their nodes, of equal nodes."""
        if kind not in self._same:
            nodes = np.sort(self.cluster.device_nodes[self._devices[kind]], axis=1)
            turns = np.diff(nodes, axis=1) != 0
            equal = len(self.cluster.nodes) == 1 and not self.cluster.link_speeds
            self._same[kind] = equal and isinstance(self.cluster.fabric, Crossbar) and bool((turns == turns[0]).all())
        return self._same[kind]

    def _runs(self, kind: str, collective: Collective, algorithm: Algorithm) -> BoolArray:
        key = (kind, collective, algorithm)
        if key not in self._able:
            devices = self._devices[kind]
            copies = kind in HOST_KINDS
            every = np.ones(len(devices), dtype=np.bool_)
            self._able[key] = every if copies else able(self.cluster, collective, algorithm, devices)
        return self._able[key]


def _spread(phase: Phase, groups: IntArray, count: int) -> Phase:
    """Return a phase of some groups as one of all ``count`` of them."""
    latency = np.zeros(count)
    latency[groups] = phase.latency
    return Phase(latency, groups[phase.group], phase.link, phase.load)


def fold(placed: Placed) -> ClassTable:
    """Return the coarsest classes that colour refinement finds stable."""
    loads = Loads(placed)
    network = interconnect(placed.cluster)
    return ClassTable(placed, refine(_first_colours(placed), loads.groups(), quantised(network.bandwidth)), loads)


def unfolded(placed: Placed) -> ClassTable:
    """Return every rank, group and link in a class of its own: the reference that folding must equal."""
    loads = Loads(placed)
    ranks, links = (mix(np.arange(n)) for n in (placed.mesh.num_ranks, interconnect(placed.cluster).num_links))
    groups = tuple(mix(np.arange(len(kind.members))) for kind in loads.groups())
    return ClassTable(placed, Partition(ranks, groups, links), loads)


def _first_colours(placed: Placed) -> Colours:
    """Return what each rank is: its pipeline position and its device."""
    positions = placed.mesh.coordinates(PIPELINE)
    return combine(mix(positions), mix(placed.cluster.device_kinds[placed.devices]))


def _coloured(number: int, members: IntArray, ordered: bool, pattern: tuple[Phase, ...]) -> Groups:
    """Return groups whose first colours say their kind and their latencies."""
    colour = np.full(len(members), number, dtype=np.uint64)
    weights = []
    for index, phase in enumerate(pattern):
        colour = combine(colour, quantised(phase.latency))
        weights.append(combine(quantised(phase.load), np.full(len(phase.load), index, dtype=np.uint64)))
    group, link = (np.concatenate([getattr(phase, name) for phase in pattern]) for name in ("group", "link"))
    return Groups(members, ordered, group, link, np.concatenate(weights), colour)
