"""Picture of accuracy: predicted against measured step time of published runs, and the error of every row."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from reports.figure import DPI, GRID, HEIGHT, INK, QUIET, WIDTH, axes, header, pixels, sheet
from reports.palette import SERIES, blend
from reports.text import plain
from simulator.units import format_time

_LEFT, _TOP, _BOTTOM, _GAP, _SIDE = 92, 150, 70, 170, 650  # pixels; the scatter is _SIDE wide
_BANDS = ((0.3, "#EFEFEF"), (0.1, "#DADADA"))
_MARKERS = "osD^vPXp"
_PALER = 0.45  # of the way to white for the colours of every second round
_MOST_LABELS = 60
_MOST_NAMED_BARS = 40
_LINE = 16  # pixels of a line of small type
_CLIP = 1.0  # errors beyond this are drawn as this, with their value


class AccuracyRow(NamedTuple):
    """One run: ``predicted`` and ``measured`` step time in s, who published it, and what to call it."""

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
    kept = [r for r in rows if isfinite(r.predicted) and isfinite(r.measured) and min(r.predicted, r.measured) > 0]
    if not kept:
        raise ValueError(
            f"an accuracy picture needs finite step times above 0 in at least one row, met {len(rows)} rows"
        )
    sources = sorted({row.source for row in kept})
    left = _LEFT + _SIDE + _GAP
    with sheet(path) as figure:
        header(figure, title or "Predicted against measured step time", facts(kept))
        scatter = axes(figure, _LEFT, _TOP, _SIDE, HEIGHT - _TOP - _BOTTOM)
        _draw_scatter(scatter, kept, sources)
        _draw_errors(axes(figure, left, _TOP, WIDTH - left - 30, HEIGHT - _TOP - _BOTTOM), kept, sources)
        place = (0.012, 1 - 112 / HEIGHT)
        figure.legend(
            *scatter.get_legend_handles_labels(), loc="center left", bbox_to_anchor=place, fontsize=10.5,
            ncols=min(len(sources), 8), columnspacing=1.2, handletextpad=0.2,
        )  # fmt: skip


def facts(rows: Sequence[AccuracyRow]) -> str:
    """Return the errors of ``rows`` in one line."""
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    return (
        f"{len(rows)} rows: mean absolute error {size.mean():.1%}, median {np.median(size):.1%}, largest "
        f"{size.max():.1%}, bias {errors.mean():+.1%}; within 10 %: {(size <= 0.1).mean():.0%}, "
        f"within 30 %: {(size <= 0.3).mean():.0%}"
    )


def style_of(source: str, sources: Sequence[str]) -> tuple[str, str]:
    """Return colour and marker of a source; no two of the first 64 are alike."""
    index = sources.index(source)
    colour = blend(SERIES[index % len(SERIES)], "#FFFFFF", _PALER * (index // len(SERIES) % 2))
    return colour, _MARKERS[(index + index // len(SERIES)) % len(_MARKERS)]


def _draw_scatter(ax: Axes, rows: Sequence[AccuracyRow], sources: Sequence[str]) -> None:
    times = [time for row in rows for time in (row.predicted, row.measured)]
    low, high = min(times) / 1.6, max(times) * 1.6
    line = np.array([low, high])
    for width, colour in _BANDS:
        ax.fill_between(line, line * (1 - width), line * (1 + width), color=colour, linewidth=0, zorder=0)
    ax.plot(line, line, color=INK, linewidth=1.2, zorder=1)
    for source in sources:
        chosen = [row for row in rows if row.source == source]
        colour, marker = style_of(source, sources)
        ax.scatter(
            [r.measured for r in chosen], [r.predicted for r in chosen], s=46 if len(rows) < 150 else 22,
            color=colour, marker=marker, edgecolors="white", linewidths=0.6, label=plain(source, 24), zorder=3,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: format_time(value))
        axis.set_minor_formatter(lambda value, _: "")
    ax.set_xlabel("measured step time")
    ax.set_ylabel("predicted step time")
    ax.grid(color="white", linewidth=0.8)
    _label(ax, rows)


def _label(ax: Axes, rows: Sequence[AccuracyRow]) -> None:
    """Write model names beside the points where they cover neither a point nor another name."""
    points = ax.transData.transform([(row.measured, row.predicted) for row in rows])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points]
    frame = ax.get_window_extent()
    worst_first = sorted(range(len(rows)), key=lambda i: (-abs(rows[i].error), rows[i].row_id))
    for index in worst_first[:_MOST_LABELS]:
        words = plain(rows[index].model, 24)
        x, y = points[index]
        width, height = 6.9 * len(words), 14.0
        for side, dx, dy in (("left", 8, 0), ("right", -8, 0), ("center", 0, 15), ("center", 0, -15)):
            left = x + dx - width * {"left": 0.0, "center": 0.5, "right": 1.0}[side]
            box = Bbox.from_bounds(left, y + dy - height / 2, width, height)
            if words and box.count_overlaps(taken) == 0 and _inside(box, frame):
                taken.append(box)
                ax.annotate(
                    words, (rows[index].measured, rows[index].predicted), xytext=(dx * 72 / DPI, dy * 72 / DPI),
                    textcoords="offset points", fontsize=8.5, color=QUIET, ha=side, va="center",
                )  # fmt: skip
                break


def _inside(box: Bbox, frame: Bbox) -> bool:
    return bool(box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1)


def _draw_errors(ax: Axes, rows: Sequence[AccuracyRow], sources: Sequence[str]) -> None:
    """Draw a bar a row, by source and error; errors beyond 100 % end at the edge."""
    order = sorted(rows, key=lambda row: (sources.index(row.source), row.error, row.row_id))
    places = np.arange(len(order))
    errors = np.clip([row.error for row in order], -_CLIP, _CLIP)
    limit = min(_CLIP, max(0.4, 1.1 * float(np.abs(errors).max())))
    for width, colour in _BANDS:
        ax.axvspan(-width, width, color=colour, linewidth=0, zorder=0)
    ax.barh(
        places,
        errors,
        height=0.8 if len(order) <= _MOST_NAMED_BARS else 1.0,
        color=[style_of(row.source, sources)[0] for row in order],
        zorder=2,
    )
    ax.axvline(0.0, color=INK, linewidth=1.2, zorder=3)
    ax.set(xlim=(-limit, limit), ylim=(len(order) - 0.4, -0.6), xlabel="error of the predicted step time")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    if len(order) <= _MOST_NAMED_BARS:
        _name_bars(ax, order)
    else:
        _name_sources(ax, [row.source for row in order])


def _name_bars(ax: Axes, order: Sequence[AccuracyRow]) -> None:
    """Write the row beside the zero line, on the side where there is no bar."""
    size = min(10.0, 0.5 * pixels(ax)[1] / len(order))
    for place, row in enumerate(order):
        side = "right" if row.error >= 0 else "left"
        offset = -4 if row.error >= 0 else 4
        ax.annotate(
            plain(row.row_id, 34), (0.0, place), xytext=(offset, 0), textcoords="offset points", ha=side, va="center",
            fontsize=size, color=INK, zorder=4,
        )  # fmt: skip


def _name_sources(ax: Axes, sources: Sequence[str]) -> None:
    """Write each source beside the middle of its bars, or as far below as the name above it needs."""
    line = _LINE * len(sources) / pixels(ax)[1]
    marks: dict[float, str] = {}
    for source in dict.fromkeys(sources):
        middle = sources.index(source) + (sources.count(source) - 1) / 2
        place = max(middle, max(marks, default=-line) + line)
        if place - middle <= 2 * line:
            marks[place] = plain(source, 20)
    ax.set_yticks(list(marks), list(marks.values()), fontsize=9)
    ax.tick_params(axis="y", length=0)
