"""Pictures and tables of searches: how good the best plan so far is, against evaluations and against time."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from reports.figure import GRID, HEIGHT, INK, WIDTH, axes, header, sheet, time_unit
from reports.palette import DASHES, SERIES
from reports.text import plain
from simulator.units import format_time
from strategies.evaluation import Trial

if TYPE_CHECKING:
    import pandas as pd

_LEFT, _TOP, _BOTTOM, _GAP, _KEY = 92, 120, 66, 34, 330  # pixels around and between panels
_WIDE_RANGE = 50.0  # largest over smallest, from which an axis is logarithmic
_FAR = 3.0  # the same for step times
_MOST_MARKS = 14
Point = tuple[int, float, float]
"""Evaluations, seconds elapsed, best step time so far in s."""


def draw_search(
    histories: Mapping[str, Sequence[Point]], path: Path | str, *, lower_bound: float | None = None, title: str = ""
) -> None:
    """Draw the best step time so far of every algorithm against evaluations and against time.

    Points without a plan that fits (infinite step time) are left out.

    Raises
    ------
    ValueError
        Where there is no history or ``path`` ends in neither .png nor .svg.
    """
    if not histories:
        raise ValueError("a search picture needs the history of at least one algorithm, met none")
    found = {name: [p for p in points if isfinite(p[2])] for name, points in histories.items()}
    order = sorted(found, key=lambda name: found[name][-1][2] if found[name] else float("inf"))
    width = (WIDTH - _LEFT - _GAP - _KEY) // 2
    with sheet(path) as figure:
        header(figure, title or "Best plan so far", _facts(found, order, lower_bound))
        for column, heading in ((0, "evaluations"), (1, "search time (s)")):
            ax = axes(figure, _LEFT + column * (width + _GAP), _TOP, width, HEIGHT - _TOP - _BOTTOM)
            _draw_lines(ax, [found[name] for name in order], column)
            _finish(ax, found, lower_bound, column)
            ax.set_xlabel(heading)
        names = [
            f"{plain(name, 22)}  {format_time(found[name][-1][2]) if found[name] else 'none fits'}" for name in order
        ]
        handles = ax.get_lines()[: len(names)]
        figure.legend(
            handles, names, loc="upper left", bbox_to_anchor=(1 - (_KEY - 6) / WIDTH, 1 - _TOP / HEIGHT), fontsize=11,
            title="best step time", title_fontsize=11, alignment="left", handlelength=2.6, labelspacing=0.7,
        )  # fmt: skip


def _facts(found: Mapping[str, Sequence[Point]], order: Sequence[str], bound: float | None) -> str:
    best = found[order[0]]
    if not best:
        return "no algorithm found a plan that fits"
    evaluations = "evaluation" if best[-1][0] == 1 else "evaluations"
    words = f"best: {format_time(best[-1][2])} by {plain(order[0], 30)} after {best[-1][0]:,} {evaluations}"
    if bound is None or bound <= 0:
        return words
    return f"{words}; lower bound {format_time(bound)}, gap {best[-1][2] / bound - 1:.1%}"


def _draw_lines(ax: Axes, histories: Sequence[Sequence[Point]], column: int) -> None:
    """Draw one staircase an algorithm, the best on top."""
    unit, _ = _unit(histories)
    for index, points in enumerate(histories):
        xs, ys = [p[column] for p in points], [p[2] / unit for p in points]
        style = DASHES[index // len(SERIES) % len(DASHES)]
        ax.plot(
            xs, ys, drawstyle="steps-post", color=SERIES[index % len(SERIES)], linestyle=style, linewidth=2.2,
            marker="o", markevery=[len(xs) - 1] if xs else None, markersize=6, zorder=3 + len(histories) - index,
        )  # fmt: skip


def _finish(ax: Axes, found: Mapping[str, Sequence[Point]], bound: float | None, column: int) -> None:
    """Set scales and grid, and draw the lower bound."""
    unit, name = _unit(list(found.values()))
    steps = [p[2] / unit for points in found.values() for p in points]
    places = [p[column] for points in found.values() for p in points if p[column] > 0]
    if places and max(places) > _WIDE_RANGE * min(places):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if bound is not None and bound > 0:
        ax.axhline(bound / unit, color=INK, linewidth=1.4, linestyle=(0, (6, 4)))
        ax.annotate(
            "lower bound", (0.0, bound / unit), xycoords=("axes fraction", "data"), xytext=(5, -13),
            textcoords="offset points", fontsize=11,
        )  # fmt: skip
        steps.append(bound / unit)
    if steps:
        _scale(ax, min(steps), max(steps))
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    if column:
        ax.tick_params(axis="y", labelleft=False)
    else:
        ax.set_ylabel(f"best step time so far ({name})")


def _scale(ax: Axes, low: float, high: float) -> None:
    """Set the step-time axis from ``low`` to ``high``: logarithmic where they are far apart."""
    if high <= _FAR * low:
        room = max(high - low, 0.02 * high)
        ax.set_ylim(max(0.0, low - 0.12 * room), high + 0.08 * room)
        return
    ax.set_yscale("log")
    ax.set_ylim(low * 0.88, high * 1.1)
    decades = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    marks = [m * 10.0**e for e in decades for m in (1, 1.5, 2, 3, 4, 5, 7) if low * 0.88 <= m * 10.0**e <= high * 1.1]
    marks = marks[:: -(-len(marks) // _MOST_MARKS)]
    ax.set_yticks(marks, [f"{mark:.4g}" for mark in marks])
    ax.set_yticks([], minor=True)


def _unit(histories: Iterable[Sequence[Point]]) -> tuple[float, str]:
    return time_unit(min((p[2] for points in histories for p in points), default=1.0))


def trials_table(trials: Iterable[Trial]) -> "pd.DataFrame":
    """Return one row a trial: degrees and choices of its plan, step time, memory, and s since the search began."""
    import pandas as pd

    columns = (
        "data", "tensor", "tensor_rows", "pipeline", "schedule", "chunks", "microbatch", "num_microbatches", "zero",
        "sequence_parallel", "recompute", "step_time", "peak_memory", "fits", "elapsed",
    )  # fmt: skip
    return pd.DataFrame([_row(trial) for trial in trials], columns=list(columns))


def _row(trial: Trial) -> tuple[object, ...]:
    plan, evaluation = trial.plan, trial.evaluation
    return (
        plan.data, plan.tensor, plan.tensor_rows, plan.pipeline, plan.schedule_name, plan.chunks, plan.microbatch,
        plan.num_microbatches, plan.zero, plan.sequence_parallel, str(plan.recompute), evaluation.step_time,
        evaluation.peak_memory, evaluation.fits, trial.elapsed,
    )  # fmt: skip
