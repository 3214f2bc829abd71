"""Pictures of many searches: their gaps to proven optima, on one problem after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwise.reports.document import clean_text
from meshwise.reports.palette import DASHES, SERIES
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    QUIET,
    WIDTH,
    add_axes,
    figure_height,
    header,
    open_sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Course = Sequence[tuple[float, float]]
"""The course of one search: (evaluations or seconds, gap from then on); the gap is a fraction of the optimum."""
MIN_GAP = 1e-3
"""Smaller gaps are drawn at this one: a logarithmic axis cannot show zero, the gap of the optimum."""
SOLVED_GAP = 0.01
"""A search with at most this gap counts as solved."""
MAX_ALGORITHMS = 20
"""Largest number of algorithms in a picture."""

_COLUMNS, _NUM_POSITIONS = 5, 160
_MAX_GAP = 20.0
_MARKS = ((MIN_GAP, "0"), (0.01, "1 %"), (0.1, "10 %"), (1.0, "100 %"), (10.0, "1000 %"))
_SHADES = ("#FFFFFF", "#DCE9F5", "#A9CBE8", "#F6D6A8", "#EDA25C", "#CF4A16")
_SHADE_GAPS = (SOLVED_GAP, 0.05, 0.2, 0.5, 1.0)


def draw_gaps(
    courses: Mapping[str, Sequence[Course]], path: Path | str, *, title: str, facts: str, axis_label: str
) -> None:
    """Draw for every algorithm the median gap of its searches and, as a band, their interquartile range.

    Parameters
    ----------
    courses
        The searches of every algorithm, all on the same problems.
    axis_label
        Label of the horizontal axis.

    Raises
    ------
    ValueError
        Where no search found a plan, there are more than `MAX_ALGORITHMS`, or ``path`` ends in neither .png nor .svg.
    """
    positions = _choose_positions(courses)
    quartiles = {name: _gap_quartiles(searches, positions) for name, searches in courses.items()}
    rows = ceil(len(quartiles) / _COLUMNS)
    sheet_height = max(HEIGHT, 130 + 260 * rows)
    with open_sheet(path, sheet_height) as figure:
        header(figure, title, facts)
        left_margin, top, gap, bottom = 124, 134, 22, 58
        width = (WIDTH - left_margin - 30 - gap * (_COLUMNS - 1)) // _COLUMNS
        height = (figure_height(figure) - top - bottom) // rows - 46
        for index, name in enumerate(quartiles):
            row, column = divmod(index, _COLUMNS)
            ax = add_axes(figure, left_margin + column * (width + gap), top + row * (height + 46), width, height)
            for other_name, (_, median, _) in quartiles.items():
                if other_name != name:
                    ax.plot(positions, median, color="#C9C9C9", linewidth=1.0, drawstyle="steps-post", zorder=2)
            _draw_band(ax, positions, quartiles[name])
            ax.set_title(clean_text(name, 26), fontsize=13, loc="left", fontweight="bold", pad=6)
            _finish_gap(ax, positions, is_first_column=column == 0, is_last_row=index + _COLUMNS >= len(quartiles))
        figure.text(0.5, 18 / figure_height(figure), axis_label, ha="center", fontsize=12)
        figure.text(0.016, 0.5, "gap to the optimum", rotation=90, va="center", fontsize=12)


def _choose_positions(courses: Mapping[str, Sequence[Course]]) -> list[float]:
    """Return the positions on the horizontal axis at which gaps are read, from the first plan found to the last."""
    if len(courses) > MAX_ALGORITHMS:
        raise ValueError(f"a picture shows at most {MAX_ALGORITHMS} algorithms, met {len(courses)}")
    positive_positions = [
        position for searches in courses.values() for course in searches for position, _ in course if position > 0
    ]
    if not positive_positions:
        raise ValueError("a picture of gaps needs a search that found a plan, met none")
    low, high = min(positive_positions), max(positive_positions)
    return [float(position) for position in np.geomspace(low, max(high * 1.15, low * 10), _NUM_POSITIONS)]


def _read_gaps(course: Course, positions: list[float]) -> list[float]:
    """Return the gap of one search at every position, infinite before its first plan."""
    change_positions = np.array([position for position, _ in course])
    gaps = [float("inf"), *(gap for _, gap in course)]
    return [gaps[index] for index in np.searchsorted(change_positions, positions, side="right")]


def _gap_quartiles(searches: Sequence[Course], positions: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Return lower quartile, median and upper quartile of the gaps of searches at every position."""
    rows = np.sort(np.array([_read_gaps(course, positions) for course in searches]), axis=0)
    low, middle, high = (rows[min(len(rows) - 1, int(share * len(rows)))] for share in (0.25, 0.5, 0.75))
    return _clip_gaps(low), _clip_gaps(middle), _clip_gaps(high)


def _clip_gaps(gaps: Sequence[float]) -> list[float]:
    return [min(max(float(gap), MIN_GAP), _MAX_GAP) if isfinite(gap) else float("nan") for gap in gaps]


def _draw_band(ax: Axes, positions: Sequence[float], quartiles: tuple[list[float], list[float], list[float]]) -> None:
    low, median, high = quartiles
    top = [_MAX_GAP if np.isnan(gap) else gap for gap in high]
    is_known = ~np.isnan(np.array(low))
    ax.fill_between(positions, low, top, where=is_known.tolist(), step="post", color="#A9CBE8", linewidth=0, zorder=1)
    ax.plot(positions, median, color=SERIES[0], linewidth=2.6, drawstyle="steps-post", zorder=4)


