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
WHOLE_TURNS = 5
"""How often paths are added to an integer program, at most."""
NEARLY = 0.95
"""The path of every rank that ends after this part of the step time is added."""
WHOLE = 1e-6
"""A value of the solver that is less than a whole number by up to this counts as that number."""
SLACK = 1e-7
"""The part by which a bound is lowered, for what the solver may have rounded."""


@dataclass(frozen=True, eq=False)
class Divided:
    """The solution of a program: a division, and the bound in ticks that no division is faster than.

    ``counts`` are the layers of every stage; ``recompute_counts`` says how many of them each recompute choice takes.
    """

    counts: FloatArray
    recomputed: FloatArray
    bound: float


class DivisionProgram:
    """A linear program over divisions of layers, whose rows are critical paths.

    Its columns are the layers of every stage, the layers that each recompute choice takes there, the step time, and,
    for all columns but the step time, their sums over the stages of each rank.

    Parameters
    ----------
    max_rounds
        How often critical paths are added, at most.
    accuracy
        Paths are added until the step time of the solution is above the bound by no more than this part.
    """

    def __init__(self, problem: DivisionProblem, *, turns: int = 40, accuracy: float = 1e-3) -> None:
        self.problem, self.turns, self.accuracy = problem, turns, accuracy
        even = np.full(problem.stages, problem.layers / problem.stages)
        none = np.zeros((problem.ways, problem.stages))
        self.scale = LARGEST_STEP / max(problem.step(even, none), 1.0)
        self.columns = problem.stages * (1 + problem.ways)
        self.bound = 0.0
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self._add_columns()
        self._add_sums()
        self._add_memory()
        self._add_ways()
        self.learn(even, none)

    def _add_columns(self) -> None:
        given, stages, ranks = self.problem, self.problem.stages, self.problem.ranks
        for index in range(self.columns):
            self.solver.addVar(float(given.fewest if index < stages else 0), float(given.most))
        self.solver.addVar(0.0, highspy.kHighsInf)
        self.solver.changeColCost(self.columns, 1.0)
        # the sums are columns of their own, for the integer program asks for whole sums of a rank, not whole stages
        for index in range(ranks * (1 + given.ways)):
            self.solver.addVar(0.0, highspy.kHighsInf)
            first = index // ranks * stages + index % ranks
            own = np.arange(first, index // ranks * stages + stages, ranks)
            self._row(0.0, 0.0, np.r_[own, self.columns + 1 + index], np.r_[np.ones(len(own)), -1.0])

    def _add_sums(self) -> None:
        given, stages = self.problem, self.problem.stages
        self._row(given.layers, given.layers, np.arange(stages), np.ones(stages))
        for stage in range(stages):
            ways = stage + stages * np.arange(1, given.ways + 1)
            self._row(0.0, inf, np.r_[stage, ways], np.r_[1.0, -np.ones(given.ways)])

    def _add_memory(self) -> None:
        given, stages = self.problem, self.problem.stages
        for rank, moments in enumerate(given.moments):
            own = np.arange(rank, stages, given.ranks)
            columns = np.concatenate([own + stages * way for way in range(given.ways + 1)])
            for alive, room in zip(moments.alive[:, own], moments.room, strict=True):
                layers = alive * given.kept_layer[own] + given.states[rank]
                saved = (-alive * given.saved[:, own]).ravel()
                most = room - float(alive @ given.kept[own])
                # rows are scaled to numbers of about 1: the solver's tolerances are absolute
                unit = 1.0 / max(abs(most), float(layers.max(initial=0.0)), 1.0)
                self._row(-inf, most * unit, columns, np.r_[layers, saved] * unit)

    def _add_ways(self) -> None:
        """Add the paths on which a rank is busy from a stage's first forward to its last backward."""
        given = self.problem
        passes, stages = given.arranged.code >> 1, np.arange(2 * given.stages) // 2
        for rank in range(given.ranks):
            own = passes[(passes >> 1) % given.ranks == rank]
            for stage in range(rank, given.stages, given.ranks):
                first = int(np.argmax(own == 2 * stage))
                last = len(own) - int(np.argmax(own[::-1] == 2 * stage + 1))
                through = np.bincount(own[first:last], minlength=2 * given.stages)
                forward = np.arange(2 * given.stages) % 2 == 0
                through[stages < stage] += 1
                sent = (forward & (stages < stage)) | (~forward & (stages <= stage) & (stages > 0))
                self._add_path(0, through, sent.astype(int))

    def _row(self, lower: float, upper: float, columns: IntArray, values: FloatArray) -> None:
        infinity = highspy.kHighsInf
        low, high = max(lower, -infinity), min(upper, infinity)
        self.solver.addRow(low, high, len(columns), columns.astype(np.int32), values)

    def _add_path(self, rank: int, passes: IntArray, sends: IntArray) -> None:
        """Add the row of a path that ends with the last pass of a rank: the step takes at least its length."""
        given = self.problem
        known = float(passes @ given.base_ticks + sends @ given.sends + given.tail[rank])
        layers = (passes * given.layer).reshape(given.stages, 2).sum(axis=1)
        layers[rank :: given.ranks] += given.tail_layer[rank]
        again = (passes[1::2] * given.again).ravel()
        values = np.r_[-layers * self.scale, -again * self.scale, 1.0]
        self._row(known * self.scale, inf, np.arange(self.columns + 1), values)

    def learn(self, counts: FloatArray, recomputed: FloatArray) -> float:
        """Add the critical paths of a division, and return the ticks of its step."""
        given = self.problem
        paths = given.paths(counts, recomputed)
        steps = paths.end_ticks + given.tail + given.tail_layer * given.position(counts)
        for rank in np.flatnonzero(steps >= steps.max() * NEARLY):
            self._add_path(int(rank), paths.passes[rank], paths.sends[rank])
        return float(steps.max())

    def relaxed(self, enough: float = inf) -> Divided | None:
        """Return the best division into fractions of layers; None where all that fit take ``cutoff`` ticks or more."""
        return self._solved(enough, self.turns)

    def whole(self, nodes: int, enough: float = inf) -> Divided | None:
        """Return the best division into whole layers a rank; None where all that fit take ``cutoff`` ticks or more.

        After every addition of paths the solver may visit ``max_nodes`` nodes of its tree.
        """
        for option, value in (
            ("mip_max_nodes", nodes),
            ("mip_rel_gap", self.accuracy / 2),
            ("mip_heuristic_effort", 0.0),
        ):
            self.solver.setOptionValue(option, value)
        for index in range(self.problem.ranks * (1 + self.problem.ways)):
            self.solver.changeColIntegrality(self.columns + 1 + index, highspy.HighsVarType.kInteger)
        return self._solved(enough, WHOLE_TURNS, whole=True)

    def _solved(self, enough: float, turns: int, *, whole: bool = False) -> Divided | None:
        given, least = self.problem, inf
        best: tuple[FloatArray, FloatArray] | None = None
        self.solver.changeColBounds(self.columns, 0.0, min(enough * self.scale, highspy.kHighsInf))
        for _ in range(turns):
            self.solver.run()
            info, status = self.solver.getInfo(), self.solver.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                self.bound = max(self.bound, enough)
                return None
            proven = info.mip_dual_bound if whole else info.objective_function_value
            if np.isfinite(proven) and (whole or status == highspy.HighsModelStatus.kOptimal):
                self.bound = max(self.bound, proven * (1 - SLACK) / self.scale)
            if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                break
            values = np.maximum(np.array(self.solver.getSolution().col_value)[: self.columns], 0.0)
            counts, recomputed = values[: given.stages], values[given.stages :].reshape(given.ways, given.stages)
            step = self.learn(counts, recomputed)
            if best is not None:  # half way to the best choice [2]_
                self.learn((best[0] + counts) / 2, (best[1] + recomputed) / 2)
            if step < least:
                best, least = (counts, recomputed), step
            if least <= self.bound * (1 + self.accuracy) or self.bound >= enough:
                break
        return None if best is None else Divided(*best, self.bound)


def rounded(parts: FloatArray, most: FloatArray, ranks: int) -> IntArray:
    """Return ``parts`` as whole numbers up to ``max_values``, whose sum over the stages of a rank is that of its parts.

    Of a rank's stages those with the largest remainders are rounded up (largest remainder method, Hamilton 1792).

    >>> rounded(np.array([1.3, 2.0, 1.7, 2.0]), np.full(4, 9.0), 2).tolist()
    [1, 2, 2, 2]
    """
    result = np.minimum(np.floor(parts + WHOLE), most).astype(np.int64)
    for rank in range(ranks):
        own = np.arange(rank, len(parts), ranks)
        left = round(float(parts[own].sum())) - int(result[own].sum())
        open_to = [stage for stage in own if result[stage] < most[stage]]
        for stage in sorted(open_to, key=lambda each: result[each] - parts[each])[: max(left, 0)]:
            result[stage] += 1
    return result


Points = Mapping[int, Sequence[tuple[float, float]]]
"""The points, ``t`` and ``d``, that a stage may have with each number of layers."""


class Chosen(NamedTuple):
    """The layers of every stage, the index of its point, and the step time by the formula."""

    counts: tuple[int, ...]
    points: tuple[int, ...]
    time: float


def formula(points: Sequence[tuple[float, float]], microbatches: int) -> float:
    """Return the step time by Mist's formula [3]_ of stages with these points.

    >>> formula([(2.0, 3.0), (1.0, 4.0)], 5)
    14.0
    """
    times = [time for time, _ in points]
    extra = max(more - sum(times[:stage]) for stage, (_, more) in enumerate(points))
    return (microbatches - 1) * max(times) + sum(times) + extra


def inter_stage(stages: Sequence[Points], layers: int, microbatches: int) -> Chosen | None:
    """Return the layers and points of stages with the least step time; None where none add up to all layers."""
    rows = [[(n, k, *point) for n, points in table.items() for k, point in enumerate(points)] for table in stages]
    if not all(rows):
        return None
    starts = np.cumsum([0, *map(len, rows)])
    slowest, extra = int(starts[-1]), int(starts[-1]) + 1
    times = [np.array([row[2] for row in each]) for each in rows]
    scale = 1.0 / max(float(column.max()) for column in times) if max(map(np.max, times)) > 0 else 1.0
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    # one binary column a point of a stage, then the slowest time and the extra time
    for time in np.concatenate(times):
        solver.addVar(0.0, 1.0)
        solver.changeColIntegrality(solver.getNumCol() - 1, highspy.HighsVarType.kInteger)
        solver.changeColCost(solver.getNumCol() - 1, float(time) * scale)
    for cost in (microbatches - 1.0, 1.0):
        solver.addVar(-highspy.kHighsInf, highspy.kHighsInf)
        solver.changeColCost(solver.getNumCol() - 1, cost)
    every = np.arange(slowest, dtype=np.int32)
    counts = np.array([row[0] for each in rows for row in each], float)
    solver.addRow(float(layers), float(layers), slowest, every, counts)
    for stage, each in enumerate(rows):
        own = every[starts[stage] : starts[stage + 1]]
        more = np.array([row[3] for row in each]) * scale
        solver.addRow(1.0, 1.0, len(own), own, np.ones(len(own)))
        solver.addRow(0.0, highspy.kHighsInf, len(own) + 1, np.r_[own, slowest], np.r_[-times[stage] * scale, 1.0])
        before = np.concatenate([np.zeros(0), *times[:stage]]) * scale
        columns = np.r_[every[: starts[stage]], own, extra]
        solver.addRow(0.0, highspy.kHighsInf, len(columns), columns, np.r_[before, -more, 1.0])
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = np.array(solver.getSolution().col_value)
    picked = [rows[stage][int(values[starts[stage] : starts[stage + 1]].argmax())] for stage in range(len(rows))]
    time = formula([(row[2], row[3]) for row in picked], microbatches)
    return Chosen(tuple(row[0] for row in picked), tuple(row[1] for row in picked), time)
