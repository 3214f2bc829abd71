"""Picture of memory over a step: contents of the fullest rank class and host, and all stages against capacity."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwise.reports.lanes import FloatArray, labels, used_hosts
from meshwise.reports.palette import CATEGORY_COLOUR, blend
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    WIDTH,
    axes,
    header,
    key_patch,
    pixels,
    sheet,
    size_unit,
    time_unit,
)
from meshwise.simulator.memory import CATEGORIES, MemoryProfile, peak_total
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _TOP, _BOTTOM = 96, 160, 70  # pixels around the panels
_BIG, _GAP, _DEEP = 900, 110, 110  # pixels: width of the large panel, and between panels
_HEADROOM = 1.14  # of the axis above the tallest thing on it
_NEAR = 0.35  # of capacity, from which the axis goes up to capacity
_CLEAR = 0.06  # of the axis, that the peak's value needs above it
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
    every = labels(timeline.rank_classes)
    names = [every[profile.rank_class] for profile in timeline.memory]
    name, hosts = names[timeline.memory.index(fullest)], used_hosts(timeline)
    beside, whole = _LEFT + _BIG + _GAP, HEIGHT - _TOP - _BOTTOM
    width, half = WIDTH - beside - 24, (whole - _DEEP) // 2
    with sheet(path) as figure:
        header(figure, title or "Memory over one training step", facts(fullest, name))
        _legend(figure)
        ax = axes(figure, _LEFT, _TOP, _BIG, half if hosts else whole)
        _draw_fullest(ax, timeline, fullest, f"fullest: {name}", "memory of one device", reported)
        if hosts:
            host = max(hosts, key=lambda host: hosts[host].peak)
            ax = axes(figure, _LEFT, _TOP + half + _DEEP, _BIG, half)
            _draw_fullest(ax, timeline, hosts[host], f"fullest host: {host}", "memory of one host")
        _draw_totals(axes(figure, beside, _TOP, width, half), timeline)
        _draw_peaks(axes(figure, beside, _TOP + half + _DEEP, width, half), timeline, names)


def facts(fullest: MemoryProfile, name: str) -> str:
    """Return one line with the peak of the fullest rank class, its moment, and its share of the capacity."""
    peak = f"peak {format_size(fullest.peak)} on {name} at {format_time(fullest.peak_time)}"
    if not isfinite(fullest.capacity) or fullest.capacity <= 0:
        return peak
    verdict = "fits" if fullest.peak <= fullest.capacity else "does not fit"
    share = fullest.peak / fullest.capacity
    of = f"{share:.0%}" if share >= 0.01 else "below 1%"
    return f"{peak}: {of} of {format_size(fullest.capacity)} usable, {verdict}"


def steps(profile: MemoryProfile, step_time: float) -> tuple[FloatArray, FloatArray]:
    """Return the moments of a profile up to ``step_time``, and the bytes by category from each moment on."""
    end = max(step_time, profile.times[-1])
    usage = np.array([*profile.usage, profile.usage[-1]], dtype=np.float64)
    return np.array([*profile.times, end]), usage.reshape(-1, len(CATEGORIES))


def _draw_fullest(
    ax: Axes, timeline: Timeline, profile: MemoryProfile, title: str, what: str, reported: float | None = None
) -> None:
    """Stack the categories of ``profile`` over time, and mark its peak, the usable and the reported capacity."""
    times, usage = steps(profile, timeline.length)
    unit, unit_name = _frame(ax, timeline, (profile,), title)
    base = np.zeros(len(times))
    for index, category in enumerate(CATEGORIES):
        top = base + usage[:, index] / unit
        ax.fill_between(times, base, top, step="post", color=CATEGORY_COLOUR[category], linewidth=0.6)
        base = top
    _mark_capacity(ax, profile.capacity, unit, named=True)
    if reported is not None and profile.capacity < reported <= unit * ax.get_ylim()[1]:
        _mark_capacity(ax, reported, unit, named=True, word="reported")
    _mark_peak(ax, profile, unit, timeline.length)
    ax.set_ylabel(f"{what} ({unit_name})")


def _draw_totals(ax: Axes, timeline: Timeline) -> None:
    """Draw the total of every rank class over time, from light (first stage) to dark (last)."""
    unit, unit_name = _frame(ax, timeline, timeline.memory, "total of every stage: first light, last dark")
    stages = [timeline.rank_classes[profile.rank_class].stages[:1] for profile in timeline.memory]
    order = sorted(set(stages))
    colours = _ramp(len(order))
    for profile, stage in zip(timeline.memory, stages, strict=True):
        times, usage = steps(profile, timeline.length)
        ax.step(times, usage.sum(axis=1) / unit, where="post", color=colours[order.index(stage)], linewidth=1.4)
    for capacity in dict.fromkeys(profile.capacity for profile in timeline.memory):
        _mark_capacity(ax, capacity, unit, named=False)
    ax.set_ylabel(unit_name)


def _draw_peaks(ax: Axes, timeline: Timeline, names: Sequence[str]) -> None:
    """Draw one bar per rank class with its peak by category; equal bars are drawn once."""
    unit, unit_name = _frame(ax, timeline, timeline.memory, "every stage at its peak, by category")
    short = (name.split(" (")[0].removeprefix("stages ").removeprefix("stage ") for name in names)
    peaks = (profile.usage[profile.totals.index(profile.peak)] for profile in timeline.memory)
    found = list(dict.fromkeys(zip(short, peaks, strict=True)))
    shown, rows = [name for name, _ in found], np.array([peak for _, peak in found]) / unit
    places, base = np.arange(len(found)), np.zeros(len(found))
    for index, category in enumerate(CATEGORIES):
        ax.bar(places, rows[:, index], bottom=base, width=0.82, color=CATEGORY_COLOUR[category])
        base += rows[:, index]
    for capacity in dict.fromkeys(profile.capacity for profile in timeline.memory):
        _mark_capacity(ax, capacity, unit, named=False)
    ax.set_xlim(-0.6, len(places) - 0.4)
    every = -(-len(shown) * (max(map(len, shown)) + 2) * _LETTER // pixels(ax)[0])
    ax.set_xticks(places[::every], shown[::every], fontsize=9)
    ax.set_xlabel("stage")
    ax.set_ylabel(unit_name)


def _frame(ax: Axes, timeline: Timeline, profiles: Sequence[MemoryProfile], title: str) -> tuple[float, str]:
    """Set title, time axis and memory axis for ``profiles``, and return the unit of the latter."""
    unit, name = time_unit(timeline.length)
    capacity = max((p.capacity for p in profiles if isfinite(p.capacity)), default=0.0)
    limit = peak_total(profiles)
    limit = max(limit, capacity) if limit >= _NEAR * capacity else limit
    size, size_name = size_unit(limit)
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=8)
    ax.set_xlim(0.0, max(timeline.length, *(p.times[-1] for p in profiles), 1e-12))
    ax.set_ylim(0.0, max(limit, 1.0) * _HEADROOM / size)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / unit:.6g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel(f"time ({name})")
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    return size, size_name


def _mark_capacity(ax: Axes, capacity: float, unit: float, *, named: bool, word: str = "usable") -> None:
    """Draw a capacity as a dashed line, or write that it lies above the axis."""
    if not isfinite(capacity) or capacity <= 0:
        return
    inside = capacity / unit <= ax.get_ylim()[1]
    if inside:
        ax.axhline(capacity / unit, color=INK, linewidth=1.4, linestyle=(0, (6, 4)))
    if named:
        words = f"{word} {format_size(capacity)}" + ("" if inside else " (above this axis)")
        height = capacity / unit if inside else ax.get_ylim()[1]
        ax.annotate(
            words, (1.0, height), xycoords=("axes fraction", "data"), xytext=(-6, 5 if inside else -14),
            textcoords="offset points", ha="right", fontsize=11, color=INK,
        )  # fmt: skip


def _mark_peak(ax: Axes, profile: MemoryProfile, unit: float, step_time: float) -> None:
    """Mark the peak with its value and moment, on the side with room and clear of the capacity line."""
    moment, peak = profile.peak_time, profile.peak / unit
    early = moment < step_time / 2
    words = f"peak {format_size(profile.peak)} at {format_time(moment)}"
    if min(profile.totals) == profile.peak:
        words = f"{format_size(profile.peak)} throughout"
    else:
        ax.plot([moment], [peak], marker="o", markersize=7, color=INK, markeredgecolor="white", clip_on=False)
    below = 0 <= profile.capacity / unit - peak < _CLEAR * ax.get_ylim()[1]
    ax.annotate(
        words, (moment, peak), textcoords="offset points", xytext=(10 if early else -10, -11 if below else 9),
        ha="left" if early else "right", va="top" if below else "bottom", fontsize=11, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _ramp(count: int) -> list[str]:
    """Return colours from light to dark."""
    return [blend("#A9CBE8", "#0B2545", i / max(count - 1, 1)) for i in range(count)]


def _legend(figure: Figure) -> None:
    handles = [key_patch(color=CATEGORY_COLOUR[category]) for category in reversed(CATEGORIES)]
    names = [category.value for category in reversed(CATEGORIES)]
    place = (0.012, 1 - 106 / HEIGHT)
    figure.legend(handles, names, loc="center left", bbox_to_anchor=place, ncols=len(names), fontsize=11)
