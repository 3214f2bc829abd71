"""Picture of a long run: goodput against the checkpoint interval, and one run with its failures and recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.reports.pictures.figure import INK, QUIET, WIDTH, add_axes, header, key_patch, open_sheet
from meshwise.simulator.reliability.failures import FailureKind
from meshwise.simulator.reliability.goodput import BestInterval, Goodput
from meshwise.simulator.reliability.long_run import Interruption, Outcome
from meshwise.simulator.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {"lost": "#D55E00", "checkpointing": "#F0B429", "recovering": "#6C4A99", "waiting": "#A6A6A6"}
"""Fields of `Outcome` that are lost time, and their colours, from the goodput curve upwards."""

_NAMES = ("training repeated", "checkpoints", "recovery", "waiting for hosts")
_USEFUL, _CURVE = "#E3EDF6", "#1D5B96"
_HEIGHT, _LEFT_MARGIN, _TOP, _FULL_WIDTH = 1040, 96, 170, WIDTH - 96 - 36  # pixels
_CURVES, _LANES, _PROGRESS = 290, 100, 226  # pixels: heights of the three rows
_SHARES, _KINDS = 1050, 240  # pixels: widths in the first row
_MIN_NAME_GAP = 0.013  # of the time axis between two names of failures
_NUM_SHOWN = 8  # interruptions in the part of the run that is drawn large
_LOSS_RANGE = 3.2  # the share axis ends at so many times the smallest loss, or below the run's own
_UNITS = ((172800.0, 86400.0, "days"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
_MARKS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, *(3600 * hours for hours in (1, 2, 5, 10, 24, 48, 120, 240, 480)))


class Stretch(NamedTuple):
    """Training between two interruptions: its start and end, and the training done by then, all in s."""

    start: float
    end: float
    start_progress: float
    end_progress: float


def list_stretches(outcome: Outcome) -> Iterator[Stretch]:
    """Yield the stretches of training of a run, in order."""
    step = outcome.useful / outcome.steps if outcome.steps else 0.0
    start: float | None = 0.0
    progress = 0.0
    for interruption in outcome.interruptions:
        kept_time = interruption.kept * step
        if start is not None:
            yield Stretch(start, interruption.time, progress, kept_time + interruption.lost)
        start, progress = interruption.resumed, kept_time
    if start is not None:
        yield Stretch(start, outcome.wall_time, progress, outcome.useful)


def draw_goodput(result: Goodput, best: BestInterval, path: Path | str, *, title: str = "") -> None:
    """Draw the shares of time at every interval that ``best`` evaluated, and the first run of ``result``.

    Raises
    ------
    ValueError
        Where ``path`` ends in neither .png nor .svg.
    """
    outcome = result.outcomes[0]
    lanes, progress = _TOP + _CURVES + 104, _TOP + _CURVES + 104 + _LANES + 96
    with open_sheet(path, _HEIGHT) as figure:
        header(figure, title or "Goodput of a long run", summarize_goodput(result, best))
        _draw_legend(figure)
        _draw_shares(add_axes(figure, _LEFT_MARGIN, _TOP, _SHARES, _CURVES), result, best)
        _draw_kinds(add_axes(figure, _LEFT_MARGIN + _FULL_WIDTH - _KINDS - 60, _TOP, _KINDS, _CURVES), result)
        _draw_lanes(add_axes(figure, _LEFT_MARGIN, lanes, _FULL_WIDTH, _LANES), outcome)
        _draw_progress(add_axes(figure, _LEFT_MARGIN, progress, _FULL_WIDTH, _PROGRESS), result)


def summarize_goodput(result: Goodput, best: BestInterval) -> str:
    """Return one line with the goodput at the run's own interval and at the best one."""
    own_interval = result.run.checkpoint.interval
    best_text = "the best interval" if own_interval == best.interval else f"best: {format_duration(best.interval)}"
    count = result.interruptions()
    return (
        f"goodput {result.mean:.1%} ± {result.standard_error:.1%}, "
        f"checkpoint every {format_duration(own_interval)} ({best_text}); "
        f"{count:.0f} interruptions in {format_duration(result.average('wall_time'))}"
        + (f", one every {format_duration(result.run.mtbf)}" if count else "")
    )


