"""Layers and recomputed layers of every pipeline stage, by mixed integer programs.

`DivisionProgram` finds the best division of layers by cutting planes [1]_ [2]_: the critical path of one choice is a
lower bound on the step time of every other.

`solve_inter_stage` is the mixed integer program of Mist [3]_ over the layers and a point of every stage. A point is
what a stage with some layers takes: ``t`` for a microbatch, and ``d`` more for the first and the last ones. A step
takes ``(microbatches - 1) * max t + sum t + max over stages of (d - sum of t before it)``.

References
----------
.. [1] Kelley, "The cutting-plane method for solving convex programs", Journal of the SIAM 8(4), 1960: the length of
   the longest path is a convex function of the ticks of passes, and every path a plane below it.
.. [2] Ben-Ameur, Neto, "Acceleration of cutting-plane and column generation algorithms: applications to network
   design", Networks 49(1), 2007: planes are also taken half way to the best choice so far.
.. [3] Zhu et al., "Mist: efficient distributed training of large language models via memory-parallelism
   co-optimization", EuroSys 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import highspy
import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.stages.division import DivisionProblem, FloatArray

LARGEST_STEP = 100.0
"""Step times are scaled to about this, because the solver's tolerances are absolute."""
MAX_INTEGER_ROUNDS = 5
"""How often paths are added to an integer program, at most."""
CRITICAL_PART = 0.95
"""The path of every rank that ends after this part of the step time is added."""
INTEGRALITY_TOLERANCE = 1e-6
"""A value of the solver that is less than a whole number by up to this counts as that number."""
SLACK = 1e-7
"""The part by which a bound is lowered, for what the solver may have rounded."""


