"""Pictures of timelines: one step as lanes of bars, and a predicted step above a measured one.

A waterfall below the comparison leads from the predicted to the measured step time, one bar per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.difference import WAITING, Difference, DifferenceRow, difference
from meshwise.reports.lanes import lane_row, merge_bars
from meshwise.reports.palette import CHUNKED, IDLE, KIND_COLOUR, shade_kind
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    QUIET,
    WIDTH,
    add_axes,
    choose_time_unit,
    figure_height,
    header,
    key_patch,
    open_sheet,
)
from meshwise.reports.pictures.panel import Box, Panel, Window, draw_panel, typical_duration
from meshwise.simulator.program import TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WATERFALL_BARS = 7
"""Number of operations with their own bar; all others share one."""
_AXIS_MARGIN = 0.03  # of the axis beyond the bars
_AXIS = 50  # pixels below the bars


def waterfall_height(step_difference: Difference) -> int:
    """Return the height of a waterfall in pixels."""
    return 30 * (len(list_waterfall_bars(step_difference)) + 2) + _AXIS


def list_waterfall_bars(step_difference: Difference) -> list[tuple[str, str, str, float]]:
    """Return (kind, operation, verdict, cost) of every bar, from the top; the costs add up to the error.

    >>> list_waterfall_bars(Difference(1.0, 1.0, ()))
    []
    """
    rows = [row for row in step_difference.operations() if row.cost]
    bar_rows = [(row.kind, row.operation, _format_verdict(row), row.cost) for row in rows[:MAX_WATERFALL_BARS]]
    if others := rows[MAX_WATERFALL_BARS:]:
        bar_rows.append(("", f"{len(others)} others", "", sum(row.cost for row in others)))
    return bar_rows


def _format_verdict(row: DifferenceRow) -> str:
    if row.kind == WAITING:
        return ""
    if row.verdict in ("not predicted", "did not happen"):
        return row.verdict
    return f"{format_time(row.predicted.time)} predicted, {format_time(row.measured.time)} measured"


def draw_waterfall(figure: Figure, step_difference: Difference, box: Box) -> None:
    """Draw into ``box`` how the errors of operations add up to the error of the step."""
    bar_rows = list_waterfall_bars(step_difference)
    levels = [step_difference.predicted]
    for *_, cost in bar_rows:
        levels.append(levels[-1] + cost)
    ax = add_axes(figure, box.left_edge, box.top, box.width, box.height - _AXIS)
    _prepare_axes(ax, levels, len(bar_rows))
    for place, name, level in ((0, "predicted", levels[0]), (len(bar_rows) + 1, "measured", levels[-1])):
        ax.plot([level, level], [place - 0.4, place + 0.4], color=INK, linewidth=2.4)
        _write_beside(ax, (level, level), place, f"{name} {format_time(level)}", bold=True)
    for place, ((kind, _, verdict, cost), level) in enumerate(zip(bar_rows, levels, strict=False), 1):
        ax.barh(place, cost, left=level, height=0.72, color=_bar_colour(kind), edgecolor=QUIET, linewidth=0.6)
        sign = "+" if cost > 0 else "-"
        words = f"{sign}{format_time(abs(cost))}" + (f"  ({verdict})" if verdict else "")
        _write_beside(ax, (level, level + cost), place, words)
    for place, level in enumerate(levels):
        ax.plot([level, level], [place + 0.36, place + 0.64], color=QUIET, linewidth=0.8)
    ax.set_yticks(range(len(bar_rows) + 2), ["", *(name for _, name, *_ in bar_rows), ""])
    ax.set_title("what the prediction missed, on the mean rank", loc="left", fontsize=12, fontweight="bold", pad=5)


def _prepare_axes(ax: Axes, levels: Sequence[float], count: int) -> None:
    low, high = min(levels), max(levels)
    width = max(high - low, high * 1e-3)
    ax.set_xlim(low - _AXIS_MARGIN * width, high + _AXIS_MARGIN * width)
    ax.set_ylim(count + 1.6, -0.6)
    unit, name = choose_time_unit(high)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / unit:.6g}")
    ax.set_xlabel(f"step time ({name})")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def _write_beside(ax: Axes, ends: tuple[float, float], place: int, words: str, *, bold: bool = False) -> None:
    """Write beside a bar, on the side that has more room."""
    low, high = ax.get_xlim()
    on_right = sum(ends) < low + high
    end, offset, side = (max(ends), 6, "left") if on_right else (min(ends), -6, "right")
    ax.annotate(
        words, (end, place), xytext=(offset, 0), textcoords="offset points",
        va="center", ha=side, fontsize=11, fontweight="bold" if bold else "normal", color=INK,
    )  # fmt: skip


def _bar_colour(kind: str) -> str:
    return KIND_COLOUR[TaskKind(kind)] if kind in tuple(TaskKind) else IDLE


_LEFT_MARGIN, _TOP, _BOTTOM = 216, 142, 54  # pixels around the panels
_PANEL_WIDTH = WIDTH - _LEFT_MARGIN - 24
_ROW_GAP, _COLUMN_GAP = 62, 26  # pixels between panels
_MAX_LANE = 130  # pixels of a lane
_READABLE_BAR, _VISIBLE_BAR = 16.0, 4.0  # pixels of a forward bar that can hold a number, and that can be seen
_READABLE_LANE = 18  # pixels of a lane whose bars can hold numbers
_OVERVIEW_SHARE = 0.4  # of the height, where close-ups are drawn below
_MIN_MAGNIFICATION = 1.25  # what a close-up does at least; below that numbers fit without it


def draw_timeline(timeline: Timeline, path: Path | str, *, title: str = "") -> None:
    """Draw one step, one lane per rank class; where bars are too thin, close-ups of its start and end below.

    Raises
    ------
    ValueError
        Where the timeline has no spans or ``path`` ends in neither .png nor .svg.
    """
    _require_spans(timeline)
    windows = choose_close_ups(timeline)
    room = HEIGHT - _TOP - _BOTTOM
    room = room if windows else min(room, _MAX_LANE * len(timeline.rank_classes))
    with open_sheet(path, _TOP + room + _BOTTOM) as figure:
        header(figure, title or "One training step", summarize_step(timeline))
        height = int(_OVERVIEW_SHARE * room) if windows else room
        box = Box(_LEFT_MARGIN, _TOP, _PANEL_WIDTH, height)
        overview = draw_panel(figure, timeline, Window(0.0, timeline.length), box, with_numbers=not windows)
        panels = [overview]
        for index, window in enumerate(windows):
            overview.ax.set_xlabel("")
            panels.append(_draw_close_up(figure, overview, timeline, window, index))
        _draw_legend(figure, (timeline,), panels)


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
    step_difference = difference(predicted, measured)
    waterfall_room = waterfall_height(step_difference)
    window = Window(0.0, max(predicted.length, measured.length))
    heights = _split_height(len(predicted.rank_classes), len(measured.rank_classes))
    with open_sheet(path, _TOP + sum(heights) + 2 * _ROW_GAP + 20 + waterfall_room + _BOTTOM) as figure:
        timed_step = measured.step_time if step_time is None else step_time
        steps = f"{format_time(predicted.step_time)} predicted, {format_time(timed_step)} measured"
        bubbles = f"bubble {predicted.bubble:.1%} predicted, {measured.bubble:.1%} measured"
        if step_time is not None:
            bubbles += f"; the measured step below ran under the profiler, {format_time(measured.step_time)}"
        header(figure, f"Step {steps}: error {predicted.step_time / timed_step - 1:+.1%}", bubbles)
        panels: list[Panel] = []
        top = _TOP + 20
        for timeline, name, height in zip((predicted, measured), ("predicted", "measured"), heights, strict=True):
            panel = draw_panel(figure, timeline, window, Box(_LEFT_MARGIN, top, _PANEL_WIDTH, height))
            panel.ax.axvline(timeline.length, color=INK, linewidth=1.2, clip_on=False)
            panel.ax.set_title(f"{name} ({timeline.engine})", loc="left", fontsize=12, fontweight="bold", pad=5)
            panels.append(panel)
            top += height + _ROW_GAP
        panels[0].ax.set_xlabel("")
        draw_waterfall(figure, step_difference, Box(_LEFT_MARGIN, top + 14, _PANEL_WIDTH, waterfall_room))
        _draw_legend(figure, (predicted, measured), panels)


def summarize_step(timeline: Timeline) -> str:
    """Return a one-line summary of a timeline: step time, bubble, busiest link, ranks and source."""
    ranks = sum(len(rank_class.ranks) for rank_class in timeline.rank_classes)
    busiest = timeline.bottleneck
    link = f", busiest link {busiest.name} ({busiest.utilisation:.0%})" if busiest else ""
    return (
        f"step {format_time(timeline.step_time)}{_steady_state_text(timeline)}, bubble {timeline.bubble:.1%}{link}, "
        f"{ranks:,} {'rank' if ranks == 1 else 'ranks'}, {timeline.source} ({timeline.engine.replace('_', ' ')})"
    )


def _steady_state_text(timeline: Timeline) -> str:
    """Return a note on which part of a run is shown, empty for one whole step."""
    if not timeline.begin:
        return ""
    return " in the steady state" + (f" ({timeline.steps} steps shown)" if timeline.steps > 1 else "")


def choose_close_ups(timeline: Timeline) -> tuple[Window, ...]:
    """Return windows of the first and the last part of the step, or nothing where the whole is readable.

    In a window a forward pass is wide enough for its number, or, where lanes are too low for numbers, wide enough to
    be seen.
    """
    computing = (span for span in timeline.spans if span.kind.computes)
    passes = [bar for bar in merge_bars(computing, absorb=True) if bar.microbatch >= 0]
    forward = typical_duration(bar.end - bar.start for bar in passes if bar.kind is TaskKind.FORWARD)
    lane = (HEIGHT - _TOP - _BOTTOM) * (1 - _OVERVIEW_SHARE) / len(timeline.rank_classes)
    length = forward / (_READABLE_BAR if lane >= _READABLE_LANE else _VISIBLE_BAR) * _PANEL_WIDTH / 2
    if not passes or 2 * length * _MIN_MAGNIFICATION >= timeline.length:
        return ()
    start = min(bar.start for bar in passes)
    start = start if start > length / 6 else 0.0
    passes_end = max(bar.end for bar in passes)
    # all that follows the last pass, where that leaves room for passes too
    end = timeline.length if timeline.length - passes_end <= length / 2 else passes_end + length / 6
    return Window(start, start + length), Window(end - length, end)


def _draw_close_up(figure: Figure, overview: Panel, timeline: Timeline, window: Window, index: int) -> Panel:
    """Draw one of two windows below the whole step, and mark its extent in the whole."""
    from matplotlib.patches import Rectangle

    width = (_PANEL_WIDTH - _COLUMN_GAP) // 2
    top = _TOP + overview.lanes.pixels * len(overview.lanes.labels) + _ROW_GAP
    height = figure_height(figure) - _BOTTOM - top
    panel = draw_panel(figure, timeline, window, Box(_LEFT_MARGIN + index * (width + _COLUMN_GAP), top, width, height))
    extent_name = "first" if index == 0 else "last" if window.end == timeline.length else "last passes,"
    name = f"{extent_name} {format_time(window.duration)}"
    panel.ax.set_title(name, loc="left", fontsize=12, fontweight="bold", pad=5)
    if index:
        panel.ax.set_yticks([])
    frame = Rectangle((window.start, 0), window.duration, len(overview.lanes.labels))
    frame.set(fill=False, edgecolor=INK, linewidth=1.4, clip_on=False)
    overview.ax.add_patch(frame)
    return panel


def _require_spans(timeline: Timeline) -> None:
    if not timeline.spans or timeline.step_time <= 0:
        raise ValueError(
            f"a timeline picture needs spans and a step time above 0, met {len(timeline.spans)} spans "
            f"and {timeline.step_time} s"
        )


def _split_height(num_above: int, num_below: int) -> tuple[int, int]:
    """Return heights of two panels in proportion to their lanes, neither below a quarter."""
    room = min(HEIGHT - _TOP - _ROW_GAP - _BOTTOM - 20, _MAX_LANE * (num_above + num_below))
    upper_height = int(min(0.75, max(0.25, num_above / (num_above + num_below))) * room)
    return upper_height, room - upper_height


def _draw_legend(figure: Figure, timelines: Sequence[Timeline], panels: Sequence[Panel]) -> None:
    """Write what the colours mean, in one line below the header."""
    from matplotlib.legend_handler import HandlerTuple

    present_kinds = {span.kind for timeline in timelines for span in timeline.spans}
    rows = {row for panel in panels for row in panel.lanes.rows}
    chunks = max(len(rank_class.stages) for timeline in timelines for rank_class in timeline.rank_classes)
    handles: list[Any] = []
    labels: list[str] = []
    for kind in TaskKind:
        if kind in present_kinds and lane_row(kind) in rows:
            num_chunks = chunks if kind in CHUNKED else 1
            handles.append(tuple(key_patch(color=shade_kind(kind, chunk, num_chunks)) for chunk in range(num_chunks)))
            labels.append(kind.value.replace("communication", "comm."))
            if num_chunks > 1 and kind is TaskKind.FORWARD:
                labels[-1] += f" (chunks 0{',' if num_chunks == 2 else ' to'} {num_chunks - 1})"
    handles.append((key_patch(color=IDLE),))
    labels.append("idle")
    if panels[0].shares:
        note = "upper panel: height, in strips strength, is share of time"
        figure.text(0.985, 1 - 70 / figure_height(figure), note, fontsize=12, color=QUIET, ha="right", va="center")
    figure.legend(
        handles, labels, loc="center left", bbox_to_anchor=(0.012, 1 - 106 / figure_height(figure)), ncols=len(labels),
        fontsize=11, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, columnspacing=1.4, handlelength=1.8,
        borderpad=0.3,
    )  # fmt: skip
