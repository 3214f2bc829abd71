"""Longest paths of many plans, equal to those of their programs but computed without them.

Where every pipeline position has one rank class, all that a rank does between receiving and sending runs in a row, so
that a pass is one number. Plans of one schedule differ in such numbers alone and are walked side by side, as rows of
ticks; each row is computed once for all plans that share it. All other plans are lowered, also those whose passes wait
for other data ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine.flows import MAX_TICKS
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.durations import SendTicks, TickTables
from meshwise.strategies.bounds.longest_path import (
    ENDING_COLUMNS,
    Endings,
    StepRows,
    arrange_schedule,
    finish_steps,
    walk_schedule,
)
from meshwise.strategies.lowering.costs.keys import PassKey, PlanKeys, StageKey
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.plan import Plan, StateKey

WALKED_SCHEDULES = frozenset({"naive", "gpipe", "1f1b", "interleaved"})
"""Schedules in which the last gradients of all stages are those of the last microbatch, and made by whole backwards."""


class _WalkedPlan(NamedTuple):
    """A plan at its place among others, with its machine and keys."""

    place: int
    plan: Plan
    machine: Machine
    keys: PlanKeys


class LongestPaths:
    """The longest paths of the plans of one problem, from rows of ticks that plans share, which are cached.

    Rows are those of machines of one rank class a position.
    """

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.get_shared(TickTables)

    @memoise
    def pass_row(self, passes: PassKey, stages: StageKey, rank: RankProfile, slices: bool) -> IntArray:
        """Return the ticks of every pass, in columns ``2 * stage``, and 1 more for a backward.

        ``slices`` says whether passes first gather the slices that they receive.
        """
        forward, backward = map(_to_row, self.durations.count_pass_ticks(passes, stages, rank))
        rows = np.stack([forward, backward], axis=1)[stages.kinds.index]
        return (rows + self._gather_rows(passes, stages, rank) if slices else rows).ravel()

    @memoise
    def send_row(self, sends: SendTicks) -> IntArray:
        """Return the ticks of sending the output of each pass, in the columns of `pass_row`."""
        return np.stack(list(map(_to_row, sends)), axis=1).ravel()

    @memoise
    def bucket_row(
        self, passes: PassKey, stages: StageKey, states: StateKey, rank: RankProfile, slices: bool
    ) -> IntArray:
        """Return the ticks from the start of a last backward until each bucket leaves, stage after stage."""
        kinds = []
        for kind, buckets in enumerate(self.durations.list_buckets(stages, states)):
            blocks = reversed(self.durations.list_block_passes(passes, stages, kind, rank))
            ticks = list(accumulate(chain.from_iterable(repeat(block.backward.ticks, n) for block, n in blocks)))
            kinds.append([ticks[bucket.num_blocks - 1] for bucket in buckets])
        rows = [kinds[kind] for kind in stages.kinds.kind_of]
        bucket_ticks = _to_row(list(chain.from_iterable(rows)))
        if slices:
            bucket_ticks += np.repeat(self._gather_rows(passes, stages, rank)[:, 1], list(map(len, rows)))
        return bucket_ticks

    def _gather_rows(self, passes: PassKey, stages: StageKey, rank: RankProfile) -> IntArray:
        """Return the ticks in which each pass first gathers the slices that it receives, one row per stage."""
        num_stages, tensor = len(stages.stages), rank.groups[TENSOR]
        result = np.zeros((num_stages, 2), np.int64)
        if stages.num_positions > 1:
            sequences = passes.run.sequences
            sizes = [self.costs.count_boundary_bytes(stages, stage, sequences) for stage in range(num_stages - 1)]
            ticks = [tensor.ticks(Collective.ALL_GATHER, float(size)) for size in sizes]
            result[1:, 0] = result[:-1, 1] = _to_row(ticks)
        return result

    @memoise
    def ending_rows(self, machine: Machine, stages: StageKey, states: StateKey) -> Endings:
        """Return the ticks of a step's ending, one row of each column."""
        ending = self.durations.count_ending_ticks(machine, stages, states)
        first_buckets = np.cumsum([0, *map(len, ending.bucket_reductions)])
        bucket_row = _to_row(list(chain(*ending.bucket_reductions)))
        return Endings(first_buckets, bucket_row, tuple(_to_row(getattr(ending, name)) for name in ENDING_COLUMNS))

    def ticks(self, plans: Sequence[Plan]) -> list[int | None]:
        """Return the ticks of one step of every plan, none where only its program tells them."""
        result: list[int | None] = [None] * len(plans)
        batches: dict[tuple[object, ...], list[_WalkedPlan]] = {}
        for place, plan in enumerate(plans):
            if plan.schedule not in WALKED_SCHEDULES or plan.offload or _waits_for_groups(plan):
                continue
            machine = self.costs.machine(plan)
            if machine.is_uniform:
                keys = self.costs.find_keys(plan)
                batch_key = (plan.schedule, plan.num_microbatches, plan.chunks, keys.stages.kinds)
                batches.setdefault(batch_key, []).append(_WalkedPlan(place, plan, machine, keys))
        for batch in batches.values():
            for walked, ticks in zip(batch, self._walk_batch(batch).tolist(), strict=True):
                result[walked.place] = ticks
        return result

    def _walk_batch(self, batch: Sequence["_WalkedPlan"]) -> IntArray:
        """Return the ticks of plans of one schedule on equally divided stages."""
        # Passes and endings have keys of their own, so that plans may share either.
        lanes, endings = dict[tuple[object, ...], int](), dict[tuple[object, ...], int]()
        lane_rows, ending_rows, plan_rows = list[list[IntArray]](), list[Endings](), list[tuple[int, int]]()
        for _, plan, machine, (passes, stages, states) in batch:
            (rank,), slices = machine.ranks[0], plan.slices_boundaries
            sends = self.durations.list_sends(machine, stages, passes.run.sequences, plan.looped, slices)
            lane = lanes.setdefault((passes, stages, states, rank, slices, sends), len(lanes))
            if lane == len(lane_rows):
                pass_row = self.pass_row(passes, stages, rank, slices)
                lane_rows.append(
                    [pass_row, self.send_row(sends), self.bucket_row(passes, stages, states, rank, slices)]
                )
            ending = endings.setdefault((machine, stages, states), len(endings))
            if ending == len(ending_rows):
                ending_rows.append(self.ending_rows(machine, stages, states))
            plan_rows.append((lane, ending))
        plan = batch[0].plan
        arrangement = arrange_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        pass_ticks, send_ticks, bucket_ticks = map(_pad_rows, zip(*lane_rows, strict=True))
        first_buckets, bucket_rows, column_rows = zip(*ending_rows, strict=True)
        columns = tuple(map(_pad_rows, zip(*column_rows, strict=True)))
        ending_table = Endings(_pad_rows(first_buckets), _pad_rows(bucket_rows), columns)
        steps = StepRows(*map(np.array, zip(*plan_rows, strict=True)))
        # In floats, because integers would overflow unseen before the check.
        work = (pass_ticks + send_ticks).sum(axis=1, dtype=np.float64) * plan.num_microbatches
        ending_work = sum(column.sum(axis=1, dtype=np.float64) for column in (ending_table.bucket_reductions, *columns))
        most_work = (work[steps.pass_row] + ending_work[steps.ending]).max()
        if most_work > MAX_TICKS:
            raise ValueError(f"the work of a step takes at most {MAX_TICKS} ticks (13 days), met {most_work:.3g}")
        pairs = np.array(self.costs.list_tied_shares(plan), dtype=np.int64).reshape(-1, 3)[:, :2]
        pass_times = walk_schedule(arrangement, pass_ticks, send_ticks)
        return finish_steps(steps, pass_times, bucket_ticks, ending_table, arrangement.last_stages, pairs)


def _waits_for_groups(plan: Plan) -> bool:
    """Return whether passes wait for gathers and reductions, or gradients are summed in two steps."""
    return plan.replica > 1 or (plan.zero >= 2 and plan.shards > 1)


def _pad_rows(rows: Sequence[IntArray]) -> IntArray:
    """Return rows as one table, shorter rows filled up with zeros."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return np.array(rows)
    result = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def _to_row(ticks: Sequence[int]) -> IntArray:
    """Return ticks as an array of 64 bits."""
    if max(ticks, default=0) > MAX_TICKS:
        raise ValueError(f"the ticks of a task lie in 0..{MAX_TICKS} (13 days), met {max(ticks)}")
    return np.array(ticks, dtype=np.int64)