def build_solver() -> highspy.Highs:
    """Return a solver that prints nothing and uses one thread."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver


@dataclass(frozen=True, eq=False)
class DivisionSolution:
    """The solution of a program: a division, and the bound in ticks that no division is faster than.

    ``counts`` are the layers of every stage; ``recompute_counts`` says how many of them each recompute choice takes.
    """

    counts: FloatArray
    recompute_counts: FloatArray
    bound: float


class DivisionProgram:
    """A linear program over divisions of layers, whose rows are critical paths.

    Its columns are the layers of every stage, the layers that each recompute choice takes there, the step time, and,
    for all columns but the step time, their sums over the stages of each rank. Critical paths are added ``max_rounds``
    times at most, until the step time of the solution is above the bound by no more than the part ``accuracy``.
    """

    def __init__(self, problem: DivisionProblem, *, max_rounds: int = 40, accuracy: float = 1e-3) -> None:
        self.problem, self.max_rounds, self.accuracy = problem, max_rounds, accuracy
        even_counts = np.full(problem.num_stages, problem.num_layers / problem.num_stages)
        no_recompute = np.zeros((problem.num_recompute_choices, problem.num_stages))
        self.scale = LARGEST_STEP / max(problem.compute_step_ticks(even_counts, no_recompute), 1.0)
        self.num_columns = problem.num_stages * (1 + problem.num_recompute_choices)
        self.bound = 0.0
        self.solver = build_solver()
        self._add_columns()
        self._add_sums()
        self._add_memory()
        self._add_busy_paths()
        self.add_critical_paths(even_counts, no_recompute)

    def _add_columns(self) -> None:
        problem, num_stages, num_ranks = self.problem, self.problem.num_stages, self.problem.num_ranks
        for index in range(self.num_columns):
            self.solver.addVar(float(problem.min_layers if index < num_stages else 0), float(problem.max_layers))
        self.solver.addVar(0.0, highspy.kHighsInf)
        self.solver.changeColCost(self.num_columns, 1.0)
        # the sums are columns of their own, for the integer program asks for whole sums of a rank, not whole stages
        for index in range(num_ranks * (1 + problem.num_recompute_choices)):
            self.solver.addVar(0.0, highspy.kHighsInf)
            rank_columns = index // num_ranks * num_stages + np.arange(index % num_ranks, num_stages, num_ranks)
            columns = np.r_[rank_columns, self.num_columns + 1 + index]
            self._add_row(0.0, 0.0, columns, np.r_[np.ones(len(rank_columns)), -1.0])

    def _add_sums(self) -> None:
        problem, num_stages = self.problem, self.problem.num_stages
        self._add_row(problem.num_layers, problem.num_layers, np.arange(num_stages), np.ones(num_stages))
        for stage in range(num_stages):
            columns = stage + num_stages * np.arange(problem.num_recompute_choices + 1)
            self._add_row(0.0, inf, columns, np.r_[1.0, -np.ones(problem.num_recompute_choices)])

    def _add_memory(self) -> None:
        problem, num_stages = self.problem, self.problem.num_stages
        for rank, moments in enumerate(problem.moments):
            rank_stages = np.arange(rank, num_stages, problem.num_ranks)
            columns = np.add.outer(num_stages * np.arange(problem.num_recompute_choices + 1), rank_stages).ravel()
            for num_alive, free_bytes in zip(moments.num_alive[:, rank_stages], moments.free_bytes, strict=True):
                layer_bytes = num_alive * problem.layer_kept_bytes[rank_stages] + problem.state_bytes[rank]
                saved_bytes = (-num_alive * problem.saved_bytes[:, rank_stages]).ravel()
                max_bytes = free_bytes - float(num_alive @ problem.base_kept_bytes[rank_stages])
                # rows are scaled to numbers of about 1: the solver's tolerances are absolute
                scale = 1.0 / max(abs(max_bytes), float(layer_bytes.max(initial=0.0)), 1.0)
                self._add_row(-inf, max_bytes * scale, columns, np.r_[layer_bytes, saved_bytes] * scale)

    def _add_busy_paths(self) -> None:
        """Add the paths on which a rank is busy from a stage's first forward to its last backward."""
        problem = self.problem
        passes, stage_of_pass = problem.arrangement.code >> 1, np.arange(2 * problem.num_stages) // 2
        for rank in range(problem.num_ranks):
            rank_passes = passes[(passes >> 1) % problem.num_ranks == rank]
            for stage in range(rank, problem.num_stages, problem.num_ranks):
                first_pass = int(np.argmax(rank_passes == 2 * stage))
                last_pass = len(rank_passes) - int(np.argmax(rank_passes[::-1] == 2 * stage + 1))
                pass_counts = np.bincount(rank_passes[first_pass:last_pass], minlength=2 * problem.num_stages)
                is_forward = np.arange(2 * problem.num_stages) % 2 == 0
                pass_counts[stage_of_pass < stage] += 1
                is_sent = (is_forward & (stage_of_pass < stage)) | (
                    ~is_forward & (stage_of_pass <= stage) & (stage_of_pass > 0)
                )
                self._add_path(0, pass_counts, is_sent.astype(int))

    def _add_row(self, lower_bound: float, upper_bound: float, columns: IntArray, values: FloatArray) -> None:
        self.solver.addRow(lower_bound, upper_bound, len(columns), columns.astype(np.int32), values)

    def _add_path(self, rank: int, pass_counts: IntArray, send_counts: IntArray) -> None:
        """Add the row of a path that ends with the last pass of a rank: the step takes at least its length."""
        problem = self.problem
        path_ticks = pass_counts @ problem.base_ticks + send_counts @ problem.send_ticks
        fixed_ticks = float(path_ticks + problem.tail_ticks[rank])
        layer_ticks = (pass_counts * problem.layer_ticks).reshape(problem.num_stages, 2).sum(axis=1)
        layer_ticks[rank :: problem.num_ranks] += problem.tail_layer_ticks[rank]
        recompute_ticks = (pass_counts[1::2] * problem.recompute_ticks).ravel()
        values = np.r_[-layer_ticks * self.scale, -recompute_ticks * self.scale, 1.0]
        self._add_row(fixed_ticks * self.scale, inf, np.arange(self.num_columns + 1), values)

    def add_critical_paths(self, counts: FloatArray, recompute_counts: FloatArray) -> float:
        """Add the critical paths of a division, and return the ticks of its step."""
        problem = self.problem
        paths = problem.find_paths(counts, recompute_counts)
        step_ticks = paths.end_ticks + problem.tail_ticks + problem.tail_layer_ticks * problem.sum_by_rank(counts)
        for rank in np.flatnonzero(step_ticks >= step_ticks.max() * CRITICAL_PART):
            self._add_path(int(rank), paths.pass_counts[rank], paths.send_counts[rank])
        return float(step_ticks.max())

    def solve_relaxed(self, cutoff: float = inf) -> DivisionSolution | None:
        """Return the best division into fractions of layers; None where all that fit take ``cutoff`` ticks or more."""
        return self._solve(cutoff, self.max_rounds)

    def solve_integer(self, max_nodes: int, cutoff: float = inf) -> DivisionSolution | None:
        """Return the best division into whole layers a rank; None where all that fit take ``cutoff`` ticks or more.

        After every addition of paths the solver may visit ``max_nodes`` nodes of its tree.
        """
        self.solver.setOptionValue("mip_max_nodes", max_nodes)
        self.solver.setOptionValue("mip_rel_gap", self.accuracy / 2)
        self.solver.setOptionValue("mip_heuristic_effort", 0.0)
        for index in range(self.problem.num_ranks * (1 + self.problem.num_recompute_choices)):
            self.solver.changeColIntegrality(self.num_columns + 1 + index, highspy.HighsVarType.kInteger)
        return self._solve(cutoff, MAX_INTEGER_ROUNDS, is_integer=True)

    def _solve(self, cutoff: float, max_rounds: int, *, is_integer: bool = False) -> DivisionSolution | None:
        problem, best_ticks = self.problem, inf
        best_choice: tuple[FloatArray, FloatArray] | None = None
        self.solver.changeColBounds(self.num_columns, 0.0, min(cutoff * self.scale, highspy.kHighsInf))
        for _ in range(max_rounds):
            self.solver.run()
            info, status = self.solver.getInfo(), self.solver.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                self.bound = max(self.bound, cutoff)
                return None
            proven_bound = info.mip_dual_bound if is_integer else info.objective_function_value
            if np.isfinite(proven_bound) and (is_integer or status == highspy.HighsModelStatus.kOptimal):
                self.bound = max(self.bound, proven_bound * (1 - SLACK) / self.scale)
            if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                break
            values = np.maximum(np.array(self.solver.getSolution().col_value)[: self.num_columns], 0.0)
            counts, *recompute_rows = values.reshape(-1, problem.num_stages)
            recompute_counts = np.array(recompute_rows).reshape(-1, problem.num_stages)
            step_ticks = self.add_critical_paths(counts, recompute_counts)
            if best_choice is not None:  # half way to the best choice [2]_
                self.add_critical_paths((best_choice[0] + counts) / 2, (best_choice[1] + recompute_counts) / 2)
            if step_ticks < best_ticks:
                best_choice, best_ticks = (counts, recompute_counts), step_ticks
            if best_ticks <= self.bound * (1 + self.accuracy) or self.bound >= cutoff:
                break
        return None if best_choice is None else DivisionSolution(*best_choice, self.bound)


