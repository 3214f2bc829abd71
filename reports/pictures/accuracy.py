"""Pictures of accuracy: predicted against measured runs, errors by class of runs, and prediction intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.reports.document import clean_text
from meshwise.reports.palette import SERIES, blend
from meshwise.reports.pictures.figure import (
    DPI,
    GRID,
    HEIGHT,
    INK,
    QUIET,
    WIDTH,
    add_axes,
    axes_pixels,
    header,
    open_sheet,
)
from meshwise.simulator.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_LEFT_MARGIN, _TOP, _BOTTOM, _GAP, _SIDE = 92, 150, 70, 170, 650  # pixels; the scatter is _SIDE wide
_BANDS = ((0.3, "#EFEFEF"), (0.1, "#DADADA"))
_MARKERS = "osD^vPXp"
_PALE_WEIGHT = 0.45  # of the way to white for the colours of every second round
_MAX_LABELS = 60
_MAX_NAMED_BARS = 40
_LINE = 16  # pixels of a line of small type
_CLIP = 1.0  # errors beyond this are drawn as this, with their value


class AccuracyRow(NamedTuple):
    """One run: ``predicted`` and ``measured`` step time in s, its publisher (``source``) and its labels."""

    row_id: str
    source: str
    model: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


def draw_accuracy(rows: Sequence[AccuracyRow], path: Path | str, *, title: str = "") -> None:
    """Draw predicted against measured step times with bands of 10 % and 30 %, and the error of every row.

    Raises
    ------
    ValueError
        Where no row has finite step times above 0, or ``path`` ends in neither .png nor .svg.
    """
    valid_rows = [row for row in rows if all(isfinite(time) and time > 0 for time in (row.predicted, row.measured))]
    if not valid_rows:
        rule = "an accuracy picture needs finite step times above 0 in at least one row"
        raise ValueError(f"{rule}, met {len(rows)} rows")
    sources = sorted({row.source for row in valid_rows})
    errors_left, height = _LEFT_MARGIN + _SIDE + _GAP, HEIGHT - _TOP - _BOTTOM
    with open_sheet(path) as figure:
        header(figure, title or "Predicted against measured step time", summarize_errors(valid_rows))
        scatter = add_axes(figure, _LEFT_MARGIN, _TOP, _SIDE, height)
        _draw_scatter(scatter, valid_rows, sources)
        _draw_errors(add_axes(figure, errors_left, _TOP, WIDTH - errors_left - 30, height), valid_rows, sources)
        place = (0.012, 1 - 112 / HEIGHT)
        figure.legend(
            *scatter.get_legend_handles_labels(), loc="center left", bbox_to_anchor=place, fontsize=10.5,
            ncols=min(len(sources), 8), columnspacing=1.2, handletextpad=0.2,
        )  # fmt: skip


def summarize_errors(rows: Sequence[AccuracyRow]) -> str:
    """Return a one-line summary of the errors of ``rows``."""
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    return (
        f"{len(rows)} rows: mean absolute error {size.mean():.1%}, median {np.median(size):.1%}, largest "
        f"{size.max():.1%}, bias {errors.mean():+.1%}; within 10 %: {(size <= 0.1).mean():.0%}, "
        f"within 30 %: {(size <= 0.3).mean():.0%}"
    )


def choose_style(source: str, sources: Sequence[str]) -> tuple[str, str]:
    """Return colour and marker of a source; the first 64 sources all differ."""
    index = sources.index(source)
    colour = blend(SERIES[index % len(SERIES)], "#FFFFFF", _PALE_WEIGHT * (index // len(SERIES) % 2))
    return colour, _MARKERS[(index + index // len(SERIES)) % len(_MARKERS)]


def _draw_scatter(ax: Axes, rows: Sequence[AccuracyRow], sources: Sequence[str]) -> None:
    times = [time for row in rows for time in (row.predicted, row.measured)]
    low, high = min(times) / 1.6, max(times) * 1.6
    line = np.array([low, high])
    for width, colour in _BANDS:
        ax.fill_between(line, line * (1 - width), line * (1 + width), color=colour, linewidth=0, zorder=0)
    ax.plot(line, line, color=INK, linewidth=1.2, zorder=1)
    for source in sources:
        source_rows = [row for row in rows if row.source == source]
        colour, marker = choose_style(source, sources)
        ax.scatter(
            [row.measured for row in source_rows], [row.predicted for row in source_rows], color=colour, marker=marker,
            s=46 if len(rows) < 150 else 22, edgecolors="white", linewidths=0.6, label=clean_text(source, 24), zorder=3,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: format_time(value))
        axis.set_minor_formatter(lambda value, _: "")
    ax.set_xlabel("measured step time")
    ax.set_ylabel("predicted step time")
    ax.grid(color="white", linewidth=0.8)
    _label_points(ax, rows)


def _label_points(ax: Axes, rows: Sequence[AccuracyRow]) -> None:
    """Write model names beside the points, worst errors first, where they cover neither a point nor another name."""
    from matplotlib.transforms import Bbox

    points = ax.transData.transform([(row.measured, row.predicted) for row in rows])
    occupied = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points]
    frame = ax.get_window_extent()
    worst_first = sorted(range(len(rows)), key=lambda i: (-abs(rows[i].error), rows[i].row_id))
    for index in worst_first[:_MAX_LABELS]:
        words = clean_text(rows[index].model, 24)
        x, y = points[index]
        width, height = 6.9 * len(words), 14.0
        for side, dx, dy in (("left", 8, 0), ("right", -8, 0), ("center", 0, 15), ("center", 0, -15)):
            box_left = x + dx - width * {"left": 0.0, "center": 0.5, "right": 1.0}[side]
            box = Bbox.from_bounds(box_left, y + dy - height / 2, width, height)
            if words and box.count_overlaps(occupied) == 0 and _is_inside(box, frame):
                occupied.append(box)
                ax.annotate(
                    words, (rows[index].measured, rows[index].predicted), xytext=(dx * 72 / DPI, dy * 72 / DPI),
                    textcoords="offset points", fontsize=8.5, color=QUIET, ha=side, va="center",
                )  # fmt: skip
                break


def _is_inside(box: Bbox, frame: Bbox) -> bool:
    return bool(box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1)


def _draw_errors(ax: Axes, rows: Sequence[AccuracyRow], sources: Sequence[str]) -> None:
    """Draw one bar per row, by source and error; errors beyond 100 % are cut at the edge."""
    ordered_rows = sorted(rows, key=lambda row: (sources.index(row.source), row.error, row.row_id))
    places = np.arange(len(ordered_rows))
    errors = np.clip([row.error for row in ordered_rows], -_CLIP, _CLIP)
    limit = min(_CLIP, max(0.4, 1.1 * float(np.abs(errors).max())))
    for width, colour in _BANDS:
        ax.axvspan(-width, width, color=colour, linewidth=0, zorder=0)
    colours = [choose_style(row.source, sources)[0] for row in ordered_rows]
    ax.barh(places, errors, height=0.8 if len(ordered_rows) <= _MAX_NAMED_BARS else 1.0, color=colours, zorder=2)
    ax.axvline(0.0, color=INK, linewidth=1.2, zorder=3)
    ax.set(xlim=(-limit, limit), ylim=(len(ordered_rows) - 0.4, -0.6), xlabel="error of the predicted step time")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    if len(ordered_rows) <= _MAX_NAMED_BARS:
        _name_bars(ax, ordered_rows)
    else:
        _name_sources(ax, [row.source for row in ordered_rows])


def _name_bars(ax: Axes, ordered_rows: Sequence[AccuracyRow]) -> None:
    """Write the identifiers of rows beside the zero line, on the side without a bar."""
    size = min(10.0, 0.5 * axes_pixels(ax)[1] / len(ordered_rows))
    for place, row in enumerate(ordered_rows):
        side = "right" if row.error >= 0 else "left"
        offset = -4 if row.error >= 0 else 4
        ax.annotate(
            clean_text(row.row_id, 34), (0.0, place), xytext=(offset, 0), textcoords="offset points",
            ha=side, va="center", fontsize=size, color=INK, zorder=4,
        )  # fmt: skip


def _name_sources(ax: Axes, sources: Sequence[str]) -> None:
    """Write each source beside the middle of its bars, lower where the name above needs the room."""
    line = _LINE * len(sources) / axes_pixels(ax)[1]
    marks: dict[float, str] = {}
    for source in dict.fromkeys(sources):
        middle = sources.index(source) + (sources.count(source) - 1) / 2
        place = max(middle, max(marks, default=-line) + line)
        if place - middle <= 2 * line:
            marks[place] = clean_text(source, 20)
    ax.set_yticks(list(marks), list(marks.values()), fontsize=9)
    ax.tick_params(axis="y", length=0)


MAX_CLASSES = 24
_CLASS_LEFT, _CLASS_TOP, _CLASS_BOTTOM, _CLASS_RIGHT = 240, 110, 80, 420  # pixels; figures stand on the right

Columns = Sequence[tuple[float, str]]
"""Columns of figures: where each begins, as a fraction of the margin on the right, and its heading."""


def add_class_axes(figure: Figure) -> Axes:
    """Return the axes of runs, with room for names on the left and figures on the right."""
    width, height = WIDTH - _CLASS_LEFT - _CLASS_RIGHT, HEIGHT - _CLASS_TOP - _CLASS_BOTTOM
    return add_axes(figure, _CLASS_LEFT, _CLASS_TOP, width, height)


def name_rows(ax: Axes, names: Sequence[str], columns: Columns) -> None:
    """Name the rows, from the top, and the columns."""
    ax.set_yticks(range(len(names)), [clean_text(name, 26) for name in names], fontsize=13)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines["left"].set_visible(False)
    write_columns(ax, -0.65, columns, [words for _, words in columns], QUIET)


def write_columns(ax: Axes, place: float, columns: Columns, words: Sequence[str], colour: str) -> None:
    """Write words into the columns of a row."""
    width = _CLASS_RIGHT / (WIDTH - _CLASS_LEFT - _CLASS_RIGHT)
    for (column, _), word in zip(columns, words, strict=True):
        ax.text(
            1 + column * width, place, word, transform=ax.get_yaxis_transform(), fontsize=13, color=colour, va="center",
            clip_on=False,
        )  # fmt: skip


_MIN_ERROR_RANGE = 0.4  # to which errors the axis reaches at least
_SPREAD = 0.32  # of a class's height, over which its points lie
_ERROR_COLUMNS = ((0.06, "rows"), (0.22, "mean |error|"), (0.56, "median"), (0.79, "bias"))  # of the room on the right


def draw_errors_by_class(classes: Mapping[str, Sequence[float]], path: Path | str, *, title: str) -> None:
    """Draw the relative errors of every class as points, with their median and interquartile range.

    Parameters
    ----------
    classes
        Relative errors, predicted / measured - 1, by class, in the order in which they are drawn.

    Raises
    ------
    ValueError
        Where no class has an error, or ``path`` ends in neither .png nor .svg.
    """
    finite_errors = {name: [error for error in errors if isfinite(error)] for name, errors in classes.items()}
    class_errors = {name: np.array(errors) for name, errors in finite_errors.items() if errors}
    if not class_errors:
        raise ValueError(f"a picture of errors needs a class with one, met {len(classes)} classes")
    names = sorted(class_errors, key=lambda name: -len(class_errors[name]))[:MAX_CLASSES]
    names = [name for name in class_errors if name in names]
    largest = max(float(np.abs(errors).max()) for errors in class_errors.values())
    facts = "each point is a measured run; line: the median, bar: the middle half; shaded: within 10 % and within 30 %"
    with open_sheet(path) as figure:
        header(figure, title, facts)
        ax = add_class_axes(figure)
        _set_error_axes(ax, names, min(_CLIP, max(_MIN_ERROR_RANGE, 1.1 * largest)))
        for place, name in enumerate(names):
            _draw_class_errors(ax, place, class_errors[name])


def _set_error_axes(ax: Axes, names: Sequence[str], limit: float) -> None:
    for width, colour in _BANDS:
        ax.axvspan(-width, width, color=colour, linewidth=0, zorder=0)
    ax.axvline(0.0, color=INK, linewidth=1.2, zorder=1)
    ax.set(xlim=(-limit, limit), ylim=(len(names) - 0.4, -0.9), xlabel="error of the predicted step time")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    name_rows(ax, names, _ERROR_COLUMNS)


def _draw_class_errors(ax: Axes, place: int, errors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    clipped_errors = np.clip(errors, -_CLIP, _CLIP)
    order = np.argsort(np.argsort(clipped_errors, kind="stable"), kind="stable")
    height = place + _SPREAD * (2 * (order * 0.618034 % 1) - 1)  # spread evenly, and the same each time
    size = 20 if len(errors) < 400 else 9
    ax.scatter(clipped_errors, height, s=size, color=SERIES[0], alpha=0.45, linewidths=0, zorder=2)
    low, middle, high = np.quantile(clipped_errors, (0.25, 0.5, 0.75))
    ax.plot([low, high], [place, place], color=INK, linewidth=5, alpha=0.35, solid_capstyle="butt", zorder=3)
    ax.plot([middle, middle], [place - 0.36, place + 0.36], color=INK, linewidth=2.4, zorder=4)
    sizes = np.abs(errors)
    figures = [f"{len(errors)}", f"{sizes.mean():.1%}", f"{np.median(sizes):.1%}", f"{errors.mean():+.1%}"]
    write_columns(ax, place, _ERROR_COLUMNS, figures, INK)
