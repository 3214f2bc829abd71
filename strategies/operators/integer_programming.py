"""Alpa's integer program for the choice of shardings, solved by HiGHS.

Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022,
section 4.2: one binary variable per choice, one variable per pair of choices of an edge, and a memory constraint for
every moment. Here a moment is the run of one node: all kept bytes and that node's transient bytes fit within the limit.

The pairs of an edge add up to exactly the choices at its ends (the local marginal polytope), where Alpa's text has
inequalities. That is tighter, and the variables of pairs need not be binary: when the choices are whole, so are the
pairs.
"""

from collections.abc import Sequence

import highspy
import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.operators.cost_graph import (
    CostGraph,
    Shortfall,
    Solution,
    least_memory,
    least_time,
    merge_parallel_edges,
    needed,
    restrict,
    shortfall,
    tied,
)
from meshwise.strategies.operators.neighbourhood import Neighbourhood

FloatArray = NDArray[np.float64]
LARGEST = 1e6
"""The largest sum after scaling: the solver's absolute tolerances, 1e-6 and finer, suit numbers up to this."""


def integer_programming(
    graph: CostGraph,
    limit: int | None = None,
    *,
    gap: float = 0.0,
    seconds: float | None = None,
    tie: bool = False,
    prune: bool = True,
) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes, or the proof that none fits.

    At Ctrl-C and after ``seconds`` it returns the best choice so far, with the bound proven until then.

    Parameters
    ----------
    gap
        Stop when the time is proven within this fraction of the least.
    seconds
        Time of the solver; None for no limit.
    tie
        Let all copies of a node choose alike. The program is much smaller, but misses choices in which copies differ,
        and the bound holds among such choices only.
    prune
        Leave out choices that are never needed; the result is as fast.

    Notes
    -----
    The solver computes in floating point, so the bound is right to about nine digits; time and memory of the result
    are exact.
    """
    if tie:
        return _tied(graph, limit, gap, seconds, prune)
    missing = shortfall(graph, limit)
    if missing is not None:
        return missing
    allowed = needed(graph, memory=limit is not None) if prune else tuple(map(np.arange, graph.sizes))
    program = _Program(merge_parallel_edges(restrict(graph, allowed)), limit, gap, seconds)
    choice, bound = program.solved()
    found = [int(each[index]) for each, index in zip(allowed, choice, strict=True)]
    return _solution(graph, found, bound, program.interrupted)


def _tied(graph: CostGraph, limit: int | None, gap: float, seconds: float | None, prune: bool) -> Solution | Shortfall:
    smaller, place = tied(graph)
    result = integer_programming(smaller, limit, gap=gap, seconds=seconds, prune=prune)
    choice = tuple(result.choice[index] for index in place)
    if isinstance(result, Shortfall):
        return Shortfall(choice, result.memory, result.limit)
    return _solution(graph, choice, result.bound, result.interrupted)


def _solution(graph: CostGraph, choice: Sequence[int], bound: int, interrupted: bool) -> Solution:
    time = graph.time(choice)
    return Solution(tuple(choice), time, graph.memory(choice), min(bound, time), interrupted=interrupted)


class _Program:
    """The integer program of a graph on the solver.

    Its columns are the choices of all nodes, the pairs of all edges, and, with a limit, the largest transient bytes.
    """

    def __init__(self, graph: CostGraph, limit: int | None, gap: float, seconds: float | None) -> None:
        self.graph, self.limit, self.interrupted = graph, limit, False
        self.starts = np.cumsum([0, *graph.sizes])
        self.pairs = np.cumsum([self.starts[-1], *(edge.times.size for edge in graph.edges)])
        ticks = sum(int(each.max()) for each in graph.times) + sum(int(edge.times.max()) for edge in graph.edges)
        self.ticks = min(1.0, LARGEST / max(1, ticks))
        self.bytes = 1.0 if limit is None else min(1.0, LARGEST / max(1, limit))
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
            ("mip_rel_gap", gap),
            ("mip_abs_gap", 1e-6),
            ("mip_feasibility_tolerance", 1e-9),
            ("time_limit", float("inf") if seconds is None else seconds),
        ):
            self.solver.setOptionValue(option, value)
        self.solver.passModel(self._model())

    def solved(self) -> tuple[list[int], int]:
        """Return the best choice found, and a lower bound in ticks of every choice."""
        if self.limit is None:
            best = [int(each.argmin()) for each in self.graph.times]
        else:
            best = list(Neighbourhood(self.graph, self.limit).polished(least_memory(self.graph)))
        self._start(best)  # a start that fits gives the solver something to prune with, and Ctrl-C an answer
        self._run()
        bound = self._bound()
        found = self._found()
        while found is not None and self._overrun(found) > 0:
            self._tighten(self._overrun(found))
            self._run()
            found = self._found()
        if found is not None and self.graph.time(found) < self.graph.time(best):
            best = found
        return best, bound

    def _run(self) -> None:
        """Run the solver in its own thread; Ctrl-C stops it, and its best solution so far remains."""
        self.solver.HandleUserInterrupt = True
        self.solver.startSolve()
        finished = False
        while not finished:
            try:
                # short waits, for Python raises KeyboardInterrupt only between them
                while not finished:
                    finished = self.solver.wait(0.1)[0]
            except KeyboardInterrupt:
                self.interrupted = True
                self.solver.cancelSolve()  # type: ignore[no-untyped-call]

    def _found(self) -> list[int] | None:
        """Return the choice of the solver's solution, None if it has none."""
        if self.solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(self.solver.getSolution().col_value)
        return [int(values[start:end].argmax()) for start, end in zip(self.starts, self.starts[1:], strict=False)]

    def _bound(self) -> int:
        """Return the proven bound in ticks, lowered by what the solver may have rounded."""
        trivial = least_time(self.graph)
        proven = self.solver.getInfo().mip_dual_bound
        if not np.isfinite(proven):
            return trivial
        return max(trivial, int(np.ceil((proven * (1 - 1e-10) - 1e-5) / self.ticks)))

    def _overrun(self, choice: Sequence[int]) -> int:
        """Return the bytes by which a choice is above the limit."""
        return 0 if self.limit is None else self.graph.memory(choice) - self.limit

    def _tighten(self, overrun: int) -> None:
        """Lower the limit: by rounding, the solver let a choice pass that is a few bytes above it."""
        row = self.solver.getNumRow() - 1
        upper = self.solver.getLp().row_upper_[row]
        self.solver.changeRowBounds(row, -highspy.kHighsInf, upper - 2 * overrun * self.bytes)

    def _start(self, choice: Sequence[int]) -> None:
        values = np.zeros(self.solver.getNumCol())
        values[self.starts[:-1] + np.array(choice)] = 1.0
        for edge, first in zip(self.graph.edges, self.pairs, strict=False):
            values[first + choice[edge.source] * edge.times.shape[1] + choice[edge.target]] = 1.0
        if self.limit is not None:
            most = max(int(each[index]) for each, index in zip(self.graph.transient, choice, strict=True))
            values[-1] = most * self.bytes
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        solution.value_valid = True
        self.solver.setSolution(solution)

    def _model(self) -> highspy.HighsLp:
        rows = _Rows()
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            rows.add(np.arange(start, end), np.ones(end - start), 1.0, 1.0)
        for (source, target, times), first in zip(self.graph.edges, self.pairs, strict=False):
            pairs = first + np.arange(times.size).reshape(times.shape)
            for row, column in enumerate(range(self.starts[source], self.starts[source + 1])):
                rows.marginal(pairs[row], column)
            for row, column in enumerate(range(self.starts[target], self.starts[target + 1])):
                rows.marginal(pairs[:, row], column)
        if self.limit is not None:
            self._add_memory(rows, self.limit)
        memory = [] if self.limit is None else [np.zeros(1)]
        costs = [*self.graph.times, *(edge.times.ravel() for edge in self.graph.edges)]
        return rows.model(np.concatenate([*(each * self.ticks for each in costs), *memory]), int(self.starts[-1]))

    def _add_memory(self, rows: "_Rows", limit: int) -> None:
        """Add that the last column is at least every node's transient bytes, and fits with all kept bytes."""
        last = int(self.pairs[-1])
        for node, transient in enumerate(self.graph.transient):
            columns = np.r_[np.arange(self.starts[node], self.starts[node + 1]), last]
            rows.add(columns, np.r_[-transient * self.bytes, 1.0], 0.0, highspy.kHighsInf)
        kept = np.concatenate(self.graph.kept) * self.bytes
        rows.add(np.r_[np.arange(self.starts[-1]), last], np.r_[kept, 1.0], -highspy.kHighsInf, limit * self.bytes)


