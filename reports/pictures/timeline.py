"""Pictures of timelines: one step as lanes of bars, and a predicted step above a measured one.

A waterfall below the comparison leads from the predicted to the measured step time, one bar per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.difference import WAITING, Difference, DifferenceRow, difference
from meshwise.reports.lanes import bars, row_of
from meshwise.reports.palette import CHUNKED, IDLE, KIND_COLOUR, shade
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    QUIET,
    WIDTH,
    axes,
    header,
    key_patch,
    pixel_height,
    sheet,
    time_unit,
)
from meshwise.reports.pictures.panel import Box, Panel, Window, draw_panel, typical
from meshwise.simulator.program import TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_WATERFALL_BARS = 7
"""Number of operations with their own bar; all others share one."""
_ROOM = 0.03  # of the axis beyond the bars
_AXIS = 50  # pixels below the bars


def waterfall_pixels(found: Difference) -> int:
    """Return the height of a waterfall in pixels."""
    return 30 * (len(waterfall_bars(found)) + 2) + _AXIS


def waterfall_bars(found: Difference) -> list[tuple[str, str, str, float]]:
    """Return (kind, operation, verdict, cost) of every bar, from the top; the costs add up to the error.

    >>> waterfall_bars(Difference(1.0, 1.0, ()))
    []
    """
    rows = [row for row in found.operations() if row.cost]
    shown = [(row.kind, row.operation, _words(row), row.cost) for row in rows[:MOST_WATERFALL_BARS]]
    rest = sum(row.cost for row in rows[MOST_WATERFALL_BARS:])
    return (
        [*shown, ("", f"{len(rows) - MOST_WATERFALL_BARS} others", "", rest)] if rows[MOST_WATERFALL_BARS:] else shown
    )


def _words(row: DifferenceRow) -> str:
    if row.verdict in ("not predicted", "did not happen") or row.kind == WAITING:
        return row.verdict if row.kind != WAITING else ""
    return f"{format_time(row.predicted.time)} predicted, {format_time(row.measured.time)} measured"


def draw_waterfall(figure: Figure, found: Difference, box: Box) -> None:
    """Draw into ``box`` how the errors of operations add up to the error of the step."""
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


_LEFT, _TOP, _BOTTOM = 216, 142, 54  # pixels around the panels
_INNER = WIDTH - _LEFT - 24
_BETWEEN, _BESIDE = 62, 26  # pixels between panels
_TALLEST = 130  # pixels of a lane
_READABLE, _VISIBLE = 16.0, 4.0  # pixels of a forward bar that can hold a number, and that can be seen
_READABLE_LANE = 18  # pixels of a lane whose bars can hold numbers
_OVERVIEW = 0.4  # of the height, where close-ups are drawn below
_MAGNIFIES = 1.25  # what a close-up does at least; below that numbers fit without it


def draw_timeline(timeline: Timeline, path: Path | str, *, title: str = "") -> None:
    """Draw one step, one lane per rank class; where bars are too thin, close-ups of its start and end below.

    Raises
    ------
    ValueError
        Where the timeline has no spans or ``path`` ends in neither .png nor .svg.
    """
    _require_spans(timeline)
    windows = close_ups(timeline)
    room = HEIGHT - _TOP - _BOTTOM
    room = room if windows else min(room, _TALLEST * len(timeline.rank_classes))
    with sheet(path, _TOP + room + _BOTTOM) as figure:
        header(figure, title or "One training step", facts(timeline))
        height = int(_OVERVIEW * room) if windows else room
        box = Box(_LEFT, _TOP, _INNER, height)
        whole = draw_panel(figure, timeline, Window(0.0, timeline.length), box, numbered=not windows)
        panels = [whole]
        for index, window in enumerate(windows):
            whole.ax.set_xlabel("")
            panels.append(_draw_close_up(figure, whole, timeline, window, index))
        _legend(figure, (timeline,), panels)


def draw_comparison(
    predicted: Timeline, measured: Timeline, path: Path | str, *, step_time: float | None = None
) -> None:
    """Draw ``predicted`` above ``measured`` on one time axis, and a waterfall of their differences below.

    Parameters
    ----------
    step_time
        Seconds of a step measured without the profiler, which slows the step that is drawn.

    Raises
    ------
    ValueError
        Where a timeline has no spans, the two are not of the same ranks, or ``path`` ends in neither .png nor .svg.
    """
    _require_spans(predicted)
    _require_spans(measured)
    found = difference(predicted, measured)
    below = waterfall_pixels(found)
    window = Window(0.0, max(predicted.length, measured.length))
    heights = _split(len(predicted.rank_classes), len(measured.rank_classes))
    with sheet(path, _TOP + sum(heights) + 2 * _BETWEEN + 20 + below + _BOTTOM) as figure:
        timed = measured.step_time if step_time is None else step_time
        steps = f"{format_time(predicted.step_time)} predicted, {format_time(timed)} measured"
        bubbles = f"bubble {predicted.bubble:.1%} predicted, {measured.bubble:.1%} measured"
        drawn = f"; the measured step below ran under the profiler, {format_time(measured.step_time)}"
        header(
            figure,
            f"Step {steps}: error {predicted.step_time / timed - 1:+.1%}",
            bubbles + (drawn if step_time is not None else ""),
        )
        panels: list[Panel] = []
        top = _TOP + 20
        for timeline, name, height in zip((predicted, measured), ("predicted", "measured"), heights, strict=True):
            panel = draw_panel(figure, timeline, window, Box(_LEFT, top, _INNER, height))
            panel.ax.axvline(timeline.length, color=INK, linewidth=1.2, clip_on=False)
            panel.ax.set_title(f"{name} ({timeline.engine})", loc="left", fontsize=12, fontweight="bold", pad=5)
            panels.append(panel)
            top += height + _BETWEEN
        panels[0].ax.set_xlabel("")
        draw_waterfall(figure, found, Box(_LEFT, top + 14, _INNER, below))
        _legend(figure, (predicted, measured), panels)


def facts(timeline: Timeline) -> str:
    """Return a one-line summary of a timeline: step time, bubble, busiest link, ranks and source."""
    ranks = sum(len(c.ranks) for c in timeline.rank_classes)
    busiest = timeline.bottleneck
    link = f", busiest link {busiest.name} ({busiest.utilisation:.0%})" if busiest else ""
    return (
        f"step {format_time(timeline.step_time)}{_steady(timeline)}, bubble {timeline.bubble:.1%}{link}, "
        f"{ranks:,} {'rank' if ranks == 1 else 'ranks'}, {timeline.source} ({timeline.engine.replace('_', ' ')})"
    )


def _steady(timeline: Timeline) -> str:
    """Return a note on which part of a run is shown, empty for one whole step."""
    if not timeline.begin:
        return ""
    return " in the steady state" + (f" ({timeline.steps} steps shown)" if timeline.steps > 1 else "")


def close_ups(timeline: Timeline) -> tuple[Window, ...]:
    """Return windows of the first and the last part of the step, or nothing where the whole is readable.

    In a window a forward pass is wide enough for its number, or, where lanes are too low for numbers, wide enough to
    be seen.
    """
    computing = (span for span in timeline.spans if span.kind.computes)
    passes = [b for b in bars(computing, absorb=True) if b.microbatch >= 0]
    forward = typical(b.end - b.start for b in passes if b.kind is TaskKind.FORWARD)
    lane = (HEIGHT - _TOP - _BOTTOM) * (1 - _OVERVIEW) / len(timeline.rank_classes)
    length = forward / (_READABLE if lane >= _READABLE_LANE else _VISIBLE) * _INNER / 2
    if not passes or 2 * length * _MAGNIFIES >= timeline.length:
        return ()
    start = min(b.start for b in passes)
    start = start if start > length / 6 else 0.0
    last = max(b.end for b in passes)
    # all that follows the last pass, where that leaves room for passes too
    end = timeline.length if timeline.length - last <= length / 2 else last + length / 6
    return Window(start, start + length), Window(end - length, end)


def _draw_close_up(figure: Figure, whole: Panel, timeline: Timeline, window: Window, index: int) -> Panel:
    """Draw one of two windows below the whole step, and mark its extent in the whole."""
    from matplotlib.patches import Rectangle

    width = (_INNER - _BESIDE) // 2
    top = _TOP + whole.lanes.pixels * len(whole.lanes.labels) + _BETWEEN
    height = pixel_height(figure) - _BOTTOM - top
    panel = draw_panel(figure, timeline, window, Box(_LEFT + index * (width + _BESIDE), top, width, height))
    ends = "first" if index == 0 else "last" if window.end == timeline.length else "last passes,"
    name = f"{ends} {format_time(window.duration)}"
    panel.ax.set_title(name, loc="left", fontsize=12, fontweight="bold", pad=5)
    if index:
        panel.ax.set_yticks([])
    frame = Rectangle((window.start, 0), window.duration, len(whole.lanes.labels))
    frame.set(fill=False, edgecolor=INK, linewidth=1.4, clip_on=False)
    whole.ax.add_patch(frame)
    return panel


def _require_spans(timeline: Timeline) -> None:
    if not timeline.spans or timeline.step_time <= 0:
        raise ValueError(
            f"a timeline picture needs spans and a step time above 0, met {len(timeline.spans)} spans "
            f"and {timeline.step_time} s"
        )


def _split(above: int, below: int) -> tuple[int, int]:
    """Return heights of two panels in proportion to their lanes, neither below a quarter."""
    room = min(HEIGHT - _TOP - _BETWEEN - _BOTTOM - 20, _TALLEST * (above + below))
    first = int(min(0.75, max(0.25, above / (above + below))) * room)
    return first, room - first


def _legend(figure: Figure, timelines: Sequence[Timeline], panels: Sequence[Panel]) -> None:
    """Write what the colours mean, in one line below the header."""
    from matplotlib.legend_handler import HandlerTuple

    present = {span.kind for timeline in timelines for span in timeline.spans}
    rows = {row for panel in panels for row in panel.lanes.rows}
    chunks = max(len(c.stages) for timeline in timelines for c in timeline.rank_classes)
    handles: list[Any] = []
    labels: list[str] = []
    for kind in TaskKind:
        if kind in present and row_of(kind) in rows:
            several = chunks if kind in CHUNKED else 1
            handles.append(tuple(key_patch(color=shade(kind, i, several)) for i in range(several)))
            shown = f" (chunks 0{',' if several == 2 else ' to'} {several - 1})" if kind is TaskKind.FORWARD else ""
            labels.append(kind.value.replace("communication", "comm.") + (shown if several > 1 else ""))
    handles.append((key_patch(color=IDLE),))
    labels.append("idle")
    if panels[0].shares:
        note = "upper panel: height, in strips strength, is share of time"
        figure.text(0.985, 1 - 70 / pixel_height(figure), note, fontsize=12, color=QUIET, ha="right", va="center")
    figure.legend(
        handles, labels, loc="center left", bbox_to_anchor=(0.012, 1 - 106 / pixel_height(figure)), ncols=len(labels),
        fontsize=11, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, columnspacing=1.4, handlelength=1.8,
        borderpad=0.3,
    )  # fmt: skip
