"""Longest paths of many plans, equal to those of their programs but computed without them.

Where every pipeline position has one rank class, all that a rank does between receiving and sending runs in a row, so
that a pass is one number. Plans of one schedule differ in such numbers alone and are walked side by side, as rows of
ticks; each row is computed once for all plans that share it. All other plans are lowered, also those whose passes wait
for other data ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import step_ticks
from meshwise.simulator.engine.flows import MAX_TICKS
from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.durations import SendTicks, TickTables
from meshwise.strategies.bounds.longest_path import Endings, StepRows, arrange_schedule, finish_steps, walk
from meshwise.strategies.lowering import lower
from meshwise.strategies.lowering.costs.stage import Machine, StageCosts
from meshwise.strategies.lowering.rank_classes.placement import tied_kind
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.plan import Plan

WALKED_SCHEDULES = frozenset({"naive", "gpipe", "1f1b", "interleaved"})
"""Schedules in which the last gradients of all stages are those of the last microbatch, and made by whole backwards."""


class LongestPaths:
    """The longest paths of the plans of one problem, from rows of ticks that plans share, which are cached.

    Rows are those of machines of one rank class a position.
    """

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.get_shared(TickTables)
        self._passes: dict[tuple[object, ...], IntArray] = {}
        self._sends: dict[SendTicks, IntArray] = {}
        self._filled: dict[tuple[object, ...], IntArray] = {}
        self._endings: dict[tuple[object, ...], Endings] = {}

    def pass_row(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks of every pass, in columns ``2 * stage``, and 1 more for a backward."""
        (rank,) = machine.ranks[0]
        stage_kinds = self.costs.stage_kinds(plan)
        key = (stage_kinds, self.costs.blocks.cost_key(plan), rank.key, plan.slices_boundaries and plan.pipeline)
        if key not in self._passes:
            forward, backward = map(_to_row, self.durations.pass_ticks(plan, rank))
            rows = np.stack([forward, backward], axis=1)[stage_kinds.index]
            self._passes[key] = (rows + self._gather_rows(plan, machine) if plan.slices_boundaries else rows).ravel()
        return self._passes[key]

    def send_row(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks of sending the output of each pass, in the same columns."""
        sends = self.durations.send_ticks(plan, machine)
        if sends not in self._sends:
            self._sends[sends] = np.stack(list(map(_to_row, sends)), axis=1).ravel()
        return self._sends[sends]

    def bucket_row(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks from the start of a last backward until each bucket leaves, stage after stage."""
        (rank,) = machine.ranks[0]
        stage_kinds = self.costs.stage_kinds(plan)
        slices = plan.slices_boundaries and plan.pipeline
        key = (stage_kinds, self.costs.blocks.cost_key(plan), rank.key, slices, plan.positions, plan.zero >= 3)
        if key not in self._filled:
            kinds = []
            for kind, buckets in enumerate(self.durations.list_buckets(plan, machine)):
                costs = reversed(self.durations.list_block_costs(plan, stage_kinds, kind, rank))
                ticks = list(accumulate(chain.from_iterable(repeat(cost.backward_ticks, n) for cost, n in costs)))
                kinds.append([ticks[bucket.num_blocks - 1] for bucket in buckets])
            rows = [kinds[kind] for kind in stage_kinds.kind_of]
            bucket_ticks = _to_row(list(chain.from_iterable(rows)))
            if plan.slices_boundaries:
                bucket_ticks += np.repeat(self._gather_rows(plan, machine)[:, 1], list(map(len, rows)))
            self._filled[key] = bucket_ticks
        return self._filled[key]

    def _gather_rows(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks in which each pass first gathers the slices that it receives, one row per stage."""
        result = np.zeros((len(plan.stages), 2), np.int64)
        tensor = machine.ranks[0][0].groups.get(TENSOR)
        if plan.pipeline > 1 and tensor is not None and plan.slices_boundaries:
            sizes = [float(self.costs.boundary_bytes(plan, stage)) for stage in range(len(plan.stages) - 1)]
            result[1:, 0] = result[:-1, 1] = _to_row([tensor.ticks(Collective.ALL_GATHER, size) for size in sizes])
        return result

    def ending_rows(self, plan: Plan, machine: Machine) -> Endings:
        """Return the ticks of a step's ending, one row of each column."""
        stage_kinds = self.costs.stage_kinds(plan)
        key = (machine, stage_kinds, plan.positions, self.costs.blocks.cut_key(plan), plan.zero, plan.overlap_gradients)
        if key not in self._endings:
            bucket_reductions, *other_ticks = self.durations.ending_ticks(plan, machine)
            first_buckets = np.cumsum([0, *map(len, bucket_reductions)])
            rows = (list(chain(*bucket_reductions)), *other_ticks, self._tied_ticks(plan, machine))
            self._endings[key] = Endings(first_buckets, *map(_to_row, rows))
        return self._endings[key]

    def _tied_ticks(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks of the sum of each tied parameter's gradients."""
        result = []
        for first_position, second_position, elements in self.costs.list_tied_shares(plan):
            kind = tied_kind(first_position, second_position)
            size = float(elements * self.costs.problem.training.gradient_bytes)
            groups = machine.list_distinct_groups(kind, Collective.ALL_REDUCE)[first_position]
            result.append(machine.least_ticks(kind, groups, Collective.ALL_REDUCE, size))
        return result

    def ticks(self, plans: Sequence[Plan]) -> IntArray:
        """Return the ticks of one step of every plan."""
        result = np.empty(len(plans), np.int64)
        batches: dict[tuple[object, ...], list[tuple[int, Plan, Machine]]] = {}
        for index, plan in enumerate(plans):
            machine = self.costs.machine(plan)
            is_walked = machine.is_uniform and plan.schedule in WALKED_SCHEDULES
            if is_walked and not plan.offload and not _waits_for_groups(plan):
                key = (plan.schedule, plan.num_microbatches, plan.chunks, self.costs.stage_kinds(plan))
                batches.setdefault(key, []).append((index, plan, machine))
            else:
                result[index] = step_ticks(lower(self.costs.problem, plan, costs=self.costs), "longest_path")
        for batch in batches.values():
            result[[index for index, _, _ in batch]] = self._walk_batch([row[1:] for row in batch])
        return result

    def _walk_batch(self, batch: Sequence[tuple[Plan, Machine]]) -> IntArray:
        """Return the ticks of plans of one schedule on equally divided stages."""
        # Passes and endings have keys of their own, so that plans may share either.
        lanes, endings = dict[tuple[object, ...], int](), dict[tuple[object, ...], int]()
        lane_rows, ending_rows, plan_rows = list[list[IntArray]](), list[Endings](), list[tuple[int, int]]()
        blocks = self.costs.blocks
        for plan, machine in batch:
            lane = lanes.setdefault((machine, blocks.cost_key(plan), plan.slices_boundaries), len(lanes))
            if lane == len(lane_rows):
                row_builders = (self.pass_row, self.send_row, self.bucket_row)
                lane_rows.append([build_row(plan, machine) for build_row in row_builders])
            ending_key = (machine, blocks.cut_key(plan), plan.zero, plan.overlap_gradients)
            ending = endings.setdefault(ending_key, len(endings))
            if ending == len(ending_rows):
                ending_rows.append(self.ending_rows(plan, machine))
            plan_rows.append((lane, ending))
        plan = batch[0][0]
        arrangement = arrange_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        passes, sends, bucket_ticks = map(_pad_rows, zip(*lane_rows, strict=True))
        ending_table = Endings(*map(_pad_rows, zip(*ending_rows, strict=True)))
        steps = StepRows(*map(np.array, zip(*plan_rows, strict=True)))
        # In floats, because integers would overflow unseen before the check.
        work = (passes + sends).sum(axis=1, dtype=np.float64) * plan.num_microbatches
        ending_work = sum(column.sum(axis=1, dtype=np.float64) for column in ending_table[1:])
        most_work = (work[steps.lane] + ending_work[steps.ending]).max()
        if most_work > MAX_TICKS:
            raise ValueError(f"the work of a step takes at most {MAX_TICKS} ticks (13 days), met {most_work:.3g}")
        pairs = np.array(self.costs.list_tied_shares(plan), dtype=np.int64).reshape(-1, 3)[:, :2]
        pass_times = walk(arrangement, passes, sends)
        return finish_steps(steps, pass_times, bucket_ticks, ending_table, arrangement.last_stages, pairs)


def _waits_for_groups(plan: Plan) -> bool:
    """Return whether passes wait for gathers and reductions, or gradients are summed in two steps."""
    return plan.replica > 1 or (plan.zero >= 2 and plan.shards > 1)


def _pad_rows(rows: Sequence[IntArray]) -> IntArray:
    """Return rows as one table, shorter rows filled up with zeros."""
    result = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def _to_row(ticks: Sequence[int]) -> IntArray:
    """Return ticks as an array of 64 bits."""
    if max(ticks, default=0) > MAX_TICKS:
        raise ValueError(f"the ticks of a task lie in 0..{MAX_TICKS} (13 days), met {max(ticks)}")
    return np.array(ticks, dtype=np.int64)


def find_path_times(costs: StageCosts, plans: Sequence[Plan]) -> IntArray:
    """Return the ticks of one step of every plan, as if no two transfers shared a link.

    They equal the longest path of ``lower(costs.problem, plan, costs=costs)``.

    Raises
    ------
    ValueError
        Where a schedule's orders cannot finish, or the work of a step exceeds 2**60 ticks.
    """
    return costs.get_shared(LongestPaths).ticks(plans)
