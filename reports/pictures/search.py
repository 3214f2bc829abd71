"""Picture of searches on one problem: the best step time so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.reports.document import clean_text
from meshwise.reports.palette import DASHES, SERIES
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    WIDTH,
    add_axes,
    choose_time_unit,
    header,
    open_sheet,
)
from meshwise.simulator.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT_MARGIN, _TOP, _BOTTOM, _GAP, _KEY = 92, 120, 66, 34, 330  # pixels around and between panels
_WIDE_RANGE = 50.0  # largest over smallest, from which an axis is logarithmic
_FAR_RANGE = 3.0  # the same for step times
_MAX_MARKS = 14
Point = tuple[int, float, float]
"""Evaluations, seconds elapsed, best step time so far in s."""


def draw_search(
    histories: Mapping[str, Sequence[Point]], path: Path | str, *, lower_bound: float | None = None, title: str = ""
) -> None:
    """Draw the best step time so far of every algorithm against evaluations and against time.

    Points before the first plan that fits (infinite step time) are left out.

    Raises
    ------
    ValueError
        Where there is no history or ``path`` ends in neither .png nor .svg.
    """
    if not histories:
        raise ValueError("a search picture needs the history of at least one algorithm, met none")
    finite_histories = {name: [point for point in points if isfinite(point[2])] for name, points in histories.items()}
    ranking = sorted(
        finite_histories, key=lambda name: finite_histories[name][-1][2] if finite_histories[name] else float("inf")
    )
    width = (WIDTH - _LEFT_MARGIN - _GAP - _KEY) // 2
    with open_sheet(path) as figure:
        header(figure, title or "Best plan so far", _summarize_search(finite_histories, ranking, lower_bound))
        for column, heading in ((0, "evaluations"), (1, "search time (s)")):
            ax = add_axes(figure, _LEFT_MARGIN + column * (width + _GAP), _TOP, width, HEIGHT - _TOP - _BOTTOM)
            _draw_lines(ax, [finite_histories[name] for name in ranking], column)
            _finish_axes(ax, finite_histories, lower_bound, column)
            ax.set_xlabel(heading)
        best_times = [
            format_time(finite_histories[name][-1][2]) if finite_histories[name] else "none fits" for name in ranking
        ]
        names = [f"{clean_text(name, 22)}  {time}" for name, time in zip(ranking, best_times, strict=True)]
        handles = ax.get_lines()[: len(names)]
        figure.legend(
            handles, names, loc="upper left", bbox_to_anchor=(1 - (_KEY - 6) / WIDTH, 1 - _TOP / HEIGHT), fontsize=11,
            title="best step time", title_fontsize=11, alignment="left", handlelength=2.6, labelspacing=0.7,
        )  # fmt: skip


def _summarize_search(histories: Mapping[str, Sequence[Point]], ranking: Sequence[str], bound: float | None) -> str:
    best = histories[ranking[0]]
    if not best:
        return "no algorithm found a plan that fits"
    # the picture's order says nothing of algorithms that found equal plans: the first to find it is named
    finders = [name for name in ranking if histories[name] and histories[name][-1][2] == best[-1][2]]
    first_finder = min(finders, key=lambda name: histories[name][-1][0])
    num_evaluations = histories[first_finder][-1][0]
    words = (
        f"best: {format_time(best[-1][2])}, first by {clean_text(first_finder, 30)} after {num_evaluations:,} "
        f"{'evaluation' if num_evaluations == 1 else 'evaluations'}"
    )
    if len(finders) > 1:
        words += f", found by {len(finders)} of {len(ranking)} algorithms"
    if bound is None or bound <= 0:
        return words
    return f"{words}; lower bound {format_time(bound)}, gap {best[-1][2] / bound - 1:.1%}"


def _draw_lines(ax: Axes, histories: Sequence[Sequence[Point]], column: int) -> None:
    """Draw one staircase per algorithm, the best on top."""
    unit, _ = _time_unit(histories)
    for index, points in enumerate(histories):
        xs, ys = [point[column] for point in points], [point[2] / unit for point in points]
        style = DASHES[index // len(SERIES) % len(DASHES)]
        ax.plot(
            xs, ys, drawstyle="steps-post", color=SERIES[index % len(SERIES)], linestyle=style, linewidth=2.2,
            marker="o", markevery=[len(xs) - 1] if xs else None, markersize=6, zorder=3 + len(histories) - index,
        )  # fmt: skip


def _finish_axes(ax: Axes, histories: Mapping[str, Sequence[Point]], bound: float | None, column: int) -> None:
    """Set scales and grid, and draw the lower bound."""
    unit, name = _time_unit(list(histories.values()))
    steps = [point[2] / unit for points in histories.values() for point in points]
    places = [point[column] for points in histories.values() for point in points if point[column] > 0]
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
        _scale_time_axis(ax, min(steps), max(steps))
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    if column:
        ax.tick_params(axis="y", labelleft=False)
    else:
        ax.set_ylabel(f"best step time so far ({name})")


def _scale_time_axis(ax: Axes, low: float, high: float) -> None:
    """Set the step-time axis from ``low`` to ``high``: logarithmic where they are far apart."""
    if high <= _FAR_RANGE * low:
        span = max(high - low, 0.02 * high)
        ax.set_ylim(max(0.0, low - 0.12 * span), high + 0.08 * span)
        return
    ax.set_yscale("log")
    ax.set_ylim(low * 0.88, high * 1.1)
    decades = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    marks = [
        mantissa * 10.0**exponent
        for exponent in decades
        for mantissa in (1, 1.5, 2, 3, 4, 5, 7)
        if low * 0.88 <= mantissa * 10.0**exponent <= high * 1.1
    ]
    marks = marks[:: -(-len(marks) // _MAX_MARKS)]
    ax.set_yticks(marks, [f"{mark:.4g}" for mark in marks])
    ax.set_yticks([], minor=True)


def _time_unit(histories: Iterable[Sequence[Point]]) -> tuple[float, str]:
    return choose_time_unit(min((point[2] for points in histories for point in points), default=1.0))