class _Rows:
    """The constraints of a program, collected row by row as a sparse matrix."""

    def __init__(self) -> None:
        self.columns: list[NDArray[np.int64]] = []
        self.values: list[FloatArray] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, columns: NDArray[np.int64], values: FloatArray, lower: float, upper: float) -> None:
        self.columns.append(columns)
        self.values.append(values)
        self.lower.append(lower)
        self.upper.append(upper)

    def marginal(self, pairs: NDArray[np.int64], column: int) -> None:
        """Add the row in which pairs of an edge sum to the choice at one of its ends."""
        self.add(np.r_[pairs, column], np.r_[np.ones(len(pairs)), -1.0], 0.0, 0.0)

    def model(self, costs: FloatArray, binaries: int) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(costs), len(self.lower)
        lp.col_cost_ = costs
        lp.col_lower_ = np.zeros(len(costs))
        lp.col_upper_ = np.r_[np.ones(binaries), np.full(len(costs) - binaries, highspy.kHighsInf)]
        lp.row_lower_, lp.row_upper_ = np.array(self.lower), np.array(self.upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *map(len, self.columns)])
        lp.a_matrix_.index_ = np.concatenate(self.columns)
        lp.a_matrix_.value_ = np.concatenate(self.values)
        whole, part = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole] * binaries + [part] * (len(costs) - binaries)
        return lp
