"""The machine as a placed mesh sees it: rank classes with their communicators.

A communicator says what the collectives of one group class cost and what they put on links. Other jobs on the same
network are flows that repeat.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import measured_time
from meshwise.simulator.engine.flows import ticks_at
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import Background, Flow
from meshwise.simulator.units import TICKS_PER_SECOND, to_ticks
from meshwise.strategies.lowering.rank_classes.classes import ClassTable, PhaseRow
from meshwise.strategies.lowering.rank_classes.placement import tenant_kind
from meshwise.strategies.plan.mesh import (
    BACKWARD,
    DATA,
    EXPERT,
    EXPERT_DATA,
    FORWARD,
    NORM,
    PASS_AXES,
    TABLE_NODE,
    tied_kind,
)
from meshwise.strategies.plan.offloading import FROM_HOST, HOST_KINDS, TO_HOST


class TimedPhase(NamedTuple):
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

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.table.cluster

    @memoise
    def list_phases(self, collective: Collective, size: float) -> tuple[TimedPhase, ...]:
        """Return the phases of a collective of ``size`` bytes: by its measured time, or by the fastest algorithm.

        The fastest one is that on idle links.
        """
        if size <= 0:
            return ()
        measured_seconds = measured_time(self.cluster, collective, self.size, size)
        if measured_seconds is not None:
            ticks = to_ticks(measured_seconds)
            return (TimedPhase(ticks, ticks, Flow(())),)
        algorithms = self.table.list_algorithms(self.kind, collective, self.index)
        candidates = [self._list_rows(collective, algorithm) for algorithm in algorithms]
        fastest = (
            min(candidates, key=lambda rows: sum(self._time_alone(row, size)[0] for row in rows))
            if candidates[1:]
            else candidates[0]
        )
        return tuple(self._time_phase(row, size) for row in fastest)

    def ticks(self, collective: Collective, size: float) -> int:
        """Return the ticks of a collective with which nothing contends."""
        return sum(phase.ticks for phase in self.list_phases(collective, size))

    def _list_rows(self, collective: Collective, algorithm: Algorithm) -> list[PhaseRow]:
        """Return the phases of a collective on this group class by one algorithm."""
        return [row[self.index] for row in self.table.list_rows(self.kind, collective, algorithm)]

    def _time_alone(self, row: PhaseRow, size: float) -> tuple[int, float, float]:
        """Return the ticks of a phase of one group on idle links, as a library knows them when it chooses a protocol.

        With them come the latency of that protocol in seconds, and the bytes on links for each byte of the phase.
        """
        protocols = self.cluster.library.list_protocol_costs(row.latency, row.launch, row.messages)
        return min(
            (_count_ticks(latency, size * byte_factor, row.alone_seconds), latency, byte_factor)
            for latency, byte_factor in protocols
        )

    def _time_phase(self, row: PhaseRow, size: float) -> TimedPhase:
        """Return one phase of ``size`` bytes with all groups of the class at once."""
        _, latency, byte_factor = self._time_alone(row, size)
        size *= byte_factor
        busiest_load, loads = row.busiest_load, row.loads
        latency_ticks, capacity = to_ticks(latency), self.table.bandwidth
        usage = tuple([(link, load * size) for link, load in loads])
        seconds = max([link_bytes / capacity[link] for link, link_bytes in usage], default=0.0)
        if not seconds:
            return TimedPhase(latency_ticks, latency_ticks, Flow(usage, busiest_load * size))
        busiest_bytes = busiest_load * size or max(link_bytes for _, link_bytes in usage)
        return TimedPhase(
            latency_ticks,
            latency_ticks + ticks_at(busiest_bytes * TICKS_PER_SECOND, busiest_bytes / seconds),
            Flow(usage, busiest_load * size),
        )


def _count_ticks(latency: float, size: float, seconds_per_byte: float) -> int:
    """Return the ticks of ``size`` bytes after a latency in seconds."""
    transfer_ticks = ticks_at(size * TICKS_PER_SECOND, 1 / seconds_per_byte) if seconds_per_byte else 0
    return to_ticks(latency) + transfer_ticks


@dataclass(frozen=True, eq=False, slots=True)
class RankProfile:
    """What the costs of a rank depend on: its device, its host's launch time in seconds, and its groups inside passes.

    ``groups`` are by mesh axis, and ``batch`` is the number of sequences of its microbatches, 0 where all ranks have
    those of the plan. ``slowdown`` is the time of computing beneath a collective over its time alone. Compared and
    hashed by identity: ranks of equal costs share one.
    """

    accelerator: Accelerator
    launch: float
    groups: Mapping[str, Communicator]
    batch: int = 0
    slowdown: float = 1.0


class RankRegistry:
    """What the costs of ranks and groups depend on, on all machines whose ranks are compared: equal ones once."""

    def __init__(self) -> None:
        self._profiles: dict[Hashable, RankProfile] = {}
        self._group_numbers: dict[Hashable, int] = {}

    def find_profile(self, key: Hashable, profile: RankProfile) -> RankProfile:
        """Return the first profile of a key."""
        return self._profiles.setdefault(key, profile)

    def number_group(self, costs: Hashable) -> int:
        """Return a number for the costs of a group."""
        return self._group_numbers.setdefault(costs, len(self._group_numbers))


class Machine:
    """The rank classes of one placed mesh with their communicators, each built once."""

    def __init__(self, table: ClassTable, registry: RankRegistry) -> None:
        self.table = table
        self._registry = registry

    @memoise
    def communicator(self, kind: str, index: int) -> Communicator:
        """Return the communicator of a group class."""
        return Communicator(self.table, kind, index)

    @memoise
    def rank(self, rank_class: int) -> RankProfile:
        """Return what the costs of a rank class depend on."""
        table = self.table
        device = int(table.placed.devices[table.representatives[rank_class]])
        pass_groups = {
            kind: self._find_pass_group(kind, rank_class) for kind in self._pass_kinds if kind in table.tables
        }
        launch = table.cluster.node_kind(device).host.launch
        batch = int(table.placed.sequences[table.representatives[rank_class]])
        key = (table.device_kinds[rank_class], tuple(costs for _, costs in pass_groups.values()), launch, batch)
        groups = {kind: group for kind, (group, _) in pass_groups.items()}
        accelerator, slowdown = table.cluster.accelerator_of(device), table.cluster.overlap_slowdown
        return self._registry.find_profile(key, RankProfile(accelerator, launch, groups, batch, slowdown))

    @property
    def _pass_kinds(self) -> tuple[str, ...]:
        """The kinds of groups that communicate inside passes; ranks that share tables also with their hosts."""
        return (*PASS_AXES, TABLE_NODE, FROM_HOST, TO_HOST) if self.table.placed.shares_tables else tuple(PASS_AXES)

    def batch(self, kind: str, group: int) -> int:
        """Return the sequences of a microbatch on the ranks of a group class; 0 where all ranks have as many."""
        return self.rank(self.table.tables[kind].classes[group][0]).batch

    @cached_property
    def ranks(self) -> tuple[tuple[RankProfile, ...], ...]:
        """For every pipeline position, what the costs of its rank classes depend on, equal ones once."""
        rows = ((self.rank(index) for index in classes) for classes in self.table.by_position)
        return tuple(tuple(dict.fromkeys(row)) for row in rows)

    def _find_pass_group(self, kind: str, rank_class: int) -> tuple[Communicator, int]:
        """Return the first group of a kind that lies as a rank class's own group does, and a number for its costs."""
        return self._describe_group(kind, self._list_first_groups(kind)[self.table.group_of[kind][rank_class]])

    @memoise
    def _list_first_groups(self, kind: str) -> tuple[int, ...]:
        """Return, for every group class of a kind, the first one that costs the same on idle links."""
        first_groups: dict[int, int] = {}
        signatures = enumerate(self.table.list_signatures(kind))
        return tuple(first_groups.setdefault(signature, group) for group, signature in signatures)

    @memoise
    def _describe_group(self, kind: str, group: int) -> tuple[Communicator, int]:
        """Return a group, and a number for its costs."""
        cost_keys = tuple(
            self._list_cost_keys(kind, collective, (group,)) for collective in self._list_collectives(kind)
        )
        return self.communicator(kind, group), self._registry.number_group((kind, cost_keys))

    def _list_collectives(self, kind: str) -> tuple[Collective, ...]:
        """Return the collectives that groups of a kind run inside passes."""
        placed = self.table.placed
        if kind in HOST_KINDS:
            return (Collective.SEND,)
        if kind == TABLE_NODE:
            return Collective.REDUCE_SCATTER, Collective.ALL_GATHER
        if kind == EXPERT and placed.shares_tables:
            return (*PASS_AXES[kind].collectives, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        exchange = placed.extra_collectives.get(kind)
        return (
            PASS_AXES[kind].collectives
            if exchange is None or exchange in PASS_AXES[kind].collectives
            else (*PASS_AXES[kind].collectives, exchange)
        )

    def least_ticks(self, kind: str, groups: tuple[int, ...], collective: Collective, size: float) -> int:
        """Return the least ticks of a collective over some group classes of a kind."""
        return min(self.communicator(kind, group).ticks(collective, size) for group in groups)

    @memoise
    def list_distinct_groups(self, kind: str, collective: Collective) -> tuple[tuple[int, ...], ...]:
        """Return, for every pipeline position, its group classes of a kind whose collectives differ in cost."""
        alike_groups = self.list_alike_groups(kind, collective)
        positions = range(len(self.table.by_position))
        rows = (
            dict.fromkeys(alike_groups[group] for group in self.table.groups_at(kind, position))
            for position in positions
        )
        return tuple(map(tuple, rows))

    @memoise
    def list_alike_groups(self, kind: str, collective: Collective) -> tuple[int, ...]:
        """Return, for every group class of a kind, the first one whose collective takes the same ticks for any size."""
        first_groups: dict[object, int] = {}
        groups = range(len(self.table.tables[kind]))
        cost_keys = self._list_cost_keys(kind, collective, groups) if len(groups) > 1 else groups
        return tuple(first_groups.setdefault(key, index) for index, key in enumerate(cost_keys))

    @cached_property
    def has_launches(self) -> bool:
        """Whether some host takes time to launch a kernel."""
        return any(self.rank(index).launch for index in range(len(self.table)))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every position has one rank class and one group class, all ranks compute alike and no host launches.

        Ranks with microbatches of different sizes never do.
        """
        table = self.table
        if table.placed.batches or any(len(classes) > 1 for classes in table.by_position):
            return False
        tied_kinds = (
            tied_kind(first_position, second_position)
            for first_position, second_position in table.placed.tied_positions
        )
        usual_kinds = (*PASS_AXES, DATA, EXPERT_DATA, FORWARD, BACKWARD, NORM)
        kinds = [kind for kind in (*usual_kinds, *tied_kinds) if kind in table.tables]
        profiles = {self.rank(index) for index in range(len(table))}
        is_single = all(
            len(table.groups_at(kind, position)) <= 1 for kind in kinds for position in range(len(table.by_position))
        )
        # A list of zeros says that every group costs as much as the first one.
        alike_lists = (
            self.list_alike_groups(kind, collective)
            for kind in PASS_AXES
            if kind in kinds
            for collective in self._list_collectives(kind)
        )
        return (
            is_single
            and len(profiles) == 1
            and not any(profile.launch for profile in profiles)
            and not any(map(any, alike_lists))
        )

    def _list_cost_keys(self, kind: str, collective: Collective, groups: Iterable[int]) -> tuple[object, ...]:
        """Return, for each of some group classes, what the ticks of a collective depend on besides its size."""
        table, groups = self.table, tuple(groups)
        members = table.tables[kind].devices.shape[1]
        if measured_time(table.cluster, collective, members, 1.0) is not None:
            # A measured time holds for groups of this size wherever they lie.
            return (members,) * len(groups)
        algorithm_lists = [table.list_algorithms(kind, collective, group) for group in groups]
        usable_algorithms = {algorithm for group_algorithms in algorithm_lists for algorithm in group_algorithms}
        phases = [
            phase_rows
            for candidate in Algorithm
            if candidate in usable_algorithms
            for phase_rows in table.list_rows(kind, collective, candidate)
        ]
        return tuple(
            (allowed, *(self._build_row_key(phase_rows[group]) for phase_rows in phases))
            for allowed, group in zip(algorithm_lists, groups, strict=True)
        )

    def _build_row_key(self, row: PhaseRow) -> tuple[object, ...]:
        """Return a phase's latency, launch, seconds alone and its different pairs of bytes and byte/s of a link."""
        rates = self.table.bandwidth
        return (
            row.latency,
            row.launch,
            row.messages,
            row.alone_seconds,
            tuple(sorted({(load, rates[link]) for link, load in row.loads})),
        )


def list_background(table: ClassTable) -> tuple[Background, ...]:
    """Return the exchanges of every tenant of the cluster as flows on link classes."""
    result = []
    for number, tenant in enumerate(table.cluster.tenants):
        phases = Communicator(table, tenant_kind(number), 0).list_phases(tenant.collective, tenant.size)
        usage: dict[int, float] = {}
        for phase in phases:
            for link, link_bytes in phase.flow.usage:
                usage[link] = usage.get(link, 0.0) + link_bytes
        latency = sum(phase.latency for phase in phases)
        flow = Flow(tuple(usage.items()), sum(phase.flow.unit for phase in phases))
        result.append(Background(tenant.name, flow, latency, to_ticks(tenant.period), to_ticks(tenant.start)))
    return tuple(result)
