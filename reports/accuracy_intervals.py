"""Picture of prediction intervals: what was measured over what was predicted, and between which bounds it was to be."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from reports.class_rows import MOST_CLASSES, class_axes, name_rows, write_columns
from reports.figure import INK, header, sheet
from reports.palette import SERIES

_COLUMNS = ((0.06, "runs"), (0.24, "inside"), (0.46, "interval"))  # of the room on the right
_TICKS = (0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_BAND, _OUTSIDE = "#D6E2EF", SERIES[1]


class IntervalRow(NamedTuple):
    """One run: ``measured`` over predicted, and ``factor``, the upper end of its interval over the prediction."""

    measured: float
    factor: float

    @property
    def inside(self) -> bool:
        """Whether the interval holds what was measured."""
        return 1 / self.factor <= self.measured <= self.factor


def draw_intervals(classes: Mapping[str, Sequence[IntervalRow]], path: Path | str, *, title: str, facts: str) -> None:
    """Draw the runs of every class, slowest against its prediction last, on the intervals that were to hold them.

    Raises
    ------
    ValueError
        Where no class has a run, or ``path`` ends in neither .png nor .svg.
    """
    drawn = {name: sorted(row for row in rows if isfinite(row.measured)) for name, rows in classes.items()}
    names = sorted((name for name in drawn if drawn[name]), key=lambda name: -len(drawn[name]))[:MOST_CLASSES]
    if not names:
        raise ValueError(f"a picture of intervals needs a class with a run, met {len(classes)} classes")
    names = [name for name in drawn if name in names]
    with sheet(path) as figure:
        header(figure, title, facts)
        ax = class_axes(figure)
        _frame(ax, names, max(1.5, *(1.05 * max(*row, 1 / row.measured) for name in names for row in drawn[name])))
        for place, name in enumerate(names):
            _draw_class(ax, place, drawn[name])


def _frame(ax: Axes, names: Sequence[str], limit: float) -> None:
    ax.axvline(1.0, color=INK, linewidth=1.2, zorder=2)
    ax.set(xscale="log", xlim=(1 / limit, limit), ylim=(len(names) - 0.4, -0.9))
    ax.set_xlabel("measured step time over predicted")
    ticks = [tick for tick in _TICKS if 1 / limit <= tick <= limit]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    name_rows(ax, names, _COLUMNS)


def _draw_class(ax: Axes, place: int, rows: Sequence[IntervalRow]) -> None:
    """Draw a class: points from the top to the bottom of its band in order of what was measured."""
    height = place + 0.72 * ((np.arange(len(rows)) + 0.5) / len(rows) - 0.5)
    factors = np.array([row.factor for row in rows])
    edges = np.repeat(np.linspace(place - 0.4, place + 0.4, len(rows) + 1), 2)[1:-1]
    ax.fill_betweenx(edges, np.repeat(1 / factors, 2), np.repeat(factors, 2), color=_BAND, linewidth=0, zorder=1)
    colours = [SERIES[0] if row.inside else _OUTSIDE for row in rows]
    ax.scatter([row.measured for row in rows], height, s=20, color=colours, linewidths=0, zorder=3)
    inside = sum(row.inside for row in rows) / len(rows)
    middle = sorted(factors)[len(rows) // 2]
    write_columns(ax, place, _COLUMNS, [f"{len(rows)}", f"{inside:.0%}", f"x {1 / middle:.2f} to {middle:.2f}"], INK)
