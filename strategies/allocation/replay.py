"""Reserved memory of plans: the allocations of a step on the fullest ranks, replayed in torch's caching allocator.

A pipeline whose stages are full adds no allocation of a new size, so that a step of few microbatches is replayed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwise.simulator.memo import memoise
from meshwise.simulator.program import Category
from meshwise.strategies.allocation.block_passes import (
    BlockTensors,
    PassEvents,
    find_block_tensors,
    fit_kept,
    record_backward,
    record_forward,
    record_part,
)
from meshwise.strategies.allocation.caching_allocator import MEDIUM_SEGMENT, NUM_POOLS, UNLIMITED, Events, replay
from meshwise.strategies.allocation.planned import plans_memory
from meshwise.strategies.allocation.rank_events import BlockPass, RankRecorder, repeat_events
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.lowering.costs.keys import CutKey, RunKey
from meshwise.strategies.lowering.costs.liveness import Moment
from meshwise.strategies.lowering.costs.memory import BlockMemory
from meshwise.strategies.lowering.costs.offload import HostShare
from meshwise.strategies.lowering.costs.optimizer import flat_gradient_bytes, step_temporary_bytes
from meshwise.strategies.lowering.residents import count_copies, count_residents
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.fully_sharded import NO_CHANGES
from meshwise.strategies.lowering.tasks.variants import FIRST_OFFSET
from meshwise.strategies.plan.offloading import select_fraction
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import OPTIMIZERS
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.schedules.orders import list_actions
from meshwise.strategies.schedules.schedule import KINDS, ActionKind

NUM_RANKS, NEAR = 2, 0.97
"""Pipeline ranks that are replayed: the fullest ones, all with at least this fraction of the fullest one's tensors."""


class Reserved(NamedTuple):
    """Bytes of the fullest device of a plan: of tensors, and what the allocator reserves for them.

    ``least`` is what it reserves where it gives free segments back before each new one: the least with which the step
    runs.
    """

    allocated: int
    reserved: int
    least: int


