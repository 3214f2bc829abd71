"""Picture of the machines that a run may have: its time against its money, and those that no other beats as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.document import clean_text
from meshwise.reports.palette import SERIES
from meshwise.reports.pictures.figure import GRID, HEIGHT, INK, QUIET, WIDTH, add_axes, header, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = Mapping[str, Any]

_LEFT, _TOP, _RIGHT, _BOTTOM = 120, 130, 60, 90  # pixels around the axes
_DOMINATED = "#B4B4B4"
_MACHINE_STYLE = {"on demand": (SERIES[0], "o"), "spot": (SERIES[1], "s")}
_TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (2.0, 1.0, "s"))
_LABEL_DISTANCE = (0.16, 0.045)
"""Fractions of the axes within which two labels would run into each other."""


def draw_setups(points: Sequence[Data], path: Path | str, *, title: str = "", facts: str = "") -> None:
    """Draw the setups of a choice, as `meshwise search --front --json` has them.

    Parameters
    ----------
    points
        By rising ``seconds``, with ``devices``, ``cost`` in US dollars or ``None``, ``machines``, ``nodes``,
        ``global_batch``, ``on_front``, ``proven`` and ``seconds_interval``. The height is the money; the number of
        devices where one has no price.

    Raises
    ------
    ValueError
        Where there is no point, or ``path`` ends in neither .png nor .svg.
    """
    if not points:
        raise ValueError("a picture of setups needs at least one with a plan, met none")
    with open_sheet(path) as figure:
        header(figure, title or "What the run takes", facts)
        ax = add_axes(figure, _LEFT, _TOP, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)
        _draw_points(ax, points)


def _draw_points(ax: Axes, points: Sequence[Data]) -> None:
    has_money = all(point["cost"] is not None for point in points)
    unit, name = next((unit, name) for least, unit, name in (*_TIME_UNITS, (0.0, 1e-3, "ms")) if _span(points) >= least)
    xs = [point["seconds"] / unit for point in points]
    ys = [point["cost"] if has_money else float(point["devices"]) for point in points]
    for x, y, point in zip(xs, ys, points, strict=True):
        colour = _MACHINE_STYLE[point["machines"]][0] if point["on_front"] else _DOMINATED
        low, high = (end / point["seconds"] for end in point["seconds_interval"])
        # money is in proportion to time: a run that takes longer also costs more
        ends = (y * low, y * high) if has_money else (y, y)
        ax.plot((x * low, x * high), ends, color=colour, alpha=0.45, linewidth=2.2, solid_capstyle="round", zorder=2)
    line = _list_line(xs, ys)
    ax.plot(
        [xs[row] for row in line], [ys[row] for row in line], drawstyle="steps-post", color=INK, linewidth=1.4,
        zorder=3, label="no setup is faster and cheaper" if has_money else "no setup is faster on fewer devices",
    )  # fmt: skip
    _draw_markers(ax, xs, ys, points)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _label_points(ax, xs, ys, points, has_batches=len({point["global_batch"] for point in points}) > 1)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(_format_money if has_money and axis is ax.yaxis else _format_number)
        axis.set_minor_formatter(_format_sparse(has_money and axis is ax.yaxis))
    ax.set_xlabel(f"time of the run ({name})", fontsize=13)
    ax.set_ylabel("money (US dollars)" if has_money else "devices", fontsize=13)
    ax.grid(color=GRID, linewidth=0.8, which="both", alpha=0.7)
    ax.set_axisbelow(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.075), ncols=5, fontsize=12)


def _draw_markers(ax: Axes, xs: list[float], ys: list[float], points: Sequence[Data]) -> None:
    """Draw the points by machine: filled where proven, grey where another setup beats them."""
    for machines, (colour, shape) in _MACHINE_STYLE.items():
        for is_on_front in (False, True):
            rows = [
                row
                for row, point in enumerate(points)
                if point["machines"] == machines and point["on_front"] is is_on_front
            ]
            for is_proven in (True, False):
                chosen = [row for row in rows if points[row]["proven"] is is_proven]
                if not chosen:
                    continue
                own = colour if is_on_front else _DOMINATED
                words = machines if is_on_front else f"{machines}, beaten by another"
                ax.plot(
                    [xs[row] for row in chosen], [ys[row] for row in chosen], shape, color=own, markersize=11,
                    markerfacecolor=own if is_proven else "white", markeredgewidth=2.0, linestyle="none",
                    zorder=5 if is_on_front else 4, label=words if is_proven else f"{words}, not proven",
                )  # fmt: skip


def _label_points(
    ax: Axes, xs: list[float], ys: list[float], points: Sequence[Data], *, has_batches: bool
) -> None:
    """Write the sizes of setups beside their points, those on the front first, as long as labels do not meet."""
    to_axes = ax.transLimits
    places: list[tuple[float, float]] = []
    order = sorted(range(len(points)), key=lambda row: not points[row]["on_front"])
    for row in order:
        x, y = to_axes.transform(ax.transScale.transform((xs[row], ys[row])))
        if any(abs(x - a) < _LABEL_DISTANCE[0] and abs(y - b) < _LABEL_DISTANCE[1] for a, b in places):
            continue
        places.append((x, y))
        point = points[row]
        words = f"{point['nodes']:,} node{'' if point['nodes'] == 1 else 's'}"
        words += f", batch {point['global_batch']:,}" if has_batches else ""
        ax.annotate(
            clean_text(words, 60), (xs[row], ys[row]), xytext=(11, 9), textcoords="offset points", fontsize=12,
            color=INK if point["on_front"] else QUIET,
        )  # fmt: skip


def _list_line(xs: list[float], ys: list[float]) -> list[int]:
    """Return the rows of points that no other beats in both coordinates, from the left."""
    rows: list[int] = []
    for row in sorted(range(len(xs)), key=lambda row: (xs[row], ys[row])):
        if not rows or ys[row] < ys[rows[-1]]:
            rows.append(row)
    return rows


def _span(points: Sequence[Data]) -> float:
    return min(float(point["seconds"]) for point in points)


def _format_number(value: float, _: Any = None) -> str:
    return f"{value:,.10g}"


def _format_money(value: float, _: Any = None) -> str:
    return f"${value:,.10g}"


def _format_sparse(is_money: bool) -> Any:
    """Return a formatter of the ticks between powers of ten: those at 2 and 5 alone."""

    def format_tick(value: float, _: Any = None) -> str:
        first_digit = f"{value:e}"[0]
        return (_format_money if is_money else _format_number)(value) if first_digit in "25" else ""

    return format_tick
