"""UniAP's program: the stage and the strategy of every layer at once, as a mixed integer program.

A step of c microbatches takes ``sum p_i + sum o_j + (c - 1) max(p, o)``, where p_i are the layers of stage i with the
redistributions between them, and o_j what crosses the boundary behind stage j. With ``P_ui`` for layer u on stage i and
``S_uk`` for its strategy k this is quadratic. Here ``P_ui S_uk`` is one binary variable, for a layer has one strategy,
and a pair of them one variable: the pairs of two layers that follow one another add up to exactly the choices at their
ends, so that pairs need not be binary. There are pairs of one stage, or of a stage and the next one, and no others:
stages are contiguous and in order without constraints of their own.

References
----------
Lin et al., "UniAP: unifying inter- and intra-layer automatic parallelism by mixed integer quadratic programming", CVPR
2025 (arXiv 2307.16375): a quadratic time per iteration, strategies among data, fully sharded and tensor parallelism,
stages as in GPipe, and numbers of stages and microbatches tried one after another. That much is said by its abstract
and its public reviews; the formula itself is given here from memory of the paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

import highspy
import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.stages.division import FloatArray
from meshwise.strategies.stages.integer_programs import build_solver

_Row = tuple[IntArray, FloatArray, float, float]
"""A constraint: its columns, their factors, and the bounds of the sum."""


@dataclass(frozen=True, eq=False)
class JointTables:
    """What every layer takes with every strategy on every stage; all times are of a microbatch.

    Parameters
    ----------
    times
        Of shape ``(stages, layers, strategies)``; infinite where a layer has no such strategy.
    memory
        Bytes, of the same shape.
    limits
        Bytes of a device of every stage.
    inner_times
        Of the redistribution between a layer with one strategy and the next layer with another on the same stage, of
        shape ``(layers - 1, strategies, strategies)``.
    crossing_times
        The same where the next layer is on the next stage.
    """

    times: FloatArray
    memory: FloatArray
    limits: FloatArray
    inner_times: FloatArray
    crossing_times: FloatArray

    def compute_time(self, ends: tuple[int, ...], strategies: tuple[int, ...], num_microbatches: int) -> float:
        """Return the time of a step by the formula."""
        parts = []
        for stage, (first, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
            inner = (self.inner_times[u, strategies[u], strategies[u + 1]] for u in range(first, end - 1))
            own_times = (self.times[stage, u, strategies[u]] for u in range(first, end))
            parts.append(float(sum(own_times) + sum(inner)))
        parts += [float(self.crossing_times[end - 1, strategies[end - 1], strategies[end]]) for end in ends[:-1]]
        return sum(parts) + (num_microbatches - 1) * max(parts)

    def fits(self, ends: tuple[int, ...], strategies: tuple[int, ...]) -> bool:
        """Return whether the layers of every stage fit in its memory."""
        spans = enumerate(zip((0, *ends[:-1]), ends, strict=True))
        return all(
            sum(self.memory[stage, u, strategies[u]] for u in range(first, end)) <= self.limits[stage]
            for stage, (first, end) in spans
        )


class JointChoice(NamedTuple):
    """The end of the layers of every stage, the strategy of every layer, and the time by the formula."""

    ends: tuple[int, ...]
    strategies: tuple[int, ...]
    time: float


def solve_joint_program(
    tables: JointTables, num_microbatches: int, *, seconds: float = inf, gap: float = 0.0
) -> JointChoice | None:
    """Return the stages and strategies of least time; ``None`` where none fit, or none are found in ``seconds``.

    Parameters
    ----------
    gap
        Stop when the time is proven within this fraction of the least.

    Examples
    --------
    Two layers take 4 with the first strategy, and 3 with the second, which holds 2 bytes instead of 1. There is room
    for one of them on each of two stages, and 1 crosses between: 3 + 3 + 1 and the slowest once more.

    >>> times, memory = np.array([[[4.0, 3.0]] * 2] * 2), np.array([[[1.0, 2.0]] * 2] * 2)
    >>> tables = JointTables(times, memory, np.full(2, 2.0), np.zeros((1, 2, 2)), np.ones((1, 2, 2)))
    >>> solve_joint_program(tables, 2)
    JointChoice(ends=(1, 2), strategies=(1, 1), time=10.0)
    """
    program = _Program(tables, num_microbatches)
    return program.solve(seconds, gap) if program.is_possible else None


class _Program:
    """The program on the solver: choices of layers, pairs of choices, and the slowest part."""

    def __init__(self, tables: JointTables, num_microbatches: int) -> None:
        self.tables, self.num_microbatches = tables, num_microbatches
        self.num_stages, self.num_layers, self.num_strategies = tables.times.shape
        finite_times = tables.times[np.isfinite(tables.times)]
        # the solver's tolerances are absolute
        self.time_scale = 1.0 / max(float(finite_times.max(initial=0.0)), 1e-300)
        self.choices = self._number_choices()
        self.num_choices = int(self.choices.max(initial=-1)) + 1
        self.pairs = list(self._list_pairs())
        self.slowest_column = self.num_choices + len(self.pairs)

    @property
    def is_possible(self) -> bool:
        """Whether every layer has a choice."""
        return bool((self.choices.max(axis=(0, 2), initial=-1) >= 0).all())

    def _number_choices(self) -> IntArray:
        """Return the columns of choices, in the shape of times; -1 where there is none.

        Each stage has a layer, so that layer u is on none beyond u, and leaves as many layers as stages behind it.
        """
        stages, layers = np.arange(self.num_stages)[:, None], np.arange(self.num_layers)
        is_open = (layers >= stages) & (self.num_layers - layers >= self.num_stages - stages)
        is_open &= (layers > 0) | (stages == 0)
        is_open &= (layers < self.num_layers - 1) | (stages == self.num_stages - 1)
        is_choice = is_open[:, :, None] & np.isfinite(self.tables.times)
        columns = np.where(is_choice, np.cumsum(is_choice).reshape(is_choice.shape) - 1, -1)
        return columns.astype(np.int64)

    def _list_pairs(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield the choices at both ends of a pair, the stage behind which it crosses or -1, and its time."""
        for layer in range(self.num_layers - 1):
            for stage, step in product(range(self.num_stages), (0, 1)):
                if stage + step == self.num_stages:
                    continue
                table = (self.tables.crossing_times if step else self.tables.inner_times)[layer]
                for one, other in product(range(self.num_strategies), repeat=2):
                    ends = self.choices[stage, layer, one], self.choices[stage + step, layer + 1, other]
                    if min(ends) >= 0 and np.isfinite(table[one, other]):
                        yield int(ends[0]), int(ends[1]), stage if step else -1, float(table[one, other])

    def _list_rows(self) -> Iterator[_Row]:
        for layer in range(self.num_layers):
            columns = self.choices[:, layer][self.choices[:, layer] >= 0]
            yield columns, np.ones(len(columns)), 1.0, 1.0
        yield from self._list_pair_rows()
        for stage in range(self.num_stages):
            columns = self.choices[stage][self.choices[stage] >= 0]
            size = self.tables.memory[stage][self.choices[stage] >= 0]
            scale = 1.0 / max(float(size.max(initial=0.0)), float(self.tables.limits[stage]), 1e-300)
            if np.isfinite(self.tables.limits[stage]):
                yield columns, size * scale, -inf, float(self.tables.limits[stage]) * scale
        yield from self._list_slowest_rows()

    def _list_pair_rows(self) -> Iterator[_Row]:
        """Yield that the pairs of two layers sum to the choice at either of their ends."""
        outgoing: list[list[int]] = [[] for _ in range(self.num_choices)]
        incoming: list[list[int]] = [[] for _ in range(self.num_choices)]
        for column, (source, target, _, _) in enumerate(self.pairs, self.num_choices):
            outgoing[source].append(column)
            incoming[target].append(column)
        first, last = (set(self.choices[:, layer].ravel().tolist()) for layer in (0, self.num_layers - 1))
        for choice in range(self.num_choices):
            for columns, is_end in ((outgoing[choice], choice in last), (incoming[choice], choice in first)):
                if not is_end:
                    yield np.array([*columns, choice]), np.r_[np.ones(len(columns)), -1.0], 0.0, 0.0

    def _list_slowest_rows(self) -> Iterator[_Row]:
        """Yield that the slowest part takes as long as every stage, and as what crosses behind it."""
        costs, stage_of_choice = self._list_costs(), np.zeros(self.num_choices, np.int64)
        for stage in range(self.num_stages):
            stage_of_choice[self.choices[stage][self.choices[stage] >= 0]] = stage
        pair_columns = np.arange(self.num_choices, self.slowest_column)
        crossings = np.array([pair[2] for pair in self.pairs], np.int64)
        sources = np.array([pair[0] for pair in self.pairs], np.int64)
        for stage in range(self.num_stages):
            inner_pairs = pair_columns[(crossings < 0) & (stage_of_choice[sources] == stage)]
            stage_columns = np.r_[np.flatnonzero(stage_of_choice == stage), inner_pairs]
            for columns in (stage_columns, pair_columns[crossings == stage]):
                yield np.r_[columns, self.slowest_column], np.r_[-costs[columns], 1.0], 0.0, inf

    def _list_costs(self) -> FloatArray:
        """Return the times of choices and pairs, scaled."""
        times = self.tables.times[self.choices >= 0]
        costs: FloatArray = np.r_[times, np.array([pair[3] for pair in self.pairs])] * self.time_scale
        return costs

    def solve(self, seconds: float, gap: float) -> JointChoice | None:
        """Return the best choice that the solver finds."""
        solver = build_solver()
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("time_limit", min(seconds, highspy.kHighsInf))
        solver.passModel(self._build_model())
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(solver.getSolution().col_value)
        stage_and_strategy = [self._read_layer(layer, values) for layer in range(self.num_layers)]
        stages, strategies = zip(*stage_and_strategy, strict=True)
        ends = tuple(int(end) for end in np.searchsorted(np.array(stages), np.arange(self.num_stages), side="right"))
        return JointChoice(ends, strategies, self.tables.compute_time(ends, strategies, self.num_microbatches))

    def _read_layer(self, layer: int, values: FloatArray) -> tuple[int, int]:
        columns = self.choices[:, layer]
        stage, strategy = np.unravel_index(np.where(columns >= 0, values[columns], -1.0).argmax(), columns.shape)
        return int(stage), int(strategy)

    def _build_model(self) -> highspy.HighsLp:
        columns, factors, lower_bounds, upper_bounds = zip(*self._list_rows(), strict=True)
        lp, num_columns = highspy.HighsLp(), self.slowest_column + 1
        lp.num_col_, lp.num_row_ = num_columns, len(columns)
        lp.col_cost_ = np.r_[self._list_costs(), self.num_microbatches - 1.0]
        lp.col_lower_ = np.zeros(num_columns)
        lp.col_upper_ = np.r_[np.ones(self.num_choices), np.full(num_columns - self.num_choices, highspy.kHighsInf)]
        lp.row_lower_, lp.row_upper_ = np.array(lower_bounds), np.array(upper_bounds)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *map(len, columns)])
        lp.a_matrix_.index_ = np.concatenate(columns)
        lp.a_matrix_.value_ = np.concatenate(factors)
        integer_type, continuous_type = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        num_continuous = num_columns - self.num_choices
        lp.integrality_ = [integer_type] * self.num_choices + [continuous_type] * num_continuous
        return lp