def _finish_gap(ax: Axes, positions: Sequence[float], *, is_first_column: bool, is_last_row: bool) -> None:
    ax.set(xscale="log", yscale="log", xlim=(positions[0], positions[-1]), ylim=(MIN_GAP * 0.75, _MAX_GAP))
    ax.set_yticks([tick for tick, _ in _MARKS], [text if is_first_column else "" for _, text in _MARKS])
    ax.set_yticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}" if is_last_row else "")
    ax.axhline(SOLVED_GAP, color=QUIET, linewidth=1.0, linestyle=(0, (4, 4)), zorder=3)
    ax.grid(color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)


def draw_solved(
    by_evaluations: Mapping[str, Sequence[Course]],
    by_seconds: Mapping[str, Sequence[Course]],
    path: Path | str,
    *,
    title: str,
    facts: str,
) -> None:
    """Draw the share of searches that each algorithm has solved, against evaluations and against time.

    These are data profiles (Moré and Wild, "Benchmarking derivative-free optimization algorithms", SIAM Journal on
    Optimization 20(1), 2009), with a gap of at most `SOLVED_GAP` as the test.

    Raises
    ------
    ValueError
        As `draw_gaps`.
    """
    left_margin, top, gap, key, bottom = 92, 134, 34, 330, 66
    width = (WIDTH - left_margin - gap - key) // 2
    shares = [
        {name: _solved_shares(searches) for name, searches in courses_by_name.items()}
        for courses_by_name in (by_evaluations, by_seconds)
    ]
    order = sorted(by_evaluations, key=lambda name: (-shares[0][name][-1][1], shares[0][name][-1][0]))
    with open_sheet(path) as figure:
        header(figure, title, facts)
        for column, (courses, axis_label) in enumerate(((by_evaluations, "evaluations"), (by_seconds, "CPU time (s)"))):
            positions = _choose_positions(courses)
            ax = add_axes(figure, left_margin + column * (width + gap), top, width, HEIGHT - top - bottom)
            for index, name in enumerate(order):
                xs, ys = zip(*shares[column][name], strict=True)
                ax.plot(
                    [*xs, positions[-1]], [*ys, ys[-1]], drawstyle="steps-post", color=SERIES[index % len(SERIES)],
                    linestyle=DASHES[index // len(SERIES) % len(DASHES)], linewidth=2.4, label=name,
                )  # fmt: skip
            ax.set(xscale="log", xlim=(positions[0], positions[-1]), ylim=(0, 1.02))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            ax.tick_params(axis="y", labelleft=not column)
            ax.set_xlabel(axis_label, fontsize=12)
            ax.grid(color=GRID, linewidth=0.8)
        names = [f"{clean_text(name, 22)}  {100 * shares[0][name][-1][1]:.0f} %" for name in order]
        figure.legend(
            ax.get_lines(), names, loc="upper left", bbox_to_anchor=(1 - (key - 10) / WIDTH, 1 - top / HEIGHT),
            fontsize=12, title="at the end", title_fontsize=12, alignment="left", handlelength=2.6, labelspacing=0.7,
        )  # fmt: skip


def _solved_shares(searches: Sequence[Course]) -> list[tuple[float, float]]:
    """Return the points (position, share of searches that are solved) at which the share rises, from (0, 0) on."""
    solved_positions = sorted(
        next((position for position, gap in course if gap <= SOLVED_GAP), float("inf")) for course in searches
    )
    finite_positions = [position for position in solved_positions if isfinite(position)]
    return [(0.0, 0.0), *((position, (index + 1) / len(searches)) for index, position in enumerate(finite_positions))]


def draw_cases(gaps: Mapping[str, Mapping[str, float]], path: Path | str, *, title: str, facts: str) -> None:
    """Draw a table of gaps, one row per problem and one column per algorithm; darker is farther from the optimum.

    Parameters
    ----------
    gaps
        Gaps by problem and then by algorithm; infinite where no plan was found, missing where it was not run.

    Raises
    ------
    ValueError
        Where there is no problem or ``path`` ends in neither .png nor .svg.
    """
    if not gaps:
        raise ValueError("a picture of gaps needs a problem, met none")
    names = list(dict.fromkeys(name for row in gaps.values() for name in row))
    left_margin, top, line = 330, 196, 27
    with open_sheet(path, top + line * len(gaps) + 30) as figure:
        header(figure, title, facts)
        ax = add_axes(figure, left_margin, top, WIDTH - left_margin - 30, line * len(gaps))
        ax.set(xlim=(0, len(names)), ylim=(len(gaps), 0))
        for row, problem_gaps in enumerate(gaps.values()):
            for column, name in enumerate(names):
                _draw_cell(ax, row, column, problem_gaps.get(name))
        ax.set_yticks([row + 0.5 for row in range(len(gaps))], [clean_text(case, 36) for case in gaps], fontsize=12)
        ax.set_xticks(
            [column_index + 0.5 for column_index in range(len(names))],
            [clean_text(name, 22) for name in names],
            fontsize=12,
        )
        ax.xaxis.tick_top()
        for label in ax.get_xticklabels():
            label.set(rotation=22, ha="left", rotation_mode="anchor")
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)


def _draw_cell(ax: Axes, row: int, column: int, gap: float | None) -> None:
    if gap is None:
        text, colour = "not run", "#F1F1F1"
    else:
        colour = _SHADES[sum(gap > step for step in _SHADE_GAPS)]
        text = f"{100 * (0.0 if abs(gap) < MIN_GAP / 2 else gap):.1f} %" if isfinite(gap) else "none"
    ink = "#FFFFFF" if colour == _SHADES[-1] else QUIET if gap is None else INK
    ax.fill_between([column + 0.02, column + 0.98], row + 0.04, row + 0.96, color=colour, linewidth=0)
    ax.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=11, color=ink)
