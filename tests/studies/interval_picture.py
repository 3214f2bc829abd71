"""Picture of prediction intervals: the runs of every class, and whether they lie inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.reports.palette import SERIES
from meshwise.reports.pictures.accuracy import MAX_CLASSES, add_class_axes, name_rows, write_columns
from meshwise.reports.pictures.figure import INK, header, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INTERVAL_COLUMNS = ((0.06, "runs"), (0.24, "inside"), (0.46, "width"))  # of the room on the right
_TICKS = (0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_BAND, _OUTSIDE_COLOUR = "#D6E2EF", SERIES[1]


class IntervalRow(NamedTuple):
    """One run: measured over predicted time, and ``factor``, the upper end of its interval over the prediction."""

    measured: float
    factor: float

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return 1 / self.factor <= self.measured <= self.factor


def draw_intervals(classes: Mapping[str, Sequence[IntervalRow]], path: Path | str, *, title: str, facts: str) -> None:
    """Draw the runs of every class over their prediction intervals, in rising order of measured over predicted time.

    Raises
    ------
    ValueError
        Where no class has a run, or ``path`` ends in neither .png nor .svg.
    """
    class_rows = {name: sorted(row for row in rows if isfinite(row.measured)) for name, rows in classes.items()}
    names = sorted((name for name in class_rows if class_rows[name]), key=lambda name: -len(class_rows[name]))[
        :MAX_CLASSES
    ]
    if not names:
        raise ValueError(f"a picture of intervals needs a class with a run, met {len(classes)} classes")
    names = [name for name in class_rows if name in names]
    with open_sheet(path) as figure:
        header(figure, title, facts)
        ax = add_class_axes(figure)
        _set_interval_axes(
            ax, names, max(1.5, *(1.05 * max(*row, 1 / row.measured) for name in names for row in class_rows[name]))
        )
        for place, name in enumerate(names):
            _draw_class_intervals(ax, place, class_rows[name])


def _set_interval_axes(ax: Axes, names: Sequence[str], limit: float) -> None:
    ax.axvline(1.0, color=INK, linewidth=1.2, zorder=2)
    ax.set(xscale="log", xlim=(1 / limit, limit), ylim=(len(names) - 0.4, -0.9))
    ax.set_xlabel("measured step time over predicted")
    ticks = [tick for tick in _TICKS if 1 / limit <= tick <= limit]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    name_rows(ax, names, _INTERVAL_COLUMNS)


def _draw_class_intervals(ax: Axes, place: int, rows: Sequence[IntervalRow]) -> None:
    """Draw a class: points from the top to the bottom of its band, in order of measured over predicted time."""
    height = place + 0.72 * ((np.arange(len(rows)) + 0.5) / len(rows) - 0.5)
    factors = np.array([row.factor for row in rows])
    edges = np.repeat(np.linspace(place - 0.4, place + 0.4, len(rows) + 1), 2)[1:-1]
    ax.fill_betweenx(edges, np.repeat(1 / factors, 2), np.repeat(factors, 2), color=_BAND, linewidth=0, zorder=1)
    colours = [SERIES[0] if row.inside else _OUTSIDE_COLOUR for row in rows]
    ax.scatter([row.measured for row in rows], height, s=20, color=colours, linewidths=0, zorder=3)
    inside = sum(row.inside for row in rows) / len(rows)
    middle = sorted(factors)[len(rows) // 2]
    write_columns(
        ax, place, _INTERVAL_COLUMNS, [f"{len(rows)}", f"{inside:.0%}", f"x {1 / middle:.2f} to {middle:.2f}"], INK
    )