def round_parts(parts: FloatArray, max_values: FloatArray, num_ranks: int) -> IntArray:
    """Return ``parts`` as whole numbers up to ``max_values``, whose sum over the stages of a rank is that of its parts.

    Of a rank's stages those with the largest remainders are rounded up (largest remainder method, Hamilton 1792).

    >>> round_parts(np.array([1.3, 2.0, 1.7, 2.0]), np.full(4, 9.0), 2).tolist()
    [1, 2, 2, 2]
    """
    result = np.minimum(np.floor(parts + INTEGRALITY_TOLERANCE), max_values).astype(np.int64)
    for rank in range(num_ranks):
        rank_stages = np.arange(rank, len(parts), num_ranks)
        remainder = round(float(parts[rank_stages].sum())) - int(result[rank_stages].sum())
        open_stages = [stage for stage in rank_stages if result[stage] < max_values[stage]]
        open_stages.sort(key=lambda stage: result[stage] - parts[stage])
        result[open_stages[: max(remainder, 0)]] += 1
    return result


Points = Mapping[int, Sequence[tuple[float, float]]]
"""The points, ``t`` and ``d``, that a stage may have with each number of layers."""


class StageChoice(NamedTuple):
    """The layers of every stage, the index of its point, and the step time by the formula."""

    counts: tuple[int, ...]
    points: tuple[int, ...]
    time: float