def _draw_shares(ax: Axes, result: Goodput, best: BestInterval) -> None:
    """Stack the shares of wall time over the checkpoint interval, goodput at the bottom."""
    low = max(0.0, 1 - max(_LOSS_RANGE * (1 - best.goodput.mean), 1.3 * (1 - result.mean), 0.01))
    visible = _visible_goodputs(result, best, low)
    intervals = np.array([goodput.run.checkpoint.interval for goodput in visible])
    mean = np.array([goodput.mean for goodput in visible])
    error = np.array([goodput.standard_error for goodput in visible])
    ax.fill_between(intervals, mean, color=_USEFUL, linewidth=0)
    base = mean
    for name, colour in PARTS.items():
        top = base + np.array([goodput.average(name) / goodput.average("wall_time") for goodput in visible])
        ax.fill_between(intervals, base, top, color=colour, linewidth=0)
        base = top
    ax.plot(intervals, mean, color=_CURVE, linewidth=2.4, marker="o", markersize=4.5)
    ax.errorbar(intervals, mean, error, color=_CURVE, fmt="none", elinewidth=1.2, capsize=3)
    ax.set_xscale("log")
    ax.set_xlim(intervals[0], intervals[-1])
    ax.set_ylim(low, 1.0)
    own_interval = result.run.checkpoint.interval
    _mark_interval(ax, best.interval, best.goodput.mean, "best", own_interval)
    if own_interval != best.interval:
        _mark_interval(ax, own_interval, result.mean, "this run", best.interval)
    marks = [mark for mark in _MARKS if intervals[0] <= mark <= intervals[-1]]
    ax.set_xticks(marks, [format_duration(mark) for mark in marks])
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    ax.set_xlabel("training between two checkpoints")
    _write_heading(ax, "share of wall time, mean of the simulated runs with its standard error")


def _visible_goodputs(result: Goodput, best: BestInterval, low: float) -> list[Goodput]:
    """Return the known goodputs by interval: those of at least ``low``, the run's own, and one more on each side."""
    own_interval = result.run.checkpoint.interval
    goodputs = {goodput.run.checkpoint.interval: goodput for goodput in (*best.candidates, result)}
    ordered = [goodputs[interval] for interval in sorted(goodputs)]
    visible_indices = [
        index for index, goodput in enumerate(ordered) if goodput.mean >= low or goodput is goodputs[own_interval]
    ]
    return ordered[max(visible_indices[0] - 1, 0) : visible_indices[-1] + 2]


def _mark_interval(ax: Axes, interval: float, mean: float, name: str, other_interval: float) -> None:
    """Mark an interval on the curve with its goodput, inside the axes and clear of the mark at another interval."""
    low, high = ax.get_xlim()
    place, other_place = (log(value / low) / log(high / low) for value in (interval, other_interval))
    is_near = 0 < abs(place - other_place) < 0.15
    is_left = place < 0.08 or (is_near and place > other_place)
    side = "left" if is_left else "right" if place > 0.92 or is_near else "center"
    ax.plot([interval], [mean], marker="o", markersize=10, color=INK, markeredgecolor="white", zorder=5, clip_on=False)
    _write_note(ax, f"{name}\n{format_duration(interval)}: {mean:.1%}", interval, mean, 14, side)


def _write_note(ax: Axes, text: str, x: float, y: float, distance: float, side: str, *, boxed: bool = False) -> None:
    """Write ``text`` below a point, or above one that lies low in the axes; ``boxed`` hides the drawing behind it."""
    bottom, top = ax.get_ylim()
    is_below = y > bottom + 0.35 * (top - bottom)
    ax.annotate(
        text, (x, y), xytext=(0, -distance if is_below else distance), ha=side, va="top" if is_below else "bottom",
        textcoords="offset points", fontsize=11, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2} if boxed else None,
    )  # fmt: skip


