"""Builds the numbers of a `DivisionProblem` from the costs of a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.durations import TickTables
from meshwise.strategies.bounds.longest_path import arrange_schedule
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.bounds.step_time import StepBounds
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import BlockPasses, StageCosts
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute
from meshwise.strategies.schedules.orders import list_orders
from meshwise.strategies.stages.division import DivisionProblem, FloatArray, Moments

ROUNDING_BYTES = 1024.0
"""Bytes by which states may differ from a straight line: shares are rounded up, each by less than an element."""


def build_division_problem(
    costs: StageCosts, plan: Plan, recompute_choices: tuple[Recompute, ...], spread: int
) -> DivisionProblem:
    """Return the problem of dividing the layers of a plan among its stages.

    It is a relaxation: no division is simulated faster than its critical path here, and every division that fits in
    memory fits here. Where layers or ranks differ, the least of them counts.

    The plan may have any division, on a schedule of `meshwise.strategies.bounds.path_times.WALKED_SCHEDULES`. Layers
    may recompute selectively or fully. A stage may have ``spread`` layers more or fewer than in an even division, or
    as many as a stage of the plan; each stage has at least one.
    """
    return _DivisionTables(costs, plan, recompute_choices, spread).build_problem()


def compute_work_bound(costs: StageCosts, plan: Plan, spread: int) -> float:
    """Return a lower bound in ticks of the step time of every division: ranks share the work as their speeds allow.

    A rank with ``n`` layers of ``w`` ticks, ``h`` other ticks, and a path of ``d`` ticks before its first pass and
    after its last one takes ``d + microbatches * (w * n + h)``. The sum of ``n`` over ranks is given, so the latest
    rank is earliest where all end at once. Paths are the shortest possible: through stages with the fewest layers.
    """
    return _DivisionTables(costs, plan, (), spread).compute_work()


_DIRECTIONS = "forward", "backward"
"""The passes of a block, by the fields of `BlockPasses`."""


class _DivisionTables:
    """The costs of a plan's layers, other blocks and transfers; the least where layers or ranks differ."""

    def __init__(self, costs: StageCosts, plan: Plan, recompute_choices: tuple[Recompute, ...], spread: int) -> None:
        self.costs, self.recompute_choices = costs, recompute_choices
        self.plan = replace(plan, recompute=Recompute.NONE)
        self.machine: Machine = costs.machine(self.plan)
        self.positions = np.array(plan.positions)
        occurrences = costs.problem.graph.occurrences
        layer_names = [name for name, block in occurrences if block.layer] or [occurrences[0][0]]
        self.keys = costs.find_keys(self.plan)
        kind_of_block = self.keys.cut.kinds.kind_names
        self.num_layers, layer_set = len(layer_names), set(layer_names)
        self.layer_kinds = tuple(dict.fromkeys(kind_of_block[name] for name in layer_names))
        elements = {name: costs.blocks.count_parameters(self.keys.cut, kind_of_block[name]) for name in layer_names}
        self.lightest_layer = min(layer_names, key=elements.__getitem__)
        self.other_blocks = [[name for name in stage.blocks if name not in layer_set] for stage in plan.stages]
        self.other_kinds = [[kind_of_block[name] for name in row] for row in self.other_blocks]
        num_stages = len(plan.stages)
        self.position_ranks = self.machine.ranks if plan.pipeline > 1 else [[self._find_slowest_rank()]]
        layer_counts = [len(stage.blocks) - len(row) for stage, row in zip(plan.stages, self.other_blocks, strict=True)]
        self.min_layers = max(1, min(self.num_layers // num_stages - spread, *layer_counts, self.num_layers))
        self.max_layers = min(self.num_layers, max(-(-self.num_layers // num_stages) + spread, *layer_counts, 1))

    def _find_slowest_rank(self) -> RankProfile:
        """Return the slowest rank of a plan with one stage, where each rank runs all layers and all wait for it."""

        def count_ticks(rank: RankProfile) -> int:
            blocks = (self._find_passes(name, rank) for name in self.layer_kinds)
            return sum(block.forward.ticks + block.backward.ticks for block in blocks)

        return max(self.machine.ranks[0], key=count_ticks)

    def _find_passes(
        self, name: str, rank: RankProfile, recompute_choice: LayerRecompute = Recompute.NONE
    ) -> BlockPasses:
        """Return the passes of a block on a rank."""
        run = self.costs.find_batch_run(self.keys.run, rank.batch)
        return self.costs.block_passes(run, name, recompute_choice, rank)

    def build_problem(self) -> DivisionProblem:
        """Return the problem of the division."""
        bounds, plan_memory = self.costs.get_shared(StepBounds), self.costs.get_shared(PlanMemory)
        tail_ticks, tail_layer_ticks = self._fit_line(lambda plan: bounds.tails(plan, self.machine))
        resident_bytes, state_bytes = self._fit_line(plan_memory.resident_memory)
        plain_ticks = self._list_layer_ticks("backward")
        layer_ticks = np.stack([self._list_layer_ticks("forward"), plain_ticks], axis=1).ravel()
        recomputed_ticks = [self._list_layer_ticks("backward", choice) for choice in self.recompute_choices]
        layer_kept_bytes, *recomputed_bytes = (
            min(self._count_kept_bytes(name, choice) for name in self.layer_kinds)
            for choice in (Recompute.NONE, *self.recompute_choices)
        )
        base_kept_bytes = [
            sum(self._count_kept_bytes(name, Recompute.NONE) for name in row) for row in self.other_kinds
        ]
        saved_bytes = [max(layer_kept_bytes - option_bytes, 0) for option_bytes in recomputed_bytes]
        free_bytes = plan_memory.capacity(self.plan, self.plan.sequences) - resident_bytes + ROUNDING_BYTES
        num_stages, plan = len(self.positions), self.plan
        return DivisionProblem(
            arrangement=arrange_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks),
            num_layers=self.num_layers,
            min_layers=self.min_layers,
            max_layers=self.max_layers,
            base_ticks=self.count_base_ticks(),
            layer_ticks=layer_ticks,
            recompute_ticks=np.maximum(np.array(recomputed_ticks).reshape(-1, num_stages) - plain_ticks, 0.0),
            send_ticks=self._list_send_ticks(),
            tail_ticks=tail_ticks,
            tail_layer_ticks=tail_layer_ticks,
            base_kept_bytes=np.array(base_kept_bytes, float),
            layer_kept_bytes=np.full(num_stages, float(layer_kept_bytes)),
            saved_bytes=np.repeat(np.array(saved_bytes, float)[:, None], num_stages, axis=1),
            moments=self._list_moments(free_bytes),
            state_bytes=state_bytes,
        )

    def compute_work(self) -> float:
        """Return the ticks of a step in which all ranks end at once."""
        num_ranks, num_microbatches = self.plan.pipeline, self.plan.num_microbatches
        layer_ticks = self._list_layer_ticks("forward") + self._list_layer_ticks("backward")
        other_ticks, send_ticks = (
            row.reshape(-1, 2).sum(axis=1) for row in (self.count_base_ticks(), self._list_send_ticks())
        )
        path_ticks = np.cumsum(self.min_layers * layer_ticks + other_ticks + send_ticks)[: num_ranks - 1]
        lightest_plan = self._build_uniform_plan(self.min_layers)
        tail_ticks = min(self.costs.get_shared(StepBounds).tails(lightest_plan, self.machine))
        fixed_ticks = num_microbatches * other_ticks.reshape(-1, num_ranks).sum(axis=0)
        fixed_ticks = fixed_ticks + np.r_[0.0, path_ticks] + tail_ticks
        layer_work = num_microbatches * layer_ticks[:num_ranks]
        # a rank whose layers take no time can take all of them
        if (layer_work <= 0).any():
            return float(fixed_ticks.max())
        return float((self.num_layers + (fixed_ticks / layer_work).sum()) / (1 / layer_work).sum())

    def _build_uniform_plan(self, num_layers: int) -> Plan:
        """Return a plan whose stages all have ``num_layers`` copies of the layer with fewest parameters."""
        layer_names = (self.lightest_layer,) * num_layers
        rows = [
            (*row, *layer_names) if stage == 0 else (*layer_names, *row) for stage, row in enumerate(self.other_blocks)
        ]
        return replace(self.plan, stages=tuple(map(Stage, rows)))

    def _fit_line(self, list_values: Callable[[Plan], Sequence[int] | IntArray]) -> tuple[FloatArray, FloatArray]:
        """Return offset and slope by position of what is linear in the layers of a rank, as states and tails are.

        Two plans with equal stages, of the fewest and the most layers, give the lines.
        """
        counts = (self.min_layers, max(self.max_layers, self.min_layers + 1))
        low_values, high_values = (np.array(list_values(self._build_uniform_plan(count)), float) for count in counts)
        low_count, high_count = (self.plan.chunks * count for count in counts)
        slope = (high_values - low_values) / (high_count - low_count)
        return low_values - slope * low_count, slope

    def _list_layer_ticks(self, field: str, recompute_choice: LayerRecompute = Recompute.NONE) -> FloatArray:
        """Return the least ticks of a layer's forward or backward, by the field of its passes, on every stage."""
        blocks = (
            [self._find_passes(name, rank, recompute_choice) for name in self.layer_kinds for rank in ranks]
            for ranks in self.position_ranks
        )
        least_ticks = [min(getattr(block, field).ticks for block in row) for row in blocks]
        result: FloatArray = np.array(least_ticks, float)[self.positions]
        return result

    def count_base_ticks(self) -> FloatArray:
        """Return the least ticks of the blocks of every stage that are no layers, by pass."""
        result = np.zeros((len(self.positions), 2))
        for stage, names in enumerate(self.other_kinds):
            ranks = self.position_ranks[self.positions[stage]]
            for name in names:
                blocks = [self._find_passes(name, rank) for rank in ranks]
                least_ticks = (
                    min(block.forward.ticks for block in blocks),
                    min(block.backward.ticks for block in blocks),
                )
                result[stage] += least_ticks
        return result.ravel()

    def _list_send_ticks(self) -> FloatArray:
        """Return the ticks of transfers by pass; 0 where the bytes sent depend on the division."""
        num_stages = len(self.positions)
        if len({self.costs.boundary_bytes(self.plan, stage) for stage in range(num_stages - 1)}) > 1:
            return np.zeros(2 * num_stages)
        send_ticks = self.costs.get_shared(TickTables).send_ticks(self.plan, self.machine)
        return np.stack([np.array(ticks, float) for ticks in send_ticks], axis=1).ravel()

    def _count_kept_bytes(self, name: str, recompute_choice: LayerRecompute) -> int:
        return self.costs.blocks.memory(self.keys.run, name, recompute_choice).kept_bytes

    def _list_moments(self, free_bytes: FloatArray) -> tuple[Moments, ...]:
        """Return for every rank the moments at which backwards begin with most activations kept."""
        plan, num_stages = self.plan, len(self.positions)
        if self.costs.problem.training.conventions.buffers_every_microbatch:
            return (Moments(np.zeros((0, num_stages), np.int64), np.zeros(0)),) * plan.pipeline
        rows = list_fullest_moments(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        working_bytes = [self._count_working_bytes(stage) for stage in range(num_stages)]
        result = []
        for rank, rank_moments in enumerate(rows):
            num_alive = np.zeros((len(rank_moments), num_stages), np.int64)
            for row, (num_kept, _) in enumerate(rank_moments):
                num_alive[row, rank :: plan.pipeline] = num_kept
            rank_bytes = [free_bytes[rank] - working_bytes[stage] for _, stage in rank_moments]
            result.append(Moments(num_alive, np.array(rank_bytes, float)))
        return tuple(result)

    def _count_working_bytes(self, stage: int) -> int:
        """Return the least working bytes of a stage's backward as it begins, in the last block of the stage."""
        if self.plan.zero >= 2:  # gradients may be counted with what they take the place of
            return 0
        memory = self.costs.blocks.memory
        if stage and self.other_kinds[stage]:
            memories = [memory(self.keys.run, self.other_kinds[stage][-1], Recompute.NONE)]
        else:
            choices = product(self.layer_kinds, (Recompute.NONE, *self.recompute_choices))
            memories = [memory(self.keys.run, *choice) for choice in choices]
        return max(min(row.recomputed_bytes + row.backward for row in memories), 0)


@lru_cache(maxsize=512)
def list_fullest_moments(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[list[tuple[IntArray, int]], ...]:
    """Return for every rank the moments of most activations: microbatches kept by each of its stages, and a stage.

    The stage is the one whose backward begins at the moment. Moments are left out where another backward of the stage
    begins with at least as many microbatches of every stage.

    >>> [[(kept.tolist(), stage) for kept, stage in rank] for rank in list_fullest_moments("1f1b", 2, 4, 1)]
    [[([2], 0)], [([1], 1)]]
    """
    schedule_orders = list_orders(name, num_ranks, num_microbatches, num_chunks)
    result = []
    for start, end in pairwise(schedule_orders.start):
        passes = schedule_orders.passes[start:end]
        chunk, is_backward = passes // 2 // num_ranks, passes % 2
        change = np.zeros((len(passes), num_chunks), np.int64)
        change[np.arange(len(passes)), chunk] = 1 - 2 * is_backward
        num_kept = np.cumsum(change, axis=0) - change
        rows: list[tuple[IntArray, int]] = []
        for stage in dict.fromkeys((passes[is_backward == 1] // 2).tolist()):
            rows += [(row, stage) for row in _select_maximal(num_kept[passes == 2 * stage + 1])]
        result.append(rows)
    return tuple(result)


def _select_maximal(rows: IntArray) -> list[IntArray]:
    """Return the rows that no other row equals or exceeds in all columns."""
    rows = np.unique(rows, axis=0)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    maximal_rows: list[IntArray] = []
    for row in rows:
        if not any((row <= maximal_row).all() for maximal_row in maximal_rows):
            maximal_rows.append(row)
    return maximal_rows
