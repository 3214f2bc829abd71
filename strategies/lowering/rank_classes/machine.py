"""The machine as a placed mesh sees it: rank classes with their communicators.

A communicator says what the collectives of one group class cost and what they put on links. Other jobs on the same
network are flows that repeat.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import measured_time
from meshwise.simulator.engine.flows import ticks_at
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.program import Background, Flow
from meshwise.simulator.units import TICKS_PER_SECOND, to_ticks
from meshwise.strategies.lowering.rank_classes.classes import ClassTable, Row
from meshwise.strategies.lowering.rank_classes.numbers import Numbers
from meshwise.strategies.lowering.rank_classes.placement import BACKWARD, FORWARD, NORM, tenant_kind, tied_kind
from meshwise.strategies.plan.mesh import CONTEXT, DATA, EXPERT, EXPERT_DATA, TENSOR, TENSOR_DEPTH, TENSOR_ROWS


class Leg(NamedTuple):
    """One phase of a communication: ticks before its bytes move, ticks in all on idle links, and the bytes by link."""

    latency: int
    ticks: int
    flow: Flow


class Communicator:
    """The collectives of one group class in ticks and flows, each computed once.

    Links are link classes of the `ClassTable`.
    """

    def __init__(self, table: ClassTable, kind: str, index: int) -> None:
        self.table, self.kind, self.index = table, kind, index
        self.size = table.tables[kind].devices.shape[1]
        self._legs: dict[tuple[Collective, float], tuple[Leg, ...]] = {}

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.table.cluster

    def legs(self, collective: Collective, size: float) -> tuple[Leg, ...]:
        """Return the phases of a collective of ``size`` bytes, by the algorithm that is fastest on idle links."""
        key = (collective, size)
        if key not in self._legs:
            self._legs[key] = self._fastest(collective, size)
        return self._legs[key]

    def ticks(self, collective: Collective, size: float) -> int:
        """Return the ticks of a collective with which nothing contends."""
        return sum(leg.ticks for leg in self.legs(collective, size))

    def _fastest(self, collective: Collective, size: float) -> tuple[Leg, ...]:
        """Return the phases of a collective by its measured time, or else by the fastest algorithm."""
        if size <= 0:
            return ()
        measured = measured_time(self.cluster, collective, self.size, size)
        if measured is not None:
            ticks = to_ticks(measured)
            return (Leg(ticks, ticks, Flow(())),)
        possible = self.table.possible(self.kind, collective, self.index)
        ways = [self._rows(collective, algorithm) for algorithm in possible]
        fastest = min(ways, key=lambda rows: sum(self._alone(row, size)[0] for row in rows)) if ways[1:] else ways[0]
        return tuple(self._leg(row, size) for row in fastest)

    def _rows(self, collective: Collective, algorithm: Algorithm) -> list[Row]:
        """Return the phases of a collective on this group class by one algorithm."""
        return [row[self.index] for row in self.table.rows(self.kind, collective, algorithm)]

    def _alone(self, row: Row, size: float) -> tuple[int, float, float]:
        """Return the ticks of a phase of one group on idle links, as a library knows them when it chooses a protocol.

        With them come the latency of that protocol in seconds, and the bytes on links for each byte of the phase.
        """
        ways = self.cluster.library.ways(row.latency, row.launch, row.messages)
        return min((_ticks(latency, size * moved, row.alone), latency, moved) for latency, moved in ways)

    def _leg(self, row: Row, size: float) -> Leg:
        """Return one phase of ``size`` bytes with all groups of the class at once."""
        _, latency, moved = self._alone(row, size)
        size *= moved
        unit, loads = row.unit, row.loads
        waiting, capacity = to_ticks(latency), self.table.bandwidth
        usage = tuple([(link, load * size) for link, load in loads])
        seconds = max([carried / capacity[link] for link, carried in usage], default=0.0)
        if not seconds:
            return Leg(waiting, waiting, Flow(usage, unit * size))
        one = unit * size or max(carried for _, carried in usage)
        return Leg(waiting, waiting + ticks_at(one * TICKS_PER_SECOND, one / seconds), Flow(usage, unit * size))


def _ticks(latency: float, size: float, seconds_per_byte: float) -> int:
    """Return the ticks of ``size`` bytes after a latency in seconds."""
    moving = ticks_at(size * TICKS_PER_SECOND, 1 / seconds_per_byte) if seconds_per_byte else 0
    return to_ticks(latency) + moving


INSIDE = {
    TENSOR: (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    TENSOR_ROWS: (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE),
    TENSOR_DEPTH: (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE),
    CONTEXT: (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.SHIFT),
    EXPERT: (Collective.ALL_TO_ALL,),
}
"""The collectives that groups of each kind run inside passes."""


class Rank(NamedTuple):
    """What the costs of a rank depend on: its device, its host's launch time in seconds, and its groups inside passes.

    ``groups`` are by mesh axis, and ``batch`` is the number of sequences of its microbatches, 0 where all ranks have
    those of the plan. Ranks of equal ``key`` have equal costs.
    """

    key: tuple[int, tuple[int, ...], float, int]
    accelerator: Accelerator
    launch: float
    groups: dict[str, Communicator]
    batch: int = 0


class Machine:
    """The rank classes of one placed mesh with their communicators, each built once.

    ``costs`` numbers what the costs of groups depend on, for all machines whose ranks are compared.
    """

    def __init__(self, table: ClassTable, costs: Numbers[object]) -> None:
        self.table = table
        self._costs = costs
        self._communicators: dict[tuple[str, int], Communicator] = {}
        self._inside: dict[tuple[str, int], tuple[Communicator, int]] = {}
        self._ranks: dict[int, Rank] = {}
        self._alike: dict[tuple[str, Collective], tuple[int, ...]] = {}
        self._different: dict[tuple[str, Collective], tuple[tuple[int, ...], ...]] = {}

    def communicator(self, kind: str, index: int) -> Communicator:
        """Return the communicator of a group class."""
        if (kind, index) not in self._communicators:
            self._communicators[kind, index] = Communicator(self.table, kind, index)
        return self._communicators[kind, index]

    def group(self, kind: str, rank_class: int) -> Communicator | None:
        """Return the communicator of a rank class's group of a kind, or ``None`` where it has none."""
        groups = self.table.group_of.get(kind)
        return self.communicator(kind, groups[rank_class]) if groups else None

    def rank(self, rank_class: int) -> Rank:
        """Return what the costs of a rank class depend on."""
        if rank_class not in self._ranks:
            table = self.table
            device = int(table.placed.devices[table.first[rank_class]])
            inside = {kind: self._inside_of(kind, rank_class) for kind in INSIDE if kind in table.tables}
            launch = table.cluster.node_kind(device).host.launch
            batch = int(table.placed.sequences[table.first[rank_class]])
            key = (table.device_kinds[rank_class], tuple(costs for _, costs in inside.values()), launch, batch)
            groups = {kind: group for kind, (group, _) in inside.items()}
            self._ranks[rank_class] = Rank(key, table.cluster.accelerator_of(device), launch, groups, batch)
        return self._ranks[rank_class]

    def batch(self, kind: str, group: int) -> int:
        """Return the sequences of a microbatch on the ranks of a group class; 0 where all ranks have as many."""
        return self.rank(self.table.tables[kind].classes[group][0]).batch

    @cached_property
    def ranks(self) -> tuple[tuple[Rank, ...], ...]:
        """For every pipeline position, what the costs of its rank classes depend on, equal ones once."""
        rows = ((self.rank(index) for index in classes) for classes in self.table.by_position)
        return tuple(tuple({rank.key: rank for rank in row}.values()) for row in rows)

    def _inside_of(self, kind: str, rank_class: int) -> tuple[Communicator, int]:
        """Return the first group of a kind that lies as a rank class's own group does, and a number for its costs."""
        group = self.table.group_of[kind][rank_class]
        # Groups of one signature cost the same on idle links.
        key = (kind, self.table.signatures(kind)[group])
        if key not in self._inside:
            depends = tuple(self._depends(kind, collective, (group,)) for collective in self._runs(kind))
            self._inside[key] = self.communicator(kind, group), self._costs.of((kind, depends))
        return self._inside[key]

    def _runs(self, kind: str) -> tuple[Collective, ...]:
        """Return the collectives that groups of a kind run inside passes."""
        besides = self.table.placed.exchanges.get(kind)
        return INSIDE[kind] if besides is None or besides in INSIDE[kind] else (*INSIDE[kind], besides)

    def least_ticks(self, kind: str, groups: tuple[int, ...], collective: Collective, size: float) -> int:
        """Return the least ticks of a collective over some group classes of a kind."""
        return min(self.communicator(kind, group).ticks(collective, size) for group in groups)

    def different(self, kind: str, collective: Collective) -> tuple[tuple[int, ...], ...]:
        """Return, for every pipeline position, its group classes of a kind whose collectives differ in cost."""
        if (kind, collective) not in self._different:
            alike = self.alike(kind, collective)
            positions = range(len(self.table.by_position))
            rows = (dict.fromkeys(alike[group] for group in self.table.groups_at(kind, q)) for q in positions)
            self._different[kind, collective] = tuple(map(tuple, rows))
        return self._different[kind, collective]

    def alike(self, kind: str, collective: Collective) -> tuple[int, ...]:
        """Return, for every group class of a kind, the first one whose collective takes the same ticks for any size."""
        if (kind, collective) not in self._alike:
            first: dict[object, int] = {}
            groups = range(len(self.table.tables[kind]))
            depends = self._depends(kind, collective, groups) if len(groups) > 1 else groups
            self._alike[kind, collective] = tuple(first.setdefault(key, index) for index, key in enumerate(depends))
        return self._alike[kind, collective]

    @cached_property
    def launches(self) -> bool:
        """Whether some host takes time to launch a kernel."""
        return any(self.rank(index).launch for index in range(len(self.table)))

    @cached_property
    def uniform(self) -> bool:
        """Whether every position has one rank class and one group class, all ranks compute alike and no host launches.

        Ranks with microbatches of different sizes never do.
        """
        table = self.table
        if table.placed.batches or any(len(classes) > 1 for classes in table.by_position):
            return False
        tied = (tied_kind(first, second) for first, second in table.placed.tied)
        usual = (*INSIDE, DATA, EXPERT_DATA, FORWARD, BACKWARD, NORM)
        kinds = [kind for kind in (*usual, *tied) if kind in table.tables]
        ranks = {self.rank(index).key: self.rank(index).launch for index in range(len(table))}
        single = all(len(table.groups_at(kind, q)) <= 1 for kind in kinds for q in range(len(table.by_position)))
        # A list of zeros says that every group costs as much as the first one.
        inside = (self.alike(kind, each) for kind in INSIDE if kind in kinds for each in self._runs(kind))
        return single and len(ranks) == 1 and not any(ranks.values()) and not any(map(any, inside))

    def _depends(self, kind: str, collective: Collective, groups: Iterable[int]) -> tuple[object, ...]:
        """Return, for each of some group classes, what the ticks of a collective depend on besides its size."""
        table, groups = self.table, tuple(groups)
        members = table.tables[kind].devices.shape[1]
        if measured_time(table.cluster, collective, members, 1.0) is not None:
            # A measured time holds for groups of this size wherever they lie.
            return (None,) * len(groups)
        possible = [table.possible(kind, collective, group) for group in groups]
        usable = {algorithm for each in possible for algorithm in each}
        phases = [p for a in Algorithm if a in usable for p in table.rows(kind, collective, a)]
        return tuple(
            (able, *(self._row(p[group]) for p in phases)) for able, group in zip(possible, groups, strict=True)
        )

    def _row(self, row: Row) -> tuple[object, ...]:
        """Return a phase's latency, launch, seconds alone and its different pairs of bytes and byte/s of a link."""
        rates = self.table.bandwidth
        return (
            row.latency,
            row.launch,
            row.messages,
            row.alone,
            tuple(sorted({(load, rates[link]) for link, load in row.loads})),
        )


def background(table: ClassTable) -> tuple[Background, ...]:
    """Return the exchanges of every tenant of the cluster as flows on link classes."""
    result = []
    for number, tenant in enumerate(table.cluster.tenants):
        legs = Communicator(table, tenant_kind(number), 0).legs(tenant.collective, tenant.size)
        usage: dict[int, float] = {}
        for leg in legs:
            for link, moved in leg.flow.usage:
                usage[link] = usage.get(link, 0.0) + moved
        latency = sum(leg.latency for leg in legs)
        flow = Flow(tuple(usage.items()), sum(leg.flow.unit for leg in legs))
        result.append(Background(tenant.name, flow, latency, to_ticks(tenant.period), to_ticks(tenant.start)))
    return tuple(result)
