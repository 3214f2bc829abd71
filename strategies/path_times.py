"""The longest paths of many plans: equal to those of their programs, without making any.

Where every pipeline position has one class of ranks, whatever a rank does between what it
receives and what it sends runs one after another, so that a pass is one number; plans of one
schedule differ in such numbers alone and are walked side by side. All others are lowered,
those too whose passes wait for other data ranks.
"""

from collections.abc import Sequence

import numpy as np

from simulator.bundle import LONGEST
from simulator.engine import step_ticks
from simulator.program import IntArray
from strategies.finish import Endings, Steps, finish
from strategies.lowering import lower
from strategies.lowering.stage import Machine, StageCosts
from strategies.path_rows import PathRows
from strategies.plan import Plan
from strategies.walk import arrangement, walk

WALKED = frozenset({"naive", "gpipe", "1f1b", "interleaved"})
"""Schedules whose last gradients are all those of the last microbatch, and come whole."""


def path_times(costs: StageCosts, plans: Sequence[Plan]) -> IntArray:
    """Return the ticks of one step of every plan, as if no two transfers shared a link.

    The same as the longest path of ``lower(costs.problem, plan, costs=costs)``.

    Raises
    ------
    ValueError
        Where a schedule's orders cannot finish, or the work of a step exceeds 2**60 ticks.
    """
    return costs.once(LongestPaths).ticks(plans)


class LongestPaths:
    """The longest paths of the plans of one problem, with the rows of ticks kept that plans share."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.rows = costs, PathRows(costs)

    def ticks(self, plans: Sequence[Plan]) -> IntArray:
        """Return the ticks of one step of every plan."""
        result = np.empty(len(plans), np.int64)
        batches: dict[tuple[object, ...], _Batch] = {}
        for index, plan in enumerate(plans):
            machine = self.costs.machine(plan)
            if not machine.uniform or plan.offload or plan.schedule_name not in WALKED or _waits(plan):
                result[index] = self._lowered(plan)
                continue
            key = (plan.schedule_name, plan.num_microbatches, plan.chunks, self.costs.division(plan))
            if key not in batches:
                batches[key] = _Batch(plan, self.rows)
            batches[key].add(index, plan, machine)
        for batch in batches.values():
            result[batch.indices] = batch.ticks()
        return result

    def _lowered(self, plan: Plan) -> int:
        return step_ticks(lower(self.costs.problem, plan, costs=self.costs), "longest_path")


class _Batch:
    """Plans of one schedule on equally divided stages."""

    def __init__(self, first: Plan, rows: PathRows) -> None:
        self.first, self.rows, self.costs = first, rows, rows.costs
        self.indices: list[int] = []
        self._lane: list[int] = []
        self._ending: list[int] = []
        self._lanes: dict[tuple[object, ...], int] = {}
        self._endings: dict[tuple[object, ...], int] = {}
        self._lane_rows: list[tuple[IntArray, IntArray, IntArray]] = []
        self._ending_rows: list[Endings] = []

    def add(self, index: int, plan: Plan, machine: Machine) -> None:
        """Take in one more plan, whose result has a place."""
        self.indices.append(index)
        lane = (machine, self.costs.blocks.how(plan), plan.slices_boundaries)
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes)
            rows = self.rows
            self._lane_rows.append((rows.passes(plan, machine), rows.sends(plan, machine), rows.filled(plan, machine)))
        self._lane.append(self._lanes[lane])
        ending = (machine, self.costs.blocks.cut(plan), plan.zero, plan.overlap_gradients)
        if ending not in self._endings:
            self._endings[ending] = len(self._endings)
            self._ending_rows.append(self.rows.ending(plan, machine))
        self._ending.append(self._endings[ending])

    def ticks(self) -> IntArray:
        """Return the ticks of all plans, in the order in which they came."""
        plan = self.first
        arranged = arrangement(plan.schedule_name, plan.pipeline, plan.num_microbatches, plan.chunks)
        passes, sends, filled = map(_table, zip(*self._lane_rows, strict=True))
        endings = Endings(*map(_table, zip(*self._ending_rows, strict=True)))
        steps = Steps(np.array(self._lane), np.array(self._ending))
        work = (passes + sends).sum(axis=1, dtype=np.float64) * plan.num_microbatches
        after = sum(column.sum(axis=1, dtype=np.float64) for column in endings[1:])
        if (work[steps.lane] + after[steps.ending]).max() > LONGEST:
            raise ValueError(f"the work of a step takes at most {LONGEST} ticks (13 days), met {work.max():.3g}")
        pairs = np.array(self.costs.tied(plan), dtype=np.int64).reshape(-1, 3)[:, :2]
        return finish(steps, walk(arranged, passes, sends), filled, endings, arranged.last, pairs)


def _waits(plan: Plan) -> bool:
    """Return whether passes wait for gathers and reductions, or gradients are summed in two steps."""
    return plan.replica > 1 or (plan.zero >= 2 and plan.shards > 1)


def _table(rows: Sequence[IntArray]) -> IntArray:
    """Return rows as one table, the shorter ones filled up with zeros."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return np.array(rows)
    result = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result
