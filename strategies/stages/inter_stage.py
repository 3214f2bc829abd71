"""Layers and a point of every stage by a mixed integer program: Mist's formula for the time of a step.

Zhu et al., "Mist: efficient distributed training of large language models via memory-parallelism co-optimization",
EuroSys 2025. A point is what a stage with some layers takes: ``t`` for a microbatch, and ``d`` more for the first and
the last ones. A step takes ``(microbatches - 1) * max t + sum t + max over stages of (d - sum of t before it)``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import highspy
import numpy as np

Points = Mapping[int, Sequence[tuple[float, float]]]
"""Of a stage, for every number of layers the points that it may have."""


class Chosen(NamedTuple):
    """Layers and the number of the point of every stage, and the time of the formula."""

    counts: tuple[int, ...]
    points: tuple[int, ...]
    time: float


def formula(points: Sequence[tuple[float, float]], microbatches: int) -> float:
    """Return the time of a step whose stages have these points.

    >>> formula([(2.0, 3.0), (1.0, 4.0)], 5)
    14.0
    """
    times = [time for time, _ in points]
    extra = max(more - sum(times[:stage]) for stage, (_, more) in enumerate(points))
    return (microbatches - 1) * max(times) + sum(times) + extra


def inter_stage(stages: Sequence[Points], layers: int, microbatches: int) -> Chosen | None:
    """Return the layers and points for which the formula is least; ``None`` where none add up to all layers."""
    rows = [[(n, k, *point) for n, points in each.items() for k, point in enumerate(points)] for each in stages]
    if not all(rows):
        return None
    starts = np.cumsum([0, *map(len, rows)])
    slowest, extra = int(starts[-1]), int(starts[-1]) + 1
    times = [np.array([row[2] for row in each]) for each in rows]
    scale = 1.0 / max(float(each.max()) for each in times) if max(map(np.max, times)) > 0 else 1.0
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
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
