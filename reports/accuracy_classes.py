"""Picture of accuracy by class: how far predictions are off for small and large runs, or with each technique."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from reports.accuracy import _BANDS, _CLIP
from reports.class_rows import MOST_CLASSES, class_axes, name_rows, write_columns
from reports.figure import INK, header, sheet
from reports.palette import SERIES

_LEAST = 0.4  # to which errors the axis reaches at least
_SPREAD = 0.32  # of a class's height, over which its points lie
_COLUMNS = ((0.06, "rows"), (0.22, "mean |error|"), (0.56, "median"), (0.79, "bias"))  # of the room on the right


def draw_errors_by_class(classes: Mapping[str, Sequence[float]], path: Path | str, *, title: str) -> None:
    """Draw the relative errors of every class as points, with their median and the middle half of them.

    Parameters
    ----------
    classes
        Relative errors, predicted / measured - 1, by class, in the order in which they are drawn.

    Raises
    ------
    ValueError
        Where no class has an error, or ``path`` ends in neither .png nor .svg.
    """
    kept = {name: [error for error in errors if isfinite(error)] for name, errors in classes.items()}
    drawn = {name: np.array(errors) for name, errors in kept.items() if errors}
    if not drawn:
        raise ValueError(f"a picture of errors needs a class with one, met {len(classes)} classes")
    names = sorted(drawn, key=lambda name: -len(drawn[name]))[:MOST_CLASSES]
    names = [name for name in drawn if name in names]
    with sheet(path) as figure:
        header(
            figure,
            title,
            "each point is a measured run; line: the median, bar: the middle half; shaded: within 10 % and within 30 %",
        )
        ax = class_axes(figure)
        _frame(ax, names, min(_CLIP, max(_LEAST, *(1.1 * float(np.abs(errors).max()) for errors in drawn.values()))))
        for place, name in enumerate(names):
            _draw_class(ax, place, drawn[name])


def _frame(ax: Axes, names: Sequence[str], limit: float) -> None:
    for width, colour in _BANDS:
        ax.axvspan(-width, width, color=colour, linewidth=0, zorder=0)
    ax.axvline(0.0, color=INK, linewidth=1.2, zorder=1)
    ax.set(xlim=(-limit, limit), ylim=(len(names) - 0.4, -0.9), xlabel="error of the predicted step time")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    name_rows(ax, names, _COLUMNS)


def _draw_class(ax: Axes, place: int, errors: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
    shown = np.clip(errors, -_CLIP, _CLIP)
    rank = np.argsort(np.argsort(shown, kind="stable"), kind="stable")
    height = place + _SPREAD * (2 * (rank * 0.618034 % 1) - 1)  # spread evenly, and the same each time
    colour = SERIES[0]
    ax.scatter(shown, height, s=20 if len(errors) < 400 else 9, color=colour, alpha=0.45, linewidths=0, zorder=2)
    low, middle, high = np.quantile(shown, (0.25, 0.5, 0.75))
    ax.plot([low, high], [place, place], color=INK, linewidth=5, alpha=0.35, solid_capstyle="butt", zorder=3)
    ax.plot([middle, middle], [place - 0.36, place + 0.36], color=INK, linewidth=2.4, zorder=4)
    size = np.abs(errors)
    figures = [f"{len(errors)}", f"{size.mean():.1%}", f"{np.median(size):.1%}", f"{errors.mean():+.1%}"]
    write_columns(ax, place, _COLUMNS, figures, INK)