def compute_mist_time(points: Sequence[tuple[float, float]], num_microbatches: int) -> float:
    """Return the step time by Mist's formula [3]_ of stages with these points.

    >>> compute_mist_time([(2.0, 3.0), (1.0, 4.0)], 5)
    14.0
    """
    times = [time for time, _ in points]
    max_extra = max(stage_extra - sum(times[:stage]) for stage, (_, stage_extra) in enumerate(points))
    return (num_microbatches - 1) * max(times) + sum(times) + max_extra


def solve_inter_stage(stages: Sequence[Points], num_layers: int, num_microbatches: int) -> StageChoice | None:
    """Return the layers and points of stages with the least step time; None where none add up to all layers."""
    rows = [
        [(n, k, *point) for n, points in stage_points.items() for k, point in enumerate(points)]
        for stage_points in stages
    ]
    if not all(rows):
        return None
    starts = np.cumsum([0, *map(len, rows)])
    slowest_column, extra_column = int(starts[-1]), int(starts[-1]) + 1
    times = [np.array([row[2] for row in stage_rows]) for stage_rows in rows]
    scale = 1.0 / max(float(stage_times.max()) for stage_times in times) if max(map(np.max, times)) > 0 else 1.0
    solver = build_solver()
    solver.setOptionValue("mip_rel_gap", 0.0)
    # one binary column a point of a stage, then the slowest time and the extra time
    for time in np.concatenate(times):
        solver.addVar(0.0, 1.0)
        solver.changeColIntegrality(solver.getNumCol() - 1, highspy.HighsVarType.kInteger)
        solver.changeColCost(solver.getNumCol() - 1, float(time) * scale)
    for cost in (num_microbatches - 1.0, 1.0):
        solver.addVar(-highspy.kHighsInf, highspy.kHighsInf)
        solver.changeColCost(solver.getNumCol() - 1, cost)
    all_columns = np.arange(slowest_column, dtype=np.int32)
    counts = np.array([row[0] for stage_rows in rows for row in stage_rows], float)
    solver.addRow(float(num_layers), float(num_layers), slowest_column, all_columns, counts)
    for stage, stage_rows in enumerate(rows):
        stage_columns = all_columns[starts[stage] : starts[stage + 1]]
        extra_times = np.array([row[3] for row in stage_rows]) * scale
        solver.addRow(1.0, 1.0, len(stage_columns), stage_columns, np.ones(len(stage_columns)))
        columns = np.r_[stage_columns, slowest_column]
        solver.addRow(0.0, highspy.kHighsInf, len(columns), columns, np.r_[-times[stage] * scale, 1.0])
        prefix_times = np.concatenate([np.zeros(0), *times[:stage]]) * scale
        columns = np.r_[all_columns[: starts[stage]], stage_columns, extra_column]
        solver.addRow(0.0, highspy.kHighsInf, len(columns), columns, np.r_[prefix_times, -extra_times, 1.0])
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = np.array(solver.getSolution().col_value)
    chosen_rows = [rows[stage][int(values[starts[stage] : starts[stage + 1]].argmax())] for stage in range(len(rows))]
    time = compute_mist_time([(row[2], row[3]) for row in chosen_rows], num_microbatches)
    return StageChoice(tuple(row[0] for row in chosen_rows), tuple(row[1] for row in chosen_rows), time)
