"""Pictures of many searches: how far from the optimum each algorithm is, against evaluations and against time."""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from reports.figure import GRID, HEIGHT, INK, QUIET, WIDTH, axes, header, pixel_height, sheet
from reports.palette import DASHES, SERIES
from reports.text import plain

Course = Sequence[tuple[float, float]]
"""How one search went: (evaluations or seconds, gap from then on), the gap as a fraction of the optimum."""
FLOOR = 1e-3
"""Gaps below this are drawn here: the optimum is at zero, which a logarithmic axis has not."""
WITHIN = 0.01
"""Gap within which a search counts as at the optimum."""
MOST = 20
"""Algorithms in a picture at the most."""

_COLUMNS, _PLACES = 5, 160
_CEILING = 20.0
_MARKS = ((FLOOR, "0"), (0.01, "1 %"), (0.1, "10 %"), (1.0, "100 %"), (10.0, "1000 %"))
_SHADES = ("#FFFFFF", "#DCE9F5", "#A9CBE8", "#F6D6A8", "#EDA25C", "#CF4A16")
_STEPS = (WITHIN, 0.05, 0.2, 0.5, 1.0)


def draw_gaps(courses: Mapping[str, Sequence[Course]], path: Path | str, *, title: str, facts: str, what: str) -> None:
    """Draw for every algorithm the median gap of its searches and, as a band, the middle half of them.

    Parameters
    ----------
    courses
        The searches of every algorithm, each the same problems.
    what
        What the horizontal axis is.

    Raises
    ------
    ValueError
        Where no search found a plan, there are more than `MOST` algorithms, or ``path`` ends in neither .png nor .svg.
    """
    places = _places(courses)
    found = {name: _quartiles(runs, places) for name, runs in courses.items()}
    rows = ceil(len(found) / _COLUMNS)
    tall = max(HEIGHT, 130 + 260 * rows)
    with sheet(path, tall) as figure:
        header(figure, title, facts)
        left, top, gap, below = 124, 134, 22, 58
        width = (WIDTH - left - 30 - gap * (_COLUMNS - 1)) // _COLUMNS
        height = (pixel_height(figure) - top - below) // rows - 46
        for number, name in enumerate(found):
            row, column = divmod(number, _COLUMNS)
            ax = axes(figure, left + column * (width + gap), top + row * (height + 46), width, height)
            for other, (_, median, _) in found.items():
                if other != name:
                    ax.plot(places, median, color="#C9C9C9", linewidth=1.0, drawstyle="steps-post", zorder=2)
            _draw_band(ax, places, found[name])
            ax.set_title(plain(name, 26), fontsize=13, loc="left", fontweight="bold", pad=6)
            _finish_gap(ax, places, first=column == 0, last=number + _COLUMNS >= len(found))
        figure.text(0.5, 18 / pixel_height(figure), what, ha="center", fontsize=12)
        figure.text(0.016, 0.5, "gap to the optimum", rotation=90, va="center", fontsize=12)


def _places(courses: Mapping[str, Sequence[Course]]) -> list[float]:
    """Return where on the horizontal axis gaps are read, from the first plan found to the last."""
    if len(courses) > MOST:
        raise ValueError(f"a picture shows at most {MOST} algorithms, met {len(courses)}")
    met = [at for runs in courses.values() for course in runs for at, _ in course if at > 0]
    if not met:
        raise ValueError("a picture of gaps needs a search that found a plan, met none")
    low, high = min(met), max(met)
    return [float(at) for at in np.geomspace(low, max(high * 1.15, low * 10), _PLACES)]


def _at(course: Course, places: list[float]) -> list[float]:
    """Return the gap of one search at every place, infinite before its first plan."""
    when = np.array([at for at, _ in course])
    gaps = [float("inf"), *(gap for _, gap in course)]
    return [gaps[index] for index in np.searchsorted(when, places, side="right")]


