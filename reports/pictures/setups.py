"""Picture of the machines that a run may have: its time against its money, and those that no other beats as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.document import clean_text
from meshwise.reports.palette import SERIES, blend
from meshwise.reports.pictures.figure import GRID, HEIGHT, INK, QUIET, WIDTH, add_axes, header, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = Mapping[str, Any]

_LEFT, _TOP, _RIGHT, _BOTTOM = 120, 130, 60, 90  # pixels around the axes
_DOMINATED = "#B4B4B4"
_MACHINE_STYLE = {"on demand": (SERIES[0], "o"), "spot": (SERIES[1], "s")}
_TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (2.0, 1.0, "s"))
_LIGHTENING = 0.5
"""Of the colour of setups that are on the front for their devices or their memory, and not on the line."""
_LABEL_SIZE, _LABEL_OFFSET = (0.15, 0.04), 0.012
"""Width and height of a label, and its distance from its point, as fractions of the axes."""


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
    line = _list_line(xs, ys)
    for row, (x, y, point) in enumerate(zip(xs, ys, points, strict=True)):
        colour = _MACHINE_STYLE[point["machines"]][0] if row in line else _DOMINATED
        low, high = (end / point["seconds"] for end in point["seconds_interval"])
        # money is in proportion to time: a run that takes longer also costs more
        ends = (y * low, y * high) if has_money else (y, y)
        width = 3.0 if row in line else 1.2
        ax.plot((x * low, x * high), ends, color=colour, alpha=0.4, linewidth=width, solid_capstyle="round", zorder=2)
    ax.plot(
        [xs[row] for row in line], [ys[row] for row in line], drawstyle="steps-post", color=INK, linewidth=1.4,
        zorder=3, label="none is both faster and cheaper" if has_money else "none is faster on fewer devices",
    )  # fmt: skip
    _draw_markers(ax, xs, ys, points, line)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _label_points(ax, xs, ys, points, line, has_batches=len({point["global_batch"] for point in points}) > 1)
    for axis, values, is_money in ((ax.xaxis, xs, False), (ax.yaxis, ys, has_money)):
        axis.set_major_formatter(_format_money if is_money else _format_number)
        axis.set_minor_formatter(_format_sparse(values, is_money=is_money))
        axis.set_tick_params(which="both", labelsize=12)
    ax.set_xlabel(f"time of the run ({name})", fontsize=13)
    ax.set_ylabel("money (US dollars)" if has_money else "devices", fontsize=13)
    ax.grid(color=GRID, linewidth=0.8, which="both", alpha=0.7)
    ax.set_axisbelow(True)
    # above the axes beside the title, where it covers no point and no name
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=2, fontsize=11, frameon=False)


def _draw_markers(ax: Axes, xs: list[float], ys: list[float], points: Sequence[Data], line: list[int]) -> None:
    """Draw the points by machine and by what beats them; hollow where that is not proven."""
    for machines, (colour, shape) in _MACHINE_STYLE.items():
        kinds: dict[str, tuple[str, list[int]]] = {
            machines: (colour, line),
            f"{machines}, fewer devices or less memory": (
                blend(colour, "#FFFFFF", _LIGHTENING),
                [row for row, point in enumerate(points) if point["on_front"] and row not in line],
            ),
            f"{machines}, beaten in everything": (
                _DOMINATED,
                [row for row, point in enumerate(points) if not point["on_front"] and row not in line],
            ),
        }
        for order, (words, (own, rows)) in enumerate(kinds.items()):
            for is_proven in (True, False):
                chosen = [
                    row for row in rows if points[row]["machines"] == machines and points[row]["proven"] is is_proven
                ]
                if chosen:
                    ax.plot(
                        [xs[row] for row in chosen], [ys[row] for row in chosen], shape, color=own, linestyle="none",
                        markersize=13 if order == 0 else 9, markerfacecolor=own if is_proven else "white",
                        markeredgewidth=2.0, zorder=6 - order, label=words if is_proven else f"{words}, not proven",
                    )  # fmt: skip


def _label_points(
    ax: Axes, xs: list[float], ys: list[float], points: Sequence[Data], line: list[int], *, has_batches: bool
) -> None:
    """Write the sizes of setups beside their points, those on the line first, where no label or marker is met."""
    from matplotlib.patheffects import withStroke

    places = [ax.transLimits.transform(ax.transScale.transform(place)) for place in zip(xs, ys, strict=True)]
    taken: list[tuple[float, float]] = []
    order = sorted(range(len(points)), key=lambda row: (row not in line, not points[row]["on_front"]))
    for row in order:
        x, y = places[row]
        start = x + _LABEL_OFFSET, y + _LABEL_OFFSET
        meets_label = any(abs(start[0] - a) < _LABEL_SIZE[0] and abs(start[1] - b) < _LABEL_SIZE[1] for a, b in taken)
        meets_marker = any(
            -0.01 < a - start[0] < _LABEL_SIZE[0] and abs(b - start[1]) < _LABEL_SIZE[1] / 2
            for other, (a, b) in enumerate(places)
            if other != row
        )
        if meets_label or (meets_marker and row not in line):
            continue
        taken.append(start)
        point = points[row]
        words = f"{point['nodes']:,} node{'' if point['nodes'] == 1 else 's'}"
        words += f", batch {point['global_batch']:,}" if has_batches else ""
        is_high = row in line
        ax.annotate(
            clean_text(words, 60), (xs[row], ys[row]), xytext=(12, 9), textcoords="offset points",
            fontsize=13 if is_high else 11, color=INK if is_high else QUIET, zorder=8,
            fontweight="bold" if is_high else "normal", path_effects=[withStroke(linewidth=3.5, foreground="white")],
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
    return f"${value:,.2f}" if value < 10 else f"${value:,.10g}"


def _format_sparse(values: Sequence[float], *, is_money: bool) -> Any:
    """Return a formatter of the ticks between powers of ten: all of a short axis, those at 2 and 5 of a long one."""
    digits = "235" if max(values) > 5 * min(values) else "23456789"

    def format_tick(value: float, _: Any = None) -> str:
        is_shown = f"{value:e}"[0] in digits
        return (_format_money if is_money else _format_number)(value) if is_shown else ""

    return format_tick
