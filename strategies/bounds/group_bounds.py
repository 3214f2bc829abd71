"""Lower bounds of whole families and groups of layouts, without completing any of their members.

The bound of a family is the compute of its devices, spread evenly. The bounds of a group's members are outer sums: of
the path of `meshwise.strategies.bounds.step_time` through the passes of a row, and of what follows them in a column.
Memory is bounded too: by the states of a column, and by what a rank of a row holds when most microbatches are in
flight on it. All are at most what `meshwise.strategies.bounds.step_time` and `meshwise.strategies.bounds.memory` say
of the member alone, and need one plan for every kind of row and column.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise, product
from math import ceil, inf
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray
from meshwise.simulator.units import TICKS_PER_SECOND, to_seconds
from meshwise.strategies.bounds.durations import TickTables
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.bounds.step_time import StepBounds
from meshwise.strategies.lowering.costs.keys import RunKey
from meshwise.strategies.lowering.costs.kinds import Runs, StageKinds
from meshwise.strategies.lowering.costs.memory import BlockMemory, Boundary, StageMemory, stage_memory
from meshwise.strategies.lowering.costs.optimizer import state_bytes
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import BlockPasses, StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import PASS_DECISIONS, STATE_DECISIONS, Group
from meshwise.strategies.plan.layout import CUT_DECISIONS, Layout, StepDecisions
from meshwise.strategies.plan.mesh import BACKWARD, FORWARD, PASS_AXES
from meshwise.strategies.plan.offloading import HOST_KINDS, NO_OFFLOADING, Offloading, count_fraction, select_fraction
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, StageRecompute
from meshwise.strategies.schedules.orders import list_actions
from meshwise.strategies.schedules.rule import Placement
from meshwise.strategies.schedules.schedule import KINDS, ActionKind, find_rule

FloatArray = NDArray[np.float64]
T = TypeVar("T", bound=Hashable)
Choices = Sequence[StepDecisions]
"""The rows or the columns of a group."""
Tails = tuple[tuple[int, ...], tuple[int, ...]]
"""Lower bounds, by pipeline position, of the ticks after the last backward, and of those in which passes wait."""
RunChoice = tuple[Any, ...]
"""The values of `PASS_DECISIONS`: what the ticks of passes depend on."""

_read_run_choice = attrgetter(*PASS_DECISIONS)
_read_pass_flags = attrgetter(*(name for name in PASS_DECISIONS if name != "recompute"))
StageSite = tuple[int, Boundary, int]
"""The kind of a stage, the data at its ends, and its pipeline position."""

_ALL_IN_FLIGHT = frozenset({"gpipe", "looped_bfs"})
"""Schedules that run all forwards before the first backward."""


class _FullestMoments(NamedTuple):
    """Two moments of every pipeline rank: the microbatches that each stage then holds, and the pass that runs."""

    num_held: IntArray
    stage: IntArray
    kind: IntArray


class GroupBounds:
    """Lower bounds of families and groups of the layouts of one problem."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem = costs, costs.problem
        self.tick_tables, self.step_bounds = costs.get_shared(TickTables), costs.get_shared(StepBounds)
        self.plan_memory = costs.get_shared(PlanMemory)
        self._devices_alike = len(set(self.problem.cluster.device_kinds.tolist())) == 1

    def family_bound(self, family: Layout) -> float:
        """Return a lower bound of the steps of a family's layouts in seconds; 0 where devices differ.

        A rank of some position computes for every microbatch at least its share of all blocks, and at least the mean
        number of layers of a position, rounded up.
        """
        if not self._devices_alike:
            return 0.0
        all_ticks, layer_ticks = self._find_compute_ticks(family)
        num_layers_each = ceil(num_layers(self.problem.graph) / family.pipeline)
        least_ticks = max(ceil(all_ticks / family.pipeline), num_layers_each * layer_ticks)
        return to_seconds(self.problem.training.global_batch // family.sequences * least_ticks)

    def busy_bound(self, family: Layout) -> float:
        """Return a lower bound in seconds of the steps of a family's layouts whose ranks run one pass at a time.

        Some position then is busy for every microbatch with at least its share of all blocks, collectives included.
        """
        # with ZeRO 2 gradients leave as they are made, so that no kernels that add them are counted
        plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=2))
        least_ticks = min(self._find_least_work(plan, overlap) for overlap in {False, family.sequence_parallel})
        return to_seconds(plan.num_microbatches * ceil(least_ticks / family.pipeline))

    def _find_least_work(self, plan: Plan, overlap: bool) -> int:
        """Return the ticks of all blocks for one microbatch, each on the rank that is fastest at it."""
        ranks = {rank for row in self.costs.machine(plan).ranks for rank in row}
        plan = replace(plan, recompute=Recompute.NONE, overlap_tensor=overlap)
        passes, stages, _ = self.costs.find_keys(plan)
        ticks = {}
        for name in stages.kinds.blocks:
            blocks = (
                self.costs.block_passes(self.costs.find_batch_run(passes.run, rank.batch), name, Recompute.NONE, rank)
                for rank in ranks
            )
            ticks[name] = min(map(_count_work_ticks, blocks))
        return sum(ticks[name] * count for kind in stages.kinds.kind_of for name, count in stages.kinds.kinds[kind])

    def _find_compute_ticks(self, family: Layout) -> tuple[int, int]:
        """Return the ticks that all blocks compute for one microbatch, and those of the fastest layer."""
        # Layouts that cut operators alike, on microbatches of one size, stand for one another.
        choices = {name: getattr(family, name) for name in CUT_DECISIONS} | {"microbatch": family.microbatch}
        return self._count_compute_ticks(replace(Layout(), **choices))

    @memoise
    def _count_compute_ticks(self, family: Layout) -> tuple[int, int]:
        """Return the ticks that all blocks compute for one microbatch, and those of the fastest layer."""
        plan = self._isolate_family(family)
        rank, (passes, stages, _) = self.costs.machine(plan).rank(0), self.costs.find_keys(plan)
        blocks, clock, sequences = self.costs.blocks, self.costs.clock(rank), passes.run.least_sequences
        ticks = {}
        for name in stages.cut.kinds.by_name:
            segments = blocks.plain_segments(stages.cut, name, sequences)
            timed_segments = clock.time_segments((*segments.forward, *segments.backward))
            ticks[name] = sum(n for segment, n in timed_segments if segment.collective is None)
        (runs,) = stages.kinds.kinds
        layers = [ticks[name] for name, _ in runs if blocks.block(stages.cut, name).layer]
        return sum(ticks[name] * n for name, n in runs), min(layers, default=0)

    def _isolate_family(self, family: Layout) -> Plan:
        """Return a plan that cuts operators as a family does, on as few devices as possible."""
        num_ranks = family.expert * family.model_ranks // family.pipeline
        placement = tuple(self.problem.cluster.free_devices[:num_ranks])
        layout = replace(family, data=family.expert, pipeline=1, schedule="gpipe", zero_shards=0, placement=placement)
        return complete(self.problem, layout)

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        """Return a lower bound in seconds of every member's step, by row and column.

        It is infinite where there is no member, where the member cannot fit, and where it takes ``limit`` or more.
        """
        result = np.full(group.member_mask.shape, inf)
        if not group.num_members:
            return result
        row, column = divmod(int(np.argmax(group.member_mask)), len(group.states))
        plan = complete(self.problem, group.build_layout(row, column))
        plan = replace(plan, recompute=Recompute.NONE, offload=NO_OFFLOADING)
        choices = (*group.passes, *group.states)
        offload = next((choice.offload for choice in choices if choice.offload), NO_OFFLOADING)
        machines = _GroupMachines(self.costs, plan, offload)
        for rows, columns in self._divide_members(plan, machines, group):
            passes, states = [group.passes[number] for number in rows], [group.states[number] for number in columns]
            result[np.ix_(rows, columns)] = self._bound_class(plan, machines, passes, states, limit)
        result[~group.member_mask | (result >= limit)] = inf
        return result

    def _divide_members(
        self, plan: Plan, machines: "_GroupMachines", group: Group
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the rows and columns of each class of members: the machine of one times the passes of all.

        They reduce gradients at the same moments, on ranks that are divided into the same classes. A row or a column
        without members is of no class: it may be illegal, and no plan be of its kind.
        """
        rows, columns = (np.flatnonzero(group.member_mask.any(axis=axis)).tolist() for axis in (1, 0))
        passes, states = [group.passes[row] for row in rows], [group.states[column] for column in columns]
        copies_divide_ranks = any(choice.offload for choice in passes) and any(
            self._digest_classes(machines.find_machine(state, copies=False))
            != self._digest_classes(machines.find_machine(state, copies=True))
            for state in states
        )
        row_classes = (copies_divide_ranks and bool(choice.offload) for choice in passes)
        column_classes = (
            (
                self._reduces_in_passes(plan, state),
                *(
                    self._digest_pass_classes(machines.find_machine(state, copies=copies))
                    for copies in {False, copies_divide_ranks}
                ),
            )
            for state in states
        )
        yield from product(_group_places(rows, row_classes), _group_places(columns, column_classes))

    @memoise
    def _digest_classes(self, machine: Machine) -> bytes:
        """Return a digest of the classes of ranks and of all their groups."""
        return _hash_classes(machine, [kind for kind in machine.table.tables if kind not in HOST_KINDS])

    @memoise
    def _digest_pass_classes(self, machine: Machine) -> bytes:
        """Return a digest of the classes of ranks, and of the groups that communicate in passes and between them."""
        kinds = (*PASS_AXES, FORWARD, BACKWARD)
        return _hash_classes(machine, [kind for kind in kinds if kind in machine.table.tables])

    def _reduces_in_passes(self, plan: Plan, state: StepDecisions) -> bool:
        """Return whether gradients are reduced in every backward, or parameters move in passes."""
        return (state.zero >= 2 and plan.shards > 1) or any(state.offload.parameters)

    def _bound_class(
        self, plan: Plan, machines: "_GroupMachines", passes: Choices, states: Choices, limit: float
    ) -> FloatArray:
        """Return the bounds of rows and columns of one class, without recomputation or offload in ``plan``."""
        plan = _with_states(plan, states[0])
        has_copies = bool(passes[0].offload)
        machine = machines.find_machine(states[0], copies=has_copies)
        tails = [self._find_tails(plan, machines.find_machine(state, copies=has_copies), state) for state in states]
        # The cheapest test first: rows without recomputation tell whether any row can stay below the limit.
        distinct_choices = {_read_pass_flags(choice): choice for choice in passes}.values()
        quickest_choices = [replace(choice, recompute=Recompute.NONE) for choice in distinct_choices]
        nothing = np.full((len(passes), len(states)), inf)
        if limit < inf and self._bound_times(plan, machine, quickest_choices, tails).min() >= limit:
            return nothing
        if limit == inf and not self._may_fit(plan, passes, states).any():  # no plan that fits is known: maybe none is
            return nothing
        times = self._bound_times(plan, machine, passes, tails)
        hopeful_rows = np.flatnonzero(times.min(axis=1) < limit)
        if len(hopeful_rows):
            fits = self._may_fit(plan, [passes[row] for row in hopeful_rows.tolist()], states)
            times[hopeful_rows] = np.where(fits, times[hopeful_rows], inf)
        return times

    def _may_fit(self, plan: Plan, passes: Choices, states: Choices) -> NDArray[np.bool_]:
        """Return, for every row and column, whether it may fit: false only where it cannot."""
        resident, column_of = self._bound_resident(plan, states)
        free_memory = self.plan_memory.capacity(plan, plan.sequences)[None, :] - resident
        activations, row_of = self._bound_activations(plan, passes, in_passes=self._reduces_in_passes(plan, states[0]))
        fits: NDArray[np.bool_] = np.all(activations[:, None, :] <= free_memory[None, :, :], axis=2)
        return fits[np.ix_(row_of, column_of)]

    def _bound_times(self, plan: Plan, machine: Machine, passes: Choices, tails: Sequence[Tails]) -> FloatArray:
        """Return the seconds of the path of `StepBounds.lower_bound` for every row, and column with its tails."""
        run_choices, row_of = _number_distinct(map(_read_run_choice, passes))
        distinct_tails, column_of = _number_distinct(tails)
        forward, backward, work = self._find_loads(plan, machine, run_choices)
        fill, drain = self._find_offsets(plan, machine, forward, backward)
        ends, waits = np.array(distinct_tails, dtype=np.int64).transpose(1, 0, 2)
        path = fill + plan.num_microbatches * work
        result = np.zeros((len(run_choices), len(distinct_tails)), dtype=np.int64)
        drains = plan.rule.placement is not Placement.WRITTEN and not plan.splits_backward
        for position in range(plan.pipeline):
            end = ends[None, :, position]
            if drains:
                end = np.maximum(end, drain[:, position, None] + ends[None, :, 0])
            np.maximum(result, path[:, position, None] + waits[None, :, position] + end, out=result)
        if plan.schedule == "naive":
            there_and_back = (fill + forward + drain + backward)[:, -1]
            naive_path = plan.num_microbatches * there_and_back
            np.maximum(result, naive_path[:, None] + ends[None, :, 0], out=result)
        seconds: FloatArray = result[np.ix_(row_of, column_of)] / TICKS_PER_SECOND
        return seconds

    def _find_offsets(
        self, plan: Plan, machine: Machine, forward: IntArray, backward: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the ticks in which a microbatch reaches every position, and those in which its gradients return."""
        fill, drain = np.zeros_like(forward), np.zeros_like(backward)
        if plan.rule.placement is not Placement.WRITTEN:
            sends, inner = self.tick_tables.send_ticks(plan, machine), plan.pipeline - 1
            forward_sends, backward_sends = np.array(sends.forward[:inner]), np.array(sends.backward[1 : inner + 1])
            np.cumsum(forward[:, :inner] + forward_sends, axis=1, out=fill[:, 1:])
            np.cumsum(backward[:, :inner] + backward_sends, axis=1, out=drain[:, 1:])
        return fill, drain

    def _find_tails(self, plan: Plan, machine: Machine, state: StepDecisions) -> Tails:
        """Return the tails of a choice of states."""
        if any(state.offload.parameters):
            return (0,) * plan.pipeline, (0,) * plan.pipeline
        _, stages, state_key = self.costs.find_keys(_with_states(plan, state))
        tails = self.step_bounds.list_tails(machine, stages, state_key, plan.schedule, state.offload)
        waits = self.step_bounds.list_reduction_waits(machine, stages, state_key, plan.schedule)
        return tails, tuple((plan.num_microbatches - 1) * wait for wait in waits)

    def _find_loads(
        self, plan: Plan, machine: Machine, run_choices: Sequence[RunChoice]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return, for every run choice and position, the ticks of its first stage's passes, and of all its work."""
        stages = self.costs.find_keys(plan).stages
        forward, backward, work = (np.empty((len(run_choices), plan.pipeline), np.int64) for _ in range(3))
        ticks_of = {
            rank: self._list_pass_ticks(plan, run_choices, rank)
            for rank in dict.fromkeys(rank for ranks in machine.ranks for rank in ranks)
        }
        for position, ranks in enumerate(machine.ranks):
            kinds = [stages.kinds.kind_of[stage] for stage in stages.by_position[position]]
            rows = [ticks_of[rank] for rank in ranks]
            forward[:, position] = np.minimum.reduce([row[0][:, kinds[0]] for row in rows])
            backward[:, position] = np.minimum.reduce([row[1][:, kinds[0]] for row in rows])
            work[:, position] = np.maximum.reduce([row[2][:, kinds].sum(axis=1) for row in rows])
        return forward, backward, work

    def _list_pass_ticks(
        self, plan: Plan, run_choices: Sequence[RunChoice], rank: RankProfile
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return, for every run choice and kind of stage, the ticks of forward, of backward, and of a rank's work."""
        tables: tuple[list[tuple[int, ...]], ...] = ([], [], [])
        for run_choice in run_choices:
            values = dict(zip(PASS_DECISIONS, run_choice, strict=True))
            recompute: StageRecompute = values["recompute"]
            keys = self.costs.find_keys(replace(plan, **values | {"recompute": recompute.layer}))
            stage_arguments = keys.run, keys.stages.kinds, rank, plan.overlaps_passes
            recomputed_ticks = self._list_stage_ticks(recompute.layer, *stage_arguments)
            if recompute.layers is None:
                rows = [stage_ticks[:3] for stage_ticks in recomputed_ticks]
            else:
                plain_ticks = self._list_stage_ticks(Recompute.NONE, *stage_arguments)
                rows = [
                    plain.with_recomputed(recomputed, recompute.layers)
                    for plain, recomputed in zip(plain_ticks, recomputed_ticks, strict=True)
                ]
            for table, column in zip(tables, zip(*rows, strict=True), strict=True):
                table.append(column)
        forward, backward, work = map(np.array, tables)
        return forward, backward, work

    @memoise
    def _list_stage_ticks(
        self, recompute: LayerRecompute, run: RunKey, kinds: StageKinds, rank: RankProfile, overlaps_passes: bool
    ) -> tuple["_StageTicks", ...]:
        """Return the ticks of every kind of stage on a rank where ``recompute`` is done again of every layer."""
        rows = []
        for runs in kinds.kinds:
            blocks = self.tick_tables.list_stage_passes(run, runs, recompute, rank)
            is_layer = [self.costs.blocks.block(run.cut, name).layer for name, _ in runs]
            rows.append(_sum_passes(blocks, is_layer, computing=overlaps_passes))
        return tuple(rows)

    def _bound_resident(self, plan: Plan, states: Choices) -> tuple[FloatArray, list[int]]:
        """Return lower bounds of the bytes that stay for the whole step, and which of them is each state's."""
        # Which device of several kinds is the server's is not looked at: there states are left out.
        state_ways, column_of = _number_distinct(
            (
                state.zero,
                state.offload,
                self.plan_memory.is_mixed and state.gradient_reduction == "parameter_server",
            )
            for state in states
        )
        resident_of = {zero: self._split_resident(plan, zero) for zero in {zero for zero, *_ in state_ways}}
        training = self.problem.training
        rounding = training.optimizer_bytes + training.factored_bytes
        result = np.zeros((len(state_ways), plan.pipeline))
        for row, (zero, offload, is_served) in enumerate(state_ways):
            if not any(offload.parameters):
                resident, state_bytes_of = resident_of[zero]
                if is_served:
                    result[row] = resident - state_bytes_of
                    continue
                fractions = np.array([offload.fraction_at("optimizer", position) for position in range(plan.pipeline)])
                # Shares are rounded to whole elements: one element more is taken off, so that the bound holds.
                result[row] = resident - fractions * (state_bytes_of + rounding) - (fractions > 0) * rounding
        return result, column_of

    def _split_resident(self, plan: Plan, zero: int) -> tuple[IntArray, IntArray]:
        """Return the bytes that stay without offload by position, and those of optimizer states."""
        plan = replace(plan, zero=zero)
        positions = self.costs.plan_parameters(plan).positions
        states = {row: state_bytes(self.problem.training, plan, row) for row in dict.fromkeys(positions)}
        return self.plan_memory.resident_memory(plan), np.array([states[row] for row in positions], dtype=np.int64)

    def _bound_activations(self, plan: Plan, passes: Choices, *, in_passes: bool) -> tuple[IntArray, list[int]]:
        """Return lower bounds of the most bytes that passes hold, by choice and position, and each row's choice."""
        pass_ways, row_of = _number_distinct(
            (cast(StageRecompute, choice.recompute), choice.offload.activations) for choice in passes
        )
        moments = _find_moments(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        sites, site_of = self._list_sites(plan)
        memories = [self._list_site_memories(plan, sites, *pass_way, in_passes=in_passes) for pass_way in pass_ways]
        rows = np.array(memories, dtype=np.int64)
        activations = rows[:, site_of, 0] @ moments.num_held.T
        if not plan.overlaps_passes:
            activations += rows[:, np.array(site_of)[moments.stage], 1 + moments.kind]
        return activations.reshape(len(pass_ways), 2, plan.pipeline).max(axis=1), row_of

    def _list_sites(self, plan: Plan) -> tuple[list[StageSite], list[int]]:
        """Return the different stages by kind, ends and position, and which of them each stage is."""
        passes, stages, _ = self.costs.find_keys(plan)
        places = range(len(stages.stages))
        boundaries = [self.costs.find_buffered_boundary(passes.run, stages, stage) for stage in places]
        return _number_distinct(zip(stages.kinds.kind_of, boundaries, stages.positions, strict=True))

    def _list_site_memories(
        self,
        plan: Plan,
        sites: Sequence[StageSite],
        recompute: StageRecompute,
        fractions: tuple[float, ...],
        *,
        in_passes: bool,
    ) -> list[tuple[int, ...]]:
        """Return what one microbatch of each stage keeps at least, and what each kind of action adds to that."""
        keys = self.costs.find_keys(replace(plan, recompute=recompute.layer))
        result: list[tuple[int, ...]] = []
        for kind, boundary, position in sites:
            fraction, runs = select_fraction(fractions, position), keys.stages.kinds.kinds[kind]
            memory = self._find_site_memory(keys.run, runs, boundary, recompute, fraction)
            result.append((memory.kept_bytes, *_find_fullest(memory, in_passes=in_passes)))
        return result

    @memoise
    def _find_site_memory(
        self, run: RunKey, runs: Runs, boundary: Boundary, recompute: StageRecompute, fraction: float
    ) -> StageMemory:
        """Return a lower bound of the memory of one microbatch of a stage.

        A fraction of its layers has activations on hosts.
        """
        blocks = self._list_blocks(run, runs, recompute, fraction)
        return stage_memory(boundary.apply_buffers([] if fraction and any(boundary) else list(blocks)))

    def _list_blocks(
        self, run: RunKey, runs: Runs, recompute: StageRecompute, fraction: float
    ) -> Iterator[tuple[BlockMemory, int]]:
        """Yield the memory of a stage's blocks, each with how often; its first layers are recomputed or offloaded."""
        blocks, choice = self.costs.blocks, recompute.layer
        layers = sum(count for name, count in runs if blocks.block(run.cut, name).layer)
        num_first = layers if recompute.layers is None else recompute.layers
        num_offloaded = count_fraction(layers, fraction)
        for name, count in runs:
            if not blocks.block(run.cut, name).layer:
                yield blocks.memory(run, name, choice), count
                continue
            # A run is cut where recomputation or offload ends.
            edges = sorted({0, count, *(min(max(edge, 0), count) for edge in (num_first, num_offloaded))})
            for low, high in pairwise(edges):
                memory = blocks.memory(run, name, choice if low < num_first else Recompute.NONE)
                yield memory._replace(kept_bytes=0) if low < num_offloaded else memory, high - low
            num_first, num_offloaded = num_first - count, num_offloaded - count


class _GroupMachines:
    """The rank classes of the members of one group.

    They depend on the states, and on whether data is copied between devices and hosts: ranks that else run in lockstep,
    and crowd the links that they share together, are then apart.
    """

    def __init__(self, costs: StageCosts, plan: Plan, offload: Offloading) -> None:
        self._costs, self._plan, self._offload = costs, plan, offload

    def find_machine(self, state: StepDecisions, *, copies: bool) -> Machine:
        """Return the machine of members with a choice of states, and with ``copies`` of their own or not."""
        return self._find_machine(state.zero, state.gradient_reduction, copies or bool(state.offload))

    @memoise
    def _find_machine(self, zero: int, gradient_reduction: str, copies: bool) -> Machine:
        offload = self._offload if copies else NO_OFFLOADING
        return self._costs.machine(
            replace(self._plan, zero=zero, gradient_reduction=gradient_reduction, offload=offload)
        )


class _StageTicks(NamedTuple):
    """Ticks of a kind of stage on a rank: of its passes, of the rank's work, and, summed, of its first layers."""

    forward: int
    backward: int
    work: int
    layers: tuple[tuple[int, int], ...]

    def with_recomputed(self, recomputed: "_StageTicks", count: int) -> tuple[int, int, int]:
        """Return the ticks of forward, backward and work where the first ``count`` layers are recomputed."""
        number = min(count, len(self.layers) - 1)
        (plain_backward, plain_work), (backward, work) = self.layers[number], recomputed.layers[number]
        return self.forward, self.backward + backward - plain_backward, self.work + work - plain_work


def _sum_passes(runs: Sequence[tuple[BlockPasses, int]], layers: Sequence[bool], *, computing: bool) -> _StageTicks:
    """Return the ticks of blocks, some of which are layers; work has no collectives where others may hide them."""
    forward = sum(block.forward.ticks * count for block, count in runs)
    backward = sum(block.backward.ticks * count for block, count in runs)
    works = [block.compute_ticks if computing else _count_work_ticks(block) for block, _ in runs]
    work = sum(work_ticks * count for work_ticks, (_, count) in zip(works, runs, strict=True))
    sums = [(0, 0)]
    for (block, count), work_ticks, layer in zip(runs, works, layers, strict=True):
        for _ in range(count if layer else 0):
            sums.append((sums[-1][0] + block.backward.ticks, sums[-1][1] + work_ticks))
    return _StageTicks(forward, backward, work, tuple(sums))


def _count_work_ticks(block: BlockPasses) -> int:
    """Return the ticks of a block's passes."""
    return block.forward.ticks + block.backward.ticks


def _find_fullest(memory: StageMemory, *, in_passes: bool) -> tuple[int, int, int, int]:
    """Return, by kind of action, what a stage holds at its fullest moment beyond before.

    Less is known where gradients are reduced or parameters move ``in_passes``.
    """
    forward = memory.kept_bytes + memory.forward
    return (forward, 0, 0, 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)


@lru_cache(maxsize=4096)
def _find_moments(name: str, ranks: int, microbatches: int, chunks: int) -> _FullestMoments:
    """Return, for every rank, the forward after which it holds most microbatches of all its stages, and the next pass.

    Of many microbatches only the first are looked at: what is held then is held with more of them too.
    """
    positions = np.array(find_rule(name).list_stage_ranks(ranks, chunks))
    if name in _ALL_IN_FLIGHT:
        is_own = positions == np.arange(ranks)[:, None]
        last_stages = len(positions) - 1 - is_own[:, ::-1].argmax(axis=1)
        num_held = is_own * microbatches
        num_held[np.arange(ranks), last_stages] -= 1
        return _FullestMoments(np.tile(num_held, (2, 1)), np.tile(last_stages, 2), np.zeros(2 * ranks, np.int64))
    few_microbatches = min(microbatches, MICROBATCHES_PER_RANK * ranks)
    exists = find_rule(name).find_violation(ranks, few_microbatches, chunks) is None
    rows = list_actions(name, ranks, few_microbatches if exists else microbatches, chunks)
    change = np.array([_HELD_CHANGE[kind] for kind in KINDS])[rows.kind]
    total = np.cumsum(change)  # a rank ends with nothing
    num_held = np.zeros((2 * ranks, len(positions)), dtype=np.int64)
    chosen_actions = np.empty(2 * ranks, dtype=np.int64)
    for rank in range(ranks):
        start, end = rows.start[rank], rows.start[rank + 1]
        fullest_action = start + int(np.argmax(total[start:end]))
        for moment, action in ((rank, fullest_action), (ranks + rank, fullest_action + 1)):
            chosen_actions[moment] = action
            num_held[moment] = np.bincount(rows.stage[start:action], change[start:action], len(positions))
    return _FullestMoments(num_held, rows.stage[chosen_actions], rows.kind[chosen_actions])


MICROBATCHES_PER_RANK = 4
"""Microbatches a pipeline rank that suffice to see most of them in flight."""

_HELD_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT: -1, ActionKind.WEIGHT: 0}
"""By kind of action, the change in the number of microbatches that a stage keeps whole."""


def _with_states(plan: Plan, state: StepDecisions) -> Plan:
    """Return a plan under a choice of states, with nothing in host memory."""
    values = {name: getattr(state, name) for name in STATE_DECISIONS}
    return replace(plan, **values | {"offload": NO_OFFLOADING})


def _hash_classes(machine: Machine, kinds: Iterable[str]) -> bytes:
    """Return a digest of the classes of ranks, and of groups of some kinds: where it is equal, their ticks are."""
    table, digest = machine.table, sha256()
    for classes in (table.class_of, *(table.tables[kind].class_of for kind in kinds)):
        digest.update(classes.tobytes())
    return digest.digest()


def _group_places(places: Iterable[int], classes: Iterable[Hashable]) -> list[list[int]]:
    """Return the places of each class together, by the first place of a class."""
    places_of: dict[Hashable, list[int]] = {}
    for place, place_class in zip(places, classes, strict=True):
        places_of.setdefault(place_class, []).append(place)
    return list(places_of.values())


def _number_distinct(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return the different values, and for every value the index among these."""
    places: dict[T, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers
