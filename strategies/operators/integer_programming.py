"""Alpa's integer program for the choice of shardings, solved by HiGHS.

Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022,
section 4.2: one binary variable per choice, one variable per pair of choices of an edge, and a memory constraint for
every moment. Here a moment is the run of one node: all kept bytes and that node's transient bytes fit within the limit.

The pairs of an edge add up to exactly the choices at its ends (the local marginal polytope), where Alpa's text has
inequalities. That is tighter, and the variables of pairs need not be binary: when the choices are whole, so are the
pairs.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import highspy
import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.operators.cost_graph import (
    CostGraph,
    Shortfall,
    Solution,
    compute_time_bound,
    find_leanest_choice,
    find_shortfall,
    list_needed_choices,
    merge_parallel_edges,
    restrict_choices,
    tie_copies,
)
from meshwise.strategies.operators.neighbourhood import Neighbourhood

FloatArray = NDArray[np.float64]
_Row = tuple[NDArray[np.int64], FloatArray, float, float]
"""A constraint: its columns, their factors, and the bounds of the sum."""

LARGEST_SUM = 1e6
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
        return _solve_tied(graph, limit, gap, seconds, prune)
    shortfall = find_shortfall(graph, limit)
    if shortfall is not None:
        return shortfall
    allowed_choices = list_needed_choices(graph, limit is not None) if prune else tuple(map(np.arange, graph.sizes))
    program = _Program(
        merge_parallel_edges(restrict_choices(graph, dict(enumerate(allowed_choices)))), limit, gap, seconds
    )
    choice, bound = program.solve()
    graph_choice = [int(options[index]) for options, index in zip(allowed_choices, choice, strict=True)]
    return _build_solution(graph, graph_choice, bound, program.was_interrupted)


def _solve_tied(
    graph: CostGraph, limit: int | None, gap: float, seconds: float | None, prune: bool
) -> Solution | Shortfall:
    tied_graph, positions = tie_copies(graph)
    result = integer_programming(tied_graph, limit, gap=gap, seconds=seconds, prune=prune)
    choice = tuple(result.choice[index] for index in positions)
    if isinstance(result, Shortfall):
        return Shortfall(choice, result.memory, result.limit)
    return _build_solution(graph, choice, result.bound, result.was_interrupted)


def _build_solution(graph: CostGraph, choice: Sequence[int], bound: int, was_interrupted: bool) -> Solution:
    time = graph.time(choice)
    return Solution(tuple(choice), time, graph.memory(choice), min(bound, time), was_interrupted=was_interrupted)


class _Program:
    """The integer program of a graph on the solver.

    Its columns are the choices of all nodes, the pairs of all edges, and, with a limit, the largest transient bytes.
    """

    def __init__(self, graph: CostGraph, limit: int | None, gap: float, seconds: float | None) -> None:
        self.graph, self.limit, self.was_interrupted = graph, limit, False
        self.starts = np.cumsum([0, *graph.sizes])
        self.pair_starts = np.cumsum([self.starts[-1], *(edge.times.size for edge in graph.edges)])
        self.tick_scale = min(1.0, LARGEST_SUM / max(1, graph.max_ticks))
        self.byte_scale = 1.0 if limit is None else min(1.0, LARGEST_SUM / max(1, limit))
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        time_limit = float("inf") if seconds is None else seconds
        options = {"output_flag": False, "mip_rel_gap": gap, "mip_abs_gap": 1e-6, "mip_feasibility_tolerance": 1e-9}
        for option, value in (options | {"time_limit": time_limit}).items():
            self.solver.setOptionValue(option, value)
        self.solver.passModel(self._build_model())

    def solve(self) -> tuple[list[int], int]:
        """Return the best choice found, and a lower bound in ticks of every choice."""
        if self.limit is None:
            best_choice = [int(node_times.argmin()) for node_times in self.graph.times]
        else:
            best_choice = list(Neighbourhood(self.graph, self.limit).polish_choice(find_leanest_choice(self.graph)))
        self._set_start(best_choice)  # a start that fits gives the solver something to prune with, and Ctrl-C an answer
        self._run_solver()
        bound = self._compute_bound()
        choice = self._read_choice()
        while choice is not None and self._count_overrun(choice) > 0:
            self._tighten_limit(self._count_overrun(choice))
            self._run_solver()
            choice = self._read_choice()
        if choice is not None and self.graph.time(choice) < self.graph.time(best_choice):
            best_choice = choice
        return best_choice, bound

    def _run_solver(self) -> None:
        """Run the solver in its own thread; Ctrl-C stops it, and its best solution so far remains."""
        self.solver.HandleUserInterrupt = True
        self.solver.startSolve()
        is_finished = False
        while not is_finished:
            try:
                # short waits, for Python raises KeyboardInterrupt only between them
                while not is_finished:
                    is_finished = self.solver.wait(0.1)[0]
            except KeyboardInterrupt:
                self.was_interrupted = True
                self.solver.cancelSolve()  # type: ignore[no-untyped-call]

    def _read_choice(self) -> list[int] | None:
        """Return the choice of the solver's solution, None if it has none."""
        if self.solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(self.solver.getSolution().col_value)
        return [int(values[start:end].argmax()) for start, end in pairwise(self.starts)]

    def _compute_bound(self) -> int:
        """Return the proven bound in ticks, lowered by what the solver may have rounded."""
        trivial_bound = compute_time_bound(self.graph)
        proven_bound = self.solver.getInfo().mip_dual_bound
        if not np.isfinite(proven_bound):
            return trivial_bound
        return max(trivial_bound, int(np.ceil((proven_bound * (1 - 1e-10) - 1e-5) / self.tick_scale)))

    def _count_overrun(self, choice: Sequence[int]) -> int:
        """Return the bytes by which a choice is above the limit."""
        return 0 if self.limit is None else self.graph.memory(choice) - self.limit

    def _tighten_limit(self, overrun: int) -> None:
        """Lower the limit: by rounding, the solver let a choice pass that is a few bytes above it."""
        row = self.solver.getNumRow() - 1
        upper_bound = self.solver.getLp().row_upper_[row]
        self.solver.changeRowBounds(row, -highspy.kHighsInf, upper_bound - 2 * overrun * self.byte_scale)

    def _set_start(self, choice: Sequence[int]) -> None:
        values = np.zeros(self.solver.getNumCol())
        values[self.starts[:-1] + np.array(choice)] = 1.0
        for edge, pair_start in zip(self.graph.edges, self.pair_starts, strict=False):
            values[pair_start + choice[edge.source] * edge.times.shape[1] + choice[edge.target]] = 1.0
        if self.limit is not None:
            values[-1] = self.graph.find_max_transient(choice) * self.byte_scale
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        solution.value_valid = True
        self.solver.setSolution(solution)

    def _build_model(self) -> highspy.HighsLp:
        rows: list[_Row] = []
        for start, end in pairwise(self.starts):
            rows.append((np.arange(start, end), np.ones(end - start), 1.0, 1.0))
        for (source, target, times), pair_start in zip(self.graph.edges, self.pair_starts, strict=False):
            pairs = pair_start + np.arange(times.size).reshape(times.shape)
            for node, node_pairs in ((source, pairs), (target, pairs.T)):
                # pairs of an edge sum to the choice at either of its ends
                factors = np.r_[np.ones(node_pairs.shape[1]), -1.0]
                for column, choice_pairs in enumerate(node_pairs, self.starts[node]):
                    rows.append((np.r_[choice_pairs, column], factors, 0.0, 0.0))
        if self.limit is not None:
            rows += self._list_memory_rows(self.limit)
        memory_costs = [] if self.limit is None else [np.zeros(1)]
        costs = [*self.graph.times, *(edge.times.ravel() for edge in self.graph.edges)]
        scaled_costs = np.concatenate([*(node_costs * self.tick_scale for node_costs in costs), *memory_costs])
        return _build_linear_program(rows, scaled_costs, int(self.starts[-1]))

    def _list_memory_rows(self, limit: int) -> Iterator[_Row]:
        """Yield that the last column is at least every node's transient bytes, and fits with all kept bytes."""
        memory_column = int(self.pair_starts[-1])
        for (start, end), transient_bytes in zip(pairwise(self.starts), self.graph.transient_bytes, strict=True):
            columns = np.r_[np.arange(start, end), memory_column]
            yield columns, np.r_[-transient_bytes * self.byte_scale, 1.0], 0.0, highspy.kHighsInf
        columns = np.r_[np.arange(self.starts[-1]), memory_column]
        kept_bytes = np.concatenate(self.graph.kept_bytes) * self.byte_scale
        yield columns, np.r_[kept_bytes, 1.0], -highspy.kHighsInf, limit * self.byte_scale


def _build_linear_program(rows: Sequence[_Row], costs: FloatArray, num_binaries: int) -> highspy.HighsLp:
    """Return a program with a column for each of ``costs``, of which the first ``num_binaries`` are binary."""
    columns, factors, lower_bounds, upper_bounds = zip(*rows, strict=True)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(rows)
    lp.col_cost_ = costs
    lp.col_lower_ = np.zeros(len(costs))
    lp.col_upper_ = np.r_[np.ones(num_binaries), np.full(len(costs) - num_binaries, highspy.kHighsInf)]
    lp.row_lower_, lp.row_upper_ = np.array(lower_bounds), np.array(upper_bounds)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *map(len, columns)])
    lp.a_matrix_.index_ = np.concatenate(columns)
    lp.a_matrix_.value_ = np.concatenate(factors)
    integer_type, continuous_type = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    lp.integrality_ = [integer_type] * num_binaries + [continuous_type] * (len(costs) - num_binaries)
    return lp