def _draw_kinds(ax: Axes, result: Goodput) -> None:
    """Draw a bar for every failure kind that occurred, or for all kinds where none did."""
    counts = {str(kind): result.interruptions(kind) for kind in FailureKind}
    counts = {kind: count for kind, count in counts.items() if count} or counts
    ax.barh(list(counts), list(counts.values()), color=QUIET, height=0.6)
    for place, count in enumerate(counts.values()):
        ax.annotate(f"{count:.3g}", (count, place), xytext=(6, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.2 * max(1, *counts.values()))
    ax.set_ylim(len(FailureKind) - 0.5, -0.5)
    ax.spines[["bottom", "left"]].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xticks([])
    _write_heading(ax, "interruptions a run")


def _draw_lanes(ax: Axes, outcome: Outcome) -> None:
    """Draw a tick for every interruption of the whole run, in a lane for its kind."""
    unit, _ = _set_time_axis(ax, outcome.wall_time)
    kinds = [kind for kind in FailureKind if outcome.by_kind[kind]]
    for lane, kind in enumerate(kinds):
        times = [interruption.time / unit for interruption in outcome.interruptions if interruption.kind is kind]
        ax.vlines(times, lane - 0.35, lane + 0.35, color=INK, linewidth=1.2)
    ax.axvspan(0, _shown_end(outcome) / unit, color=_USEFUL, zorder=0)
    ax.set_ylim(max(len(kinds), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(kinds)), [str(kind) for kind in kinds])
    ax.tick_params(axis="y", length=0)
    _write_heading(ax, "interruptions of one run; the shaded part is drawn large below")


def _draw_progress(ax: Axes, result: Goodput) -> None:
    """Draw training done against time in the first part of the run, with repeated training and recoveries."""
    outcome = result.outcomes[0]
    end = _shown_end(outcome)
    unit, name = _set_time_axis(ax, end)
    ax.plot([0, end / unit], [0, end / unit], color=QUIET, linewidth=1, linestyle=(0, (5, 4)))
    done = furthest = 0.0
    for stretch in list_stretches(outcome):
        if stretch.start >= end:
            break
        _draw_stretch(ax, stretch, furthest, unit)
        done, furthest = stretch.end_progress, max(furthest, stretch.end_progress)
    name_time = -end
    for recovery in _group_recoveries(outcome, end):
        _draw_recovery(ax, recovery, min(recovery[-1].resumed or end, end), result.run.recovery.detection, unit)
        if recovery[0].time > name_time + _MIN_NAME_GAP * end:
            name_time = recovery[0].time
            _write_causes(ax, recovery, name_time / unit)
    ax.set_ylim(0, end / unit)
    if done < end:
        _write_note(ax, f"{format_duration(end - done)} behind", end / unit, done / unit, 36, "right", boxed=True)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel(f"training done ({name})")
    _write_heading(ax, "progress; dashed: without failures and checkpoints")


def _group_recoveries(outcome: Outcome, end: float) -> list[list[Interruption]]:
    """Return the interruptions before ``end``; those that struck during a recovery are grouped with it."""
    groups: list[list[Interruption]] = []
    for interruption in outcome.interruptions:
        if interruption.time >= end:
            break
        if groups and groups[-1][-1].resumed is None:
            groups[-1].append(interruption)
        else:
            groups.append([interruption])
    return groups


def _draw_stretch(ax: Axes, stretch: Stretch, furthest: float, unit: float) -> None:
    """Draw one stretch of training, with the part up to ``furthest`` as repeated."""
    start, end = stretch.start_progress, stretch.end_progress
    repeated_end = min(max(furthest, start), end)
    share = (repeated_end - start) / (end - start) if end > start else 0.0
    turn = stretch.start + share * (stretch.end - stretch.start)
    times, done = np.array([stretch.start, turn, stretch.end]) / unit, np.array([start, repeated_end, end]) / unit
    ax.plot(times[1:], done[1:], color=_CURVE, linewidth=2.4)
    if start < furthest:
        ax.plot(times[:2], done[:2], color=PARTS["lost"], linewidth=3)
        ax.plot([times[0]] * 2, [done[0], furthest / unit], color=PARTS["lost"], linewidth=1.2)


def _draw_recovery(ax: Axes, recovery: list[Interruption], resume_time: float, detection: float, unit: float) -> None:
    """Draw a recovery and, inside it, the waits for hosts, which begin ``detection`` s after each failure."""
    ax.axvspan(recovery[0].time / unit, resume_time / unit, color=PARTS["recovering"], linewidth=0)
    for interruption in recovery:
        wait_start = interruption.time + detection
        ax.axvspan(wait_start / unit, (wait_start + interruption.waited) / unit, color=PARTS["waiting"], linewidth=0)


def _write_causes(ax: Axes, recovery: list[Interruption], moment: float) -> None:
    """Write the kinds of failures that caused a recovery."""
    causes = " + ".join(str(interruption.kind) for interruption in recovery)
    ax.annotate(
        causes, (moment, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3),
        ha="right", va="top", textcoords="offset points", rotation=90, fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _shown_end(outcome: Outcome) -> float:
    """Return the end of the part that is drawn large, in s: the first few interruptions of the run."""
    return outcome.interruptions[_NUM_SHOWN].time if len(outcome.interruptions) > _NUM_SHOWN else outcome.wall_time


def _set_time_axis(ax: Axes, end: float) -> tuple[float, str]:
    """Set a time axis up to ``end`` s, and return its unit: length in s and name."""
    unit, name = next((unit, name) for min_end, unit, name in _UNITS if end >= min_end)
    ax.set_xlim(0, end / unit)
    ax.set_xlabel(f"time ({name})")
    return unit, name


def _write_heading(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=8)


def _draw_legend(figure: Figure) -> None:
    handles = [
        key_patch(facecolor=_USEFUL, edgecolor=_CURVE, linewidth=1.6),
        *(key_patch(color=colour) for colour in PARTS.values()),
    ]
    place = (0.012, 1 - 108 / _HEIGHT)
    names = ("useful training (goodput)", *_NAMES)
    figure.legend(handles, names, loc="center left", bbox_to_anchor=place, ncols=len(names), fontsize=11)
