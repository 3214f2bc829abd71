"""Builds the numbers of a `DivisionProblem` from the costs of a plan."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.durations import Durations
from meshwise.strategies.bounds.longest_path import arrangement
from meshwise.strategies.bounds.memory import Needs
from meshwise.strategies.bounds.step_time import Bounds
from meshwise.strategies.lowering import StageCosts
from meshwise.strategies.lowering.costs.stage import Machine, Rank
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import OfLayer, Recompute
from meshwise.strategies.schedules.orders import orders
from meshwise.strategies.stages.division import DivisionProblem, FloatArray, Moments

WAYS = (Recompute.SELECTIVE, Recompute.FULL)
"""The recompute choices of a layer, besides none."""

ROUNDING = 1024.0
"""Bytes by which states may differ from a straight line: shares are rounded up, each by less than an element."""


def division_problem(costs: StageCosts, plan: Plan, ways: tuple[Recompute, ...], spread: int) -> DivisionProblem:
    """Return the problem of dividing the layers of a plan among its stages.

    It is a relaxation: no division is simulated faster than its critical path here, and every division that fits in
    memory fits here. Where layers or ranks differ, the least of them counts.

    Parameters
    ----------
    plan
        Any division of the layers, on a schedule of `meshwise.strategies.bounds.path_times.WALKED`.
    recompute_choices
        Those of `RECOMPUTE_CHOICES` that layers may have.
    spread
        Layers that a stage may have more or fewer than in an even division, or as many as a stage of the plan; each
        stage has at least one.
    """
    return _Tables(costs, plan, ways, spread).problem()


def least_work(costs: StageCosts, plan: Plan, spread: int) -> float:
    """Return a lower bound in ticks of the step time of every division: ranks share the work as their speeds allow.

    A rank with ``n`` layers of ``w`` ticks, ``h`` other ticks, and a path of ``d`` ticks before its first pass and
    after its last one takes ``d + microbatches * (w * n + h)``. The sum of ``n`` over ranks is given, so the latest
    rank is earliest where all end at once. Paths are the shortest possible: through stages with the fewest layers.
    """
    return _Tables(costs, plan, (), spread).work()


class _Tables:
    """The costs of a plan's layers, other blocks and transfers; the least where layers or ranks differ."""

    def __init__(self, costs: StageCosts, plan: Plan, ways: tuple[Recompute, ...], spread: int) -> None:
        self.costs, self.ways = costs, ways
        self.plan = replace(plan, recompute=Recompute.NONE)
        self.machine: Machine = costs.machine(self.plan)
        self.positions = np.array(plan.positions)
        occurrences = costs.problem.graph.occurrences
        names = [name for name, block in occurrences if block.layer] or [occurrences[0][0]]
        kinds = costs.blocks.kinds(self.plan).names
        self.layers = len(names)
        self.kinds = tuple(dict.fromkeys(kinds[name] for name in names))
        self.lightest = min(names, key=lambda name: costs.blocks.parameters(self.plan, kinds[name]))
        own = set(names)
        self.besides = [[name for name in stage.blocks if name not in own] for stage in plan.stages]
        self.besides_kinds = [[kinds[name] for name in row] for row in self.besides]
        stages = len(plan.stages)
        self.ranks = self.machine.ranks if plan.pipeline > 1 else [[self._slowest()]]
        counts = [len(stage.blocks) - len(row) for stage, row in zip(plan.stages, self.besides, strict=True)]
        self.fewest = max(1, min(self.layers // stages - spread, *counts, self.layers))
        self.most = min(self.layers, max(-(-self.layers // stages) + spread, *counts, 1))

    def _slowest(self) -> Rank:
        """Return the slowest rank of a plan with one stage, where each rank runs all layers and all wait for it."""

        def ticks(rank: Rank) -> int:
            found = (self.costs.blocks.cost(self.plan, name, rank, Recompute.NONE) for name in self.kinds)
            return sum(each.forward_ticks + each.backward_ticks for each in found)

        return max(self.machine.ranks[0], key=ticks)

    def problem(self) -> DivisionProblem:
        """Return the problem of the division."""
        # states and tails are linear in the layers of a rank: two plans with equal stages give the lines
        low, high = (self._same(count) for count in (self.fewest, max(self.most, self.fewest + 1)))
        bounds, needs = self.costs.once(Bounds), self.costs.once(Needs)
        tail, tail_layer = self._line(*(np.array(bounds.tails(each, self.machine), float) for each in (low, high)))
        held, states = self._line(*(needs.held(each).astype(float) for each in (low, high)))
        layer = np.stack([self.layer(forward=True), self.layer(forward=False)], axis=1).ravel()
        full = np.array([[self._backward(how)[at] for at in self.positions] for how in self.ways])
        plain = np.array(self._backward(Recompute.NONE))[self.positions]
        kept_layer = min(self._memory(name, Recompute.NONE) for name in self.kinds)
        least = [min(self._memory(name, how) for name in self.kinds) for how in self.ways]
        stages, plan = len(self.positions), self.plan
        return DivisionProblem(
            arranged=arrangement(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks),
            layers=self.layers,
            fewest=self.fewest,
            most=self.most,
            base_ticks=self.count_base_ticks(),
            layer=layer,
            again=np.maximum(full.reshape(len(self.ways), stages) - plain, 0.0),
            sends=self._sends(),
            tail=tail,
            tail_layer=tail_layer,
            kept=np.array([sum(self._memory(n, Recompute.NONE) for n in row) for row in self.besides_kinds], float),
            kept_layer=np.full(stages, float(kept_layer)),
            saved=np.array([np.full(stages, max(kept_layer - size, 0)) for size in least], float).reshape(-1, stages),
            moments=self._moments(needs.capacity(self.plan, self.plan.sequences) - held + ROUNDING),
            states=states,
        )

    def work(self) -> float:
        """Return the ticks of a step in which all ranks end at once."""
        ranks, count = self.plan.pipeline, self.plan.num_microbatches
        each = self.layer(forward=True) + self.layer(forward=False)
        besides, sends = (row.reshape(-1, 2).sum(axis=1) for row in (self.count_base_ticks(), self._sends()))
        way = np.cumsum(self.fewest * each + besides + sends)[: ranks - 1]
        tail = min(self.costs.once(Bounds).tails(self._same(self.fewest), self.machine))
        fixed = count * besides.reshape(-1, ranks).sum(axis=0) + np.r_[0.0, way] + tail
        least = count * each[:ranks]
        # a rank whose layers take no time can take all of them
        if (least <= 0).any():
            return float(fixed.max())
        return float((self.layers + (fixed / least).sum()) / (1 / least).sum())

    def _same(self, count: int) -> Plan:
        """Return a plan whose stages all have ``num_layers`` copies of the layer with fewest parameters."""
        layers = (self.lightest,) * count
        rows = [(*row, *layers) if stage == 0 else (*layers, *row) for stage, row in enumerate(self.besides)]
        return replace(self.plan, stages=tuple(map(Stage, rows)))

    def _line(self, low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return offset and slope of the lines through values of the plans with the fewest and the most layers."""
        chunks = self.plan.chunks
        first, last = chunks * self.fewest, chunks * max(self.most, self.fewest + 1)
        each = (high - low) / (last - first)
        return low - each * first, each

    def layer(self, *, forward: bool) -> FloatArray:
        """Return the least ticks of a layer's forward, or else backward, on every stage."""
        if not forward:
            result: FloatArray = np.array(self._backward(Recompute.NONE), float)[self.positions]
            return result
        blocks, ranks = self.costs.blocks, self.ranks
        each = [
            min(blocks.cost(self.plan, name, rank, Recompute.NONE).forward_ticks for rank in own for name in self.kinds)
            for own in ranks
        ]
        least: FloatArray = np.array(each, float)[self.positions]
        return least

    def _backward(self, how: OfLayer) -> list[int]:
        """Return the least ticks of a layer's backward on every pipeline position."""
        blocks, ranks = self.costs.blocks, self.ranks
        return [
            min(blocks.cost(self.plan, name, rank, how).backward_ticks for rank in own for name in self.kinds)
            for own in ranks
        ]

    def count_base_ticks(self) -> FloatArray:
        """Return the least ticks of the blocks of every stage that are no layers, by pass."""
        result = np.zeros((len(self.positions), 2))
        for stage, names in enumerate(self.besides_kinds):
            ranks = self.ranks[self.positions[stage]]
            for name in names:
                found = [self.costs.blocks.cost(self.plan, name, rank, Recompute.NONE) for rank in ranks]
                result[stage] += min(each.forward_ticks for each in found), min(each.backward_ticks for each in found)
        return result.ravel()

    def _sends(self) -> FloatArray:
        """Return the ticks of transfers by pass; 0 where the bytes sent depend on the division."""
        stages = len(self.positions)
        if len({self.costs.boundary_bytes(self.plan, stage) for stage in range(stages - 1)}) > 1:
            return np.zeros(2 * stages)
        sends = self.costs.once(Durations).sends(self.plan, self.machine)
        return np.stack([np.array(each, float) for each in sends], axis=1).ravel()

    def _memory(self, name: str, how: OfLayer) -> int:
        return self.costs.blocks.memory(self.plan, name, how).kept

    def _moments(self, room: FloatArray) -> tuple[Moments, ...]:
        """Return for every rank the moments at which backwards begin with most activations kept."""
        plan, stages = self.plan, len(self.positions)
        if self.costs.problem.training.conventions.buffers_every_microbatch:
            return (Moments(np.zeros((0, stages), np.int64), np.zeros(0)),) * plan.pipeline
        rows = fullest_moments(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        working = [self._working(stage) for stage in range(stages)]
        result = []
        for rank, found in enumerate(rows):
            alive = np.zeros((len(found), stages), np.int64)
            for row, (kept, _) in enumerate(found):
                alive[row, rank :: plan.pipeline] = kept
            result.append(Moments(alive, np.array([room[rank] - working[stage] for _, stage in found], float)))
        return tuple(result)

    def _working(self, stage: int) -> int:
        """Return the least working bytes of a stage's backward as it begins, in the last block of the stage."""
        if self.plan.zero >= 2:  # gradients may be counted with what they take the place of
            return 0
        memory = self.costs.blocks.memory
        if stage and self.besides_kinds[stage]:
            last = memory(self.plan, self.besides_kinds[stage][-1], Recompute.NONE)
            return max(last.recomputed + last.backward, 0)
        found = (memory(self.plan, name, how) for name in self.kinds for how in (Recompute.NONE, *self.ways))
        return max(min(each.recomputed + each.backward for each in found), 0)


@lru_cache(maxsize=512)
def fullest_moments(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[list[tuple[IntArray, int]], ...]:
    """Return for every rank the moments of most activations: microbatches kept by each of its stages, and a stage.

    The stage is the one whose backward begins at the moment. Moments are left out where another backward of the stage
    begins with at least as many microbatches of every stage.

    >>> [[(kept.tolist(), stage) for kept, stage in rank] for rank in fullest_moments("1f1b", 2, 4, 1)]
    [[([2], 0)], [([1], 1)]]
    """
    found = orders(name, ranks, microbatches, chunks)
    result = []
    for first, end in zip(found.start, found.start[1:], strict=False):
        passes = found.passes[first:end]
        chunk, backward = passes // 2 // ranks, passes % 2
        change = np.zeros((len(passes), chunks), np.int64)
        change[np.arange(len(passes)), chunk] = 1 - 2 * backward
        held = np.cumsum(change, axis=0) - change
        rows: list[tuple[IntArray, int]] = []
        for stage in dict.fromkeys((passes[backward == 1] // 2).tolist()):
            rows += [(row, stage) for row in _largest(held[passes == 2 * stage + 1])]
        result.append(rows)
    return tuple(result)


def _largest(rows: IntArray) -> list[IntArray]:
    """Return the rows that no other row equals or exceeds in all columns."""
    rows = np.unique(rows, axis=0)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    kept: list[IntArray] = []
    for row in rows:
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return kept