class PlanReplay:
    """Replays steps of one problem's plans; what plans share is worked out once."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem, self.training = costs, costs.problem, costs.problem.training
        self.memory = costs.get_shared(PlanMemory)

    def reserve(self, plan: Plan, limit: int = UNLIMITED) -> Reserved:
        """Return what a plan reserves of devices of which the allocator may have ``limit`` bytes.

        ``plan`` needs no simulation for its memory. Where its tensors alone exceed the limit, what is reserved is as if
        there was none. Of several sizes of microbatches the fullest counts.
        """
        results = [self._reserve_even(plan.with_microbatch(size), limit) for size in plan.sizes]
        return Reserved(*map(max, zip(*results, strict=True)))

    def reserve_by_position(self, plan: Plan, limits: Sequence[float]) -> dict[int, Reserved]:
        """Return what ranks of the pipeline positions reserve that are fullest for what their allocators may have.

        ``limits`` are these bytes by position. ``plan`` has one size of microbatches, and needs no simulation.
        """
        allocated = self.memory.allocated(plan)
        if plans_memory(self.problem.training, self.problem.cluster):
            return {position: Reserved(*[int(peak)] * 3) for position, peak in enumerate(allocated)}
        shares = allocated / np.maximum(limits, 1.0)
        result = {}
        for position in np.argsort(-shares)[:NUM_RANKS].tolist():
            peak = int(allocated[position])
            reserved, least = self._reserve_rank(plan, position, max(int(limits[position]), 0))
            result[position] = Reserved(peak, max(reserved, peak), max(least, peak))
        return result

    @memoise
    def _reserve_even(self, plan: Plan, limit: int) -> Reserved:
        allocated = self.memory.allocated(plan)
        peak = int(allocated.max())
        if plans_memory(self.problem.training, self.problem.cluster):
            return Reserved(peak, peak, peak)
        fullest = [position for position in np.argsort(-allocated)[:NUM_RANKS] if allocated[position] > NEAR * peak]
        rows = [self._reserve_rank(plan, int(position), limit) for position in fullest]
        reserved, least = (max(row[column] for row in rows) for column in range(2))
        return Reserved(peak, max(reserved, peak), max(least, peak))

    def _reserve_rank(self, plan: Plan, position: int, limit: int) -> tuple[int, int]:
        """Return what a rank of a position reserves, and the least with which it runs."""
        events, is_expandable = self.list_events(plan, position), self.training.expandable_segments
        reservation = replay(events, is_expandable=is_expandable)
        if is_expandable:  # pages are given back one by one
            return reservation.reserved, min(reservation.reserved, reservation.requested + NUM_POOLS * MEDIUM_SEGMENT)
        least = min(replay(events, releases_first=True).reserved, reservation.reserved)
        if reservation.reserved <= limit or least > limit:
            return reservation.reserved, least
        limited = replay(events, limit)
        return (limited.reserved if limited.fits else reservation.reserved), least

    def list_events(self, plan: Plan, position: int) -> Events:
        """Return the allocations and releases of a step on a rank of a pipeline position.

        ``plan`` has one size of microbatches, and its memory needs no simulation.
        """
        short_plan = self.shorten_step(plan)
        sharing = self.memory.find_sharing(plan)
        recorder = RankRecorder(sharing.num_held)
        late_states = self._allocate_residents(recorder, plan, position)
        rows = list_actions(plan.schedule, plan.pipeline, short_plan.ordered_microbatches, plan.chunks)
        variants = sharing.list_variants(rows)
        stage_passes = {stage: _StageEvents(self, plan, stage) for stage in plan.stages_at(position)}
        start = recorder.num_events
        for index in range(rows.start[position], rows.start[position + 1]):
            stage, microbatch = int(rows.stage[index]), int(rows.microbatch[index])
            kind, blocks = KINDS[rows.kind[index]], stage_passes[stage].find(int(variants[index]))
            for number, block in enumerate(blocks):
                place = number if kind is ActionKind.FORWARD else len(blocks) - 1 - number
                recorder.run_block((stage, place, microbatch), block, is_last=number == len(blocks) - 1)
        self._copy_gradients(recorder, plan, position)
        end = recorder.num_events
        recorder.end_step()
        events = recorder.build()
        return repeat_events(events, start, end, late_states) if late_states else events

    def shorten_step(self, plan: Plan) -> Plan:
        """Return a plan whose step has few microbatches, and passes that hold as much: two for every pipeline rank.

        Schedules that hold every microbatch need all of them.
        """
        count = 2 * plan.pipeline
        while count < plan.num_microbatches and not plan.asynchronous:
            if plan.rule.find_violation(plan.pipeline, count, plan.chunks) is None:
                short_plan = replace(plan, num_microbatches=count)
                short_peaks, peaks = (self.memory.find_pass_peaks_of(row) for row in (short_plan, plan))
                if np.array_equal(short_peaks, peaks):
                    return short_plan
            count += plan.pipeline if count < 4 * plan.pipeline else count
        return plan

    def _allocate_residents(self, recorder: RankRecorder, plan: Plan, position: int) -> list[int]:
        """Allocate what stays for the whole step: parameters, gradients, states, and a framework's buffers.

        Return the bytes of the states that an optimizer makes in its first step: torch's make their moments then
        (``torch/optim/adamw.py``, ``_init_group``), in memory that the first step's activations have left.
        """
        _, stages, states = self.costs.find_keys(plan)
        share = HostShare(select_fraction(plan.offload.optimizer, position))
        parameters = self.costs.count_parameters(stages).positions[position]
        buffers, copies = self.costs.buffers(plan)[position], count_copies(self.costs, plan)[position]
        residents = count_residents(self.training, states, parameters, buffers, share, copies).device
        shares, num_moments = self._list_shares(plan, position), OPTIMIZERS[self.training.optimizer]
        state_bytes = residents.pop(Category.OPTIMIZER)
        late_bytes = 0
        if self.training.optimizer_bytes:
            late_bytes = state_bytes * self.training.moment_bytes // self.training.optimizer_bytes
        for category, size in residents.items():
            # Gradients that stay lie in one piece, for the framework adds to it and reduces it.
            is_whole = category in (Category.GRADIENTS, Category.BUFFERS)
            recorder.allocate(_divide(size, [1] if is_whole else shares))
        recorder.allocate(_divide(state_bytes - late_bytes, shares))
        return _divide(late_bytes, shares * num_moments) if late_bytes else []

    def _list_shares(self, plan: Plan, position: int) -> list[int]:
        """Return the elements on a rank of every parameter of a position."""
        cut = self.costs.find_keys(plan).cut
        return [size for name in self._list_blocks(plan, position) for size in self._list_block_shares(cut, name)]

    def _list_block_elements(self, plan: Plan, position: int) -> list[int]:
        """Return the elements on a rank of the parameters of every block of a position."""
        cut = self.costs.find_keys(plan).cut
        return [sum(self._list_block_shares(cut, name)) for name in self._list_blocks(plan, position)]

    def _list_blocks(self, plan: Plan, position: int) -> list[str]:
        """Return the kinds of the blocks of a position, in order."""
        stages = self.costs.find_keys(plan).stages
        kinds = (kind for stage in plan.stages_at(position) for kind in stages.find_runs(stage))
        return [name for name, count in kinds for _ in range(count)]

    @memoise
    def _list_block_shares(self, cut: CutKey, name: str) -> list[int]:
        layout = self.costs.blocks.layout(cut, name, 1)
        return [layout.parameter_share(tensor) for tensor in layout.block.parameters]

    def _copy_gradients(self, recorder: RankRecorder, plan: Plan, position: int) -> None:
        """Record what lives after the passes: flat copies of gradients, a block at a time, and what a step makes.

        So does fully_shard (``foreach_reduce``); a framework that copies all gradients at once requests more.
        """
        states = self.costs.find_keys(plan).states
        elements = self.costs.plan_parameters(plan).positions[position].elements
        flat_bytes = flat_gradient_bytes(self.training, states, elements)
        for size in _divide(flat_bytes, self._list_block_elements(plan, position)):
            recorder.release(recorder.allocate([size]))
        if self.memory.steps_on_device(plan):
            parameters = self.costs.plan_parameters(plan).positions[position]
            temporary_bytes = step_temporary_bytes(self.training, states, parameters)
            recorder.release(recorder.allocate(_divide(temporary_bytes, self._list_shares(plan, position))))

    @memoise
    def record_pass(
        self,
        run: RunKey,
        name: str,
        choice: LayerRecompute,
        memories: tuple[BlockMemory, BlockMemory],
        kind: ActionKind,
        gradient_bytes: int,
        separate_bytes: int,
    ) -> tuple[PassEvents, tuple[int, ...]]:
        """Return the events of a pass; ``memories`` are that of the pass and that of the forward before."""
        memory, forward_memory = memories
        tensors = self._find_tensors(run, name, choice, separate_bytes)
        kept = fit_kept(tensors.kept, forward_memory.kept_bytes)
        if kind is ActionKind.FORWARD:
            return record_forward(tensors, kept, memory), ()
        if kind is ActionKind.BACKWARD:
            return record_backward(tensors, kept, memory, gradient_bytes), ()
        left = fit_left(kept, memory.deferred_bytes)
        if kind is ActionKind.INPUT:
            events = record_part(kept, memory, kind, left)
            return events, tuple(place for place, tensor in enumerate(kept) if tensor in left)
        return record_part(left, memory, kind, {}), ()

    @memoise
    def _find_tensors(self, run: RunKey, name: str, choice: LayerRecompute, separate_bytes: int) -> BlockTensors:
        liveness, factor = self.costs.blocks.find_liveness(run, name)
        return find_block_tensors(liveness, factor, choice, separate_bytes)


def fit_left(kept: Moment, size: int) -> Moment:
    """Return the tensors that stay for the gradients of weights: the first ones that have ``size`` bytes together.

    >>> fit_left({"a": 3, "b": 4, "c": 2}, 5)
    {'a': 3, 'c': 2}
    """
    result: Moment = {}
    for name, bytes_ in kept.items():
        if sum(result.values()) + bytes_ <= size:
            result[name] = bytes_
    return result


def _divide(size: int, shares: list[int]) -> list[int]:
    """Return bytes divided in proportion to shares.

    >>> _divide(10, [1, 2])
    [3, 7]
    """
    if not shares:
        return [size]
    ends = np.cumsum(np.array(shares, np.float64)) / max(sum(shares), 1) * size
    ends[-1] = size
    whole_ends = ends.astype(np.int64)
    result: list[int] = np.diff(whole_ends, prepend=0).tolist()
    return result


class _StageEvents:
    """The passes of a stage's blocks by variant, each recorded once."""

    def __init__(self, replayer: PlanReplay, plan: Plan, stage: int) -> None:
        self.replayer = replayer
        self.run = replayer.costs.find_keys(plan).run
        self.choices = replayer.memory.list_block_choices(plan, stage)
        self.passes = replayer.memory.list_stage_passes(plan, stage)
        self._found: dict[int, list[BlockPass]] = {}

    def find(self, variant: int) -> list[BlockPass]:
        """Return the passes of the blocks of a variant of the stage's passes, in its order."""
        return self._found.get(variant) or self._found.setdefault(variant, self._record(variant))

    def _record(self, variant: int) -> list[BlockPass]:
        blocks, changes, kind = self.passes[variant]
        run, training = self.run, self.replayer.training
        turn = 1 if kind is ActionKind.FORWARD else -1
        forward_blocks = self.passes[0].blocks[::turn]
        is_separate = run.leaves_whole or variant >= FIRST_OFFSET
        result = []
        rows = zip(self.choices[::turn], blocks, forward_blocks, changes or (NO_CHANGES,) * len(blocks), strict=True)
        for (name, choice), memory, forward_memory, change in rows:
            gradient_bytes = sum(row.size for row in change.acquired if row.category is Category.GRADIENTS)
            events, left = self.replayer.record_pass(
                run,
                name,
                choice,
                (memory, forward_memory),
                kind,
                gradient_bytes,
                training.gradient_bytes if is_separate else 0,
            )
            result.append(BlockPass(events, change, kind, left))
        return result
