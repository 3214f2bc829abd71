"""What leads from a predicted step to the measured one: a bar an operation, each begun where the last one ended."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.difference import WAITING, Difference, DifferenceRow
from reports.figure import GRID, INK, QUIET, axes, time_unit
from reports.palette import IDLE, KIND_COLOUR
from reports.panel import Box
from simulator.program import TaskKind
from simulator.units import format_time

MOST = 7
"""Operations that have a bar of their own; all others share one."""
_ROOM = 0.03  # of the axis beyond the bars
_AXIS = 50  # pixels below the bars


def waterfall_pixels(found: Difference) -> int:
    """Return how high a waterfall is."""
    return 30 * (len(waterfall_bars(found)) + 2) + _AXIS


def waterfall_bars(found: Difference) -> list[tuple[str, str, str, float]]:
    """Return (kind, operation, verdict, cost) of what has a bar, from the top; the costs add up to the error.

    >>> waterfall_bars(Difference(1.0, 1.0, ()))
    []
    """
    rows = [row for row in found.operations() if row.cost]
    shown = [(row.kind, row.operation, _words(row), row.cost) for row in rows[:MOST]]
    rest = sum(row.cost for row in rows[MOST:])
    return [*shown, ("", f"{len(rows) - MOST} others", "", rest)] if rows[MOST:] else shown


def _words(row: DifferenceRow) -> str:
    if row.verdict in ("not predicted", "did not happen") or row.kind == WAITING:
        return row.verdict if row.kind != WAITING else ""
    return f"{format_time(row.predicted.time)} predicted, {format_time(row.measured.time)} measured"


def draw_waterfall(figure: Figure, found: Difference, box: Box) -> None:
    """Draw into ``box`` how the operations that were mispredicted add up to the error of the step."""
    shown = waterfall_bars(found)
    levels = [found.predicted]
    for *_, cost in shown:
        levels.append(levels[-1] + cost)
    ax = axes(figure, box.left, box.top, box.width, box.height - _AXIS)
    _prepare(ax, levels, len(shown))
    for place, name, level in ((0, "predicted", found.predicted), (len(shown) + 1, "measured", levels[-1])):
        ax.plot([level, level], [place - 0.4, place + 0.4], color=INK, linewidth=2.4)
        _write(ax, (level, level), place, f"{name} {format_time(level)}", bold=True)
    for place, ((kind, _, verdict, cost), level) in enumerate(zip(shown, levels, strict=False), 1):
        ax.barh(place, cost, left=level, height=0.72, color=_colour(kind), edgecolor=QUIET, linewidth=0.6)
        sign = "+" if cost > 0 else "-"
        words = f"{sign}{format_time(abs(cost))}" + (f"  ({verdict})" if verdict else "")
        _write(ax, (level, level + cost), place, words)
    for place, level in enumerate(levels):
        ax.plot([level, level], [place + 0.36, place + 0.64], color=QUIET, linewidth=0.8)
    ax.set_yticks(range(len(shown) + 2), ["", *(name for _, name, *_ in shown), ""])
    ax.set_title("what the prediction missed, on the mean rank", loc="left", fontsize=12, fontweight="bold", pad=5)


def _prepare(ax: Axes, levels: Sequence[float], count: int) -> None:
    low, high = min(levels), max(levels)
    width = max(high - low, high * 1e-3)
    ax.set_xlim(low - _ROOM * width, high + _ROOM * width)
    ax.set_ylim(count + 1.6, -0.6)
    unit, name = time_unit(high)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / unit:.6g}")
    ax.set_xlabel(f"step time ({name})")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def _write(ax: Axes, ends: tuple[float, float], place: int, words: str, *, bold: bool = False) -> None:
    """Write beside a bar, on the side that has more room."""
    low, high = ax.get_xlim()
    right = sum(ends) < low + high
    ax.annotate(
        words, (max(ends) if right else min(ends), place), xytext=(6 if right else -6, 0), textcoords="offset points",
        va="center", ha="left" if right else "right", fontsize=11, fontweight="bold" if bold else "normal", color=INK,
    )  # fmt: skip


def _colour(kind: str) -> str:
    return KIND_COLOUR[TaskKind(kind)] if kind in tuple(TaskKind) else IDLE