def _quartiles(runs: Sequence[Course], places: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Return lower quartile, median and upper quartile of the gaps of searches at every place."""
    rows = np.sort(np.array([_at(course, places) for course in runs]), axis=0)
    low, middle, high = (rows[min(len(rows) - 1, int(share * len(rows)))] for share in (0.25, 0.5, 0.75))
    return _clipped(low), _clipped(middle), _clipped(high)


def _clipped(gaps: Sequence[float]) -> list[float]:
    return [min(max(float(gap), FLOOR), _CEILING) if isfinite(gap) else float("nan") for gap in gaps]


def _draw_band(ax: Axes, places: Sequence[float], quartiles: tuple[list[float], list[float], list[float]]) -> None:
    low, median, high = quartiles
    top = [_CEILING if np.isnan(gap) else gap for gap in high]
    known = ~np.isnan(np.array(low))
    ax.fill_between(places, low, top, where=known.tolist(), step="post", color="#A9CBE8", linewidth=0, zorder=1)
    ax.plot(places, median, color=SERIES[0], linewidth=2.6, drawstyle="steps-post", zorder=4)


def _finish_gap(ax: Axes, places: Sequence[float], *, first: bool, last: bool) -> None:
    ax.set(xscale="log", yscale="log", xlim=(places[0], places[-1]), ylim=(FLOOR * 0.75, _CEILING))
    ax.set_yticks([at for at, _ in _MARKS], [text if first else "" for _, text in _MARKS])
    ax.set_yticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}" if last else "")
    ax.axhline(WITHIN, color=QUIET, linewidth=1.0, linestyle=(0, (4, 4)), zorder=3)
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
    """Draw which share of its searches each algorithm has at the optimum, against evaluations and against time.

    These are data profiles (Moré and Wild, "Benchmarking derivative-free optimization algorithms", SIAM Journal on
    Optimization 20(1), 2009), with `WITHIN` of the optimum as the test.

    Raises
    ------
    ValueError
        As `draw_gaps`.
    """
    left, top, gap, key, below = 92, 134, 34, 330, 66
    width = (WIDTH - left - gap - key) // 2
    shares = [{name: _shares(runs) for name, runs in each.items()} for each in (by_evaluations, by_seconds)]
    order = sorted(by_evaluations, key=lambda name: (-shares[0][name][-1][1], shares[0][name][-1][0]))
    with sheet(path) as figure:
        header(figure, title, facts)
        for column, (courses, what) in enumerate(((by_evaluations, "evaluations"), (by_seconds, "CPU time (s)"))):
            places = _places(courses)
            ax = axes(figure, left + column * (width + gap), top, width, HEIGHT - top - below)
            for number, name in enumerate(order):
                xs, ys = zip(*shares[column][name], strict=True)
                ax.plot(
                    [*xs, places[-1]], [*ys, ys[-1]], drawstyle="steps-post", color=SERIES[number % len(SERIES)],
                    linestyle=DASHES[number // len(SERIES) % len(DASHES)], linewidth=2.4, label=name,
                )  # fmt: skip
            ax.set(xscale="log", xlim=(places[0], places[-1]), ylim=(0, 1.02))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            ax.tick_params(axis="y", labelleft=not column)
            ax.set_xlabel(what, fontsize=12)
            ax.grid(color=GRID, linewidth=0.8)
        names = [f"{plain(name, 22)}  {100 * shares[0][name][-1][1]:.0f} %" for name in order]
        figure.legend(
            ax.get_lines(), names, loc="upper left", bbox_to_anchor=(1 - (key - 10) / WIDTH, 1 - top / HEIGHT),
            fontsize=12, title="at the end", title_fontsize=12, alignment="left", handlelength=2.6, labelspacing=0.7,
        )  # fmt: skip


def _shares(runs: Sequence[Course]) -> list[tuple[float, float]]:
    """Return the share of searches at the optimum, wherever it rises; at 0 at the start."""
    solved = sorted(next((at for at, gap in course if gap <= WITHIN), float("inf")) for course in runs)
    reached = [at for at in solved if isfinite(at)]
    return [(0.0, 0.0), *((at, (number + 1) / len(runs)) for number, at in enumerate(reached))]


def draw_cases(gaps: Mapping[str, Mapping[str, float]], path: Path | str, *, title: str, facts: str) -> None:
    """Draw a table of gaps, a row a problem and a column an algorithm, the darker the farther from the optimum.

    Parameters
    ----------
    gaps
        By problem and then by algorithm; infinite where no plan was found, left out where it was not run.

    Raises
    ------
    ValueError
        Where there is no problem or ``path`` ends in neither .png nor .svg.
    """
    if not gaps:
        raise ValueError("a picture of gaps needs a problem, met none")
    names = list(dict.fromkeys(name for row in gaps.values() for name in row))
    left, top, line = 330, 196, 27
    with sheet(path, top + line * len(gaps) + 30) as figure:
        header(figure, title, facts)
        ax = axes(figure, left, top, WIDTH - left - 30, line * len(gaps))
        ax.set(xlim=(0, len(names)), ylim=(len(gaps), 0))
        for row, found in enumerate(gaps.values()):
            for column, name in enumerate(names):
                _draw_cell(ax, row, column, found.get(name))
        ax.set_yticks([row + 0.5 for row in range(len(gaps))], [plain(case, 36) for case in gaps], fontsize=12)
        ax.set_xticks([at + 0.5 for at in range(len(names))], [plain(name, 22) for name in names], fontsize=12)
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
        colour = _SHADES[sum(gap > step for step in _STEPS)]
        text = f"{100 * (0.0 if abs(gap) < FLOOR / 2 else gap):.1f} %" if isfinite(gap) else "none"
    ink = "#FFFFFF" if colour == _SHADES[-1] else QUIET if gap is None else INK
    ax.fill_between([column + 0.02, column + 0.98], row + 0.04, row + 0.96, color=colour, linewidth=0)
    ax.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=11, color=ink)
