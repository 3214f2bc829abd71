"""Picture of memory over a step: contents of the fullest rank class and host, and all stages against capacity."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwise.reports.lanes import FloatArray, lane_labels, used_hosts
from meshwise.reports.palette import CATEGORY_COLOUR, blend
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    WIDTH,
    add_axes,
    axes_pixels,
    choose_size_unit,
    choose_time_unit,
    header,
    key_patch,
    open_sheet,
)
from meshwise.simulator.memory import CATEGORIES, MemoryProfile, peak_total
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT_MARGIN, _TOP, _BOTTOM = 96, 160, 70  # pixels around the panels
_PANEL_WIDTH, _GAP, _ROW_GAP = 900, 110, 110  # pixels: width of the large panel, and between panels
_HEADROOM = 1.14  # of the axis above the tallest thing on it
_CAPACITY_SHARE = 0.35  # of capacity, from which the axis goes up to capacity
_PEAK_CLEARANCE = 0.06  # of the axis, that the peak's value needs above it
_LETTER = 7  # pixels of a letter below the bars


def draw_memory(timeline: Timeline, path: Path | str, *, title: str = "", reported: float | None = None) -> None:
    """Draw the memory of the fullest rank class over the step, the totals of all classes, and their peaks.

    Besides the usable capacity, the capacity that the framework has ``reported`` for a device is drawn, in bytes. Where
    host memory is used, the memory of the fullest host is drawn below.

    Raises
    ------
    ValueError
        Where the timeline holds no memory profile or ``path`` ends in neither .png nor .svg.
    """
    if not timeline.memory:
        raise ValueError("a memory picture needs a memory profile of at least one rank class, met none")
    fullest = max(timeline.memory, key=lambda profile: (profile.peak / profile.capacity, profile.peak))
    class_labels = lane_labels(timeline.rank_classes)
    names = [class_labels[profile.rank_class] for profile in timeline.memory]
    name, hosts = names[timeline.memory.index(fullest)], used_hosts(timeline)
    right_left, panel_height = _LEFT_MARGIN + _PANEL_WIDTH + _GAP, HEIGHT - _TOP - _BOTTOM
    right_width, half_height = WIDTH - right_left - 24, (panel_height - _ROW_GAP) // 2
    with open_sheet(path) as figure:
        header(figure, title or "Memory over one training step", summarize_peak(fullest, name))
        _draw_legend(figure)
        ax = add_axes(figure, _LEFT_MARGIN, _TOP, _PANEL_WIDTH, half_height if hosts else panel_height)
        _draw_fullest(ax, timeline, fullest, f"fullest: {name}", "memory of one device", reported)
        if hosts:
            host = max(hosts, key=lambda host: hosts[host].peak)
            ax = add_axes(figure, _LEFT_MARGIN, _TOP + half_height + _ROW_GAP, _PANEL_WIDTH, half_height)
            _draw_fullest(ax, timeline, hosts[host], f"fullest host: {host}", "memory of one host")
        _draw_totals(add_axes(figure, right_left, _TOP, right_width, half_height), timeline)
        _draw_peaks(
            add_axes(figure, right_left, _TOP + half_height + _ROW_GAP, right_width, half_height), timeline, names
        )


def summarize_peak(fullest: MemoryProfile, name: str) -> str:
    """Return one line with the peak of the fullest rank class, its moment, and its share of the capacity."""
    peak = f"peak {format_size(fullest.peak)} on {name} at {format_time(fullest.peak_time)}"
    if not isfinite(fullest.capacity) or fullest.capacity <= 0:
        return peak
    verdict = "fits" if fullest.peak <= fullest.capacity else "does not fit"
    share = fullest.peak / fullest.capacity
    share_text = f"{share:.0%}" if share >= 0.01 else "below 1%"
    return f"{peak}: {share_text} of {format_size(fullest.capacity)} usable, {verdict}"


def to_step_arrays(profile: MemoryProfile, step_time: float) -> tuple[FloatArray, FloatArray]:
    """Return the moments of a profile up to ``step_time``, and the bytes by category from each moment on."""
    end = max(step_time, profile.times[-1])
    usage = np.array([*profile.usage, profile.usage[-1]], dtype=np.float64)
    return np.array([*profile.times, end]), usage.reshape(-1, len(CATEGORIES))


def _draw_fullest(
    ax: Axes, timeline: Timeline, profile: MemoryProfile, title: str, memory_name: str, reported: float | None = None
) -> None:
    """Stack the categories of ``profile`` over time, and mark its peak, the usable and the reported capacity."""
    times, usage = to_step_arrays(profile, timeline.length)
    unit, unit_name = _set_frame(ax, timeline, (profile,), title)
    base = np.zeros(len(times))
    for index, category in enumerate(CATEGORIES):
        top = base + usage[:, index] / unit
        ax.fill_between(times, base, top, step="post", color=CATEGORY_COLOUR[category], linewidth=0.6)
        base = top
    _mark_capacity(ax, profile.capacity, unit, is_named=True)
    if reported is not None and profile.capacity < reported <= unit * ax.get_ylim()[1]:
        _mark_capacity(ax, reported, unit, is_named=True, capacity_name="reported")
    _mark_peak(ax, profile, unit, timeline.length)
    ax.set_ylabel(f"{memory_name} ({unit_name})")


def _draw_totals(ax: Axes, timeline: Timeline) -> None:
    """Draw the total of every rank class over time, from light (first stage) to dark (last)."""
    unit, unit_name = _set_frame(ax, timeline, timeline.memory, "total of every stage: first light, last dark")
    stages = [timeline.rank_classes[profile.rank_class].stages[:1] for profile in timeline.memory]
    stage_order = sorted(set(stages))
    colours = _shade_ramp(len(stage_order))
    for profile, stage in zip(timeline.memory, stages, strict=True):
        times, usage = to_step_arrays(profile, timeline.length)
        ax.step(times, usage.sum(axis=1) / unit, where="post", color=colours[stage_order.index(stage)], linewidth=1.4)
    for capacity in dict.fromkeys(profile.capacity for profile in timeline.memory):
        _mark_capacity(ax, capacity, unit, is_named=False)
    ax.set_ylabel(unit_name)


def _draw_peaks(ax: Axes, timeline: Timeline, names: Sequence[str]) -> None:
    """Draw one bar per rank class with its peak by category; equal bars are drawn once."""
    unit, unit_name = _set_frame(ax, timeline, timeline.memory, "every stage at its peak, by category")
    short_names = (name.split(" (")[0].removeprefix("stages ").removeprefix("stage ") for name in names)
    peaks = (profile.usage[profile.totals.index(profile.peak)] for profile in timeline.memory)
    stage_peaks = list(dict.fromkeys(zip(short_names, peaks, strict=True)))
    shown_names, peak_rows = [name for name, _ in stage_peaks], np.array([peak for _, peak in stage_peaks]) / unit
    places, base = np.arange(len(stage_peaks)), np.zeros(len(stage_peaks))
    for index, category in enumerate(CATEGORIES):
        ax.bar(places, peak_rows[:, index], bottom=base, width=0.82, color=CATEGORY_COLOUR[category])
        base += peak_rows[:, index]
    for capacity in dict.fromkeys(profile.capacity for profile in timeline.memory):
        _mark_capacity(ax, capacity, unit, is_named=False)
    ax.set_xlim(-0.6, len(places) - 0.4)
    label_stride = -(-len(shown_names) * (max(map(len, shown_names)) + 2) * _LETTER // axes_pixels(ax)[0])
    ax.set_xticks(places[::label_stride], shown_names[::label_stride], fontsize=9)
    ax.set_xlabel("stage")
    ax.set_ylabel(unit_name)


def _set_frame(ax: Axes, timeline: Timeline, profiles: Sequence[MemoryProfile], title: str) -> tuple[float, str]:
    """Set title, time axis and memory axis for ``profiles``, and return the unit of the latter."""
    unit, name = choose_time_unit(timeline.length)
    capacity = max((profile.capacity for profile in profiles if isfinite(profile.capacity)), default=0.0)
    limit = peak_total(profiles)
    limit = max(limit, capacity) if limit >= _CAPACITY_SHARE * capacity else limit
    size, size_name = choose_size_unit(limit)
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=8)
    ax.set_xlim(0.0, max(timeline.length, *(profile.times[-1] for profile in profiles), 1e-12))
    ax.set_ylim(0.0, max(limit, 1.0) * _HEADROOM / size)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / unit:.6g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel(f"time ({name})")
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    return size, size_name


def _mark_capacity(ax: Axes, capacity: float, unit: float, *, is_named: bool, capacity_name: str = "usable") -> None:
    """Draw a capacity as a dashed line, or write that it lies above the axis."""
    if not isfinite(capacity) or capacity <= 0:
        return
    is_inside = capacity / unit <= ax.get_ylim()[1]
    if is_inside:
        ax.axhline(capacity / unit, color=INK, linewidth=1.4, linestyle=(0, (6, 4)))
    if is_named:
        words = f"{capacity_name} {format_size(capacity)}" + ("" if is_inside else " (above this axis)")
        height = capacity / unit if is_inside else ax.get_ylim()[1]
        ax.annotate(
            words, (1.0, height), xycoords=("axes fraction", "data"), xytext=(-6, 5 if is_inside else -14),
            textcoords="offset points", ha="right", fontsize=11, color=INK,
        )  # fmt: skip


def _mark_peak(ax: Axes, profile: MemoryProfile, unit: float, step_time: float) -> None:
    """Mark the peak with its value and moment, on the side with room and clear of the capacity line."""
    moment, peak = profile.peak_time, profile.peak / unit
    is_early = moment < step_time / 2
    words = f"peak {format_size(profile.peak)} at {format_time(moment)}"
    if min(profile.totals) == profile.peak:
        words = f"{format_size(profile.peak)} throughout"
    else:
        ax.plot([moment], [peak], marker="o", markersize=7, color=INK, markeredgecolor="white", clip_on=False)
    is_below = 0 <= profile.capacity / unit - peak < _PEAK_CLEARANCE * ax.get_ylim()[1]
    ax.annotate(
        words, (moment, peak), textcoords="offset points", xytext=(10 if is_early else -10, -11 if is_below else 9),
        ha="left" if is_early else "right", va="top" if is_below else "bottom", fontsize=11, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _shade_ramp(count: int) -> list[str]:
    """Return colours from light to dark."""
    return [blend("#A9CBE8", "#0B2545", i / max(count - 1, 1)) for i in range(count)]


def _draw_legend(figure: Figure) -> None:
    handles = [key_patch(color=CATEGORY_COLOUR[category]) for category in reversed(CATEGORIES)]
    names = [category.value for category in reversed(CATEGORIES)]
    place = (0.012, 1 - 106 / HEIGHT)
    figure.legend(handles, names, loc="center left", bbox_to_anchor=place, ncols=len(names), fontsize=11)
