"""Picture of Pareto fronts: step time against memory, and against devices with the cost per million tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.document import clean_text
from meshwise.reports.palette import SERIES
from meshwise.reports.pictures.figure import (
    GRID,
    HEIGHT,
    INK,
    QUIET,
    WIDTH,
    add_axes,
    choose_size_unit,
    choose_time_unit,
    header,
    open_sheet,
)
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT_MARGIN, _TOP, _BOTTOM, _GAP = 100, 120, 80, 120  # pixels around and between panels

_LABEL_SHARE = 0.025
"""Height of a label as a fraction of the axis; plans closer than this to a labelled one get no label."""

Data = Mapping[str, Any]


def draw_fronts(memory: Sequence[Data], devices: Sequence[Data], path: Path | str, *, title: str = "") -> None:
    """Draw the Pareto fronts of an explanation, as `meshwise explain --json` has them.

    Parameters
    ----------
    memory
        Plans in order of falling memory: ``step_time`` in s, ``peak_memory`` in bytes, ``fits`` and ``plan``.
    devices
        Plans on ever fewer devices: ``devices``, ``step_time`` and ``cost_per_million_tokens``; may be empty.

    Raises
    ------
    ValueError
        Where there is no plan, or ``path`` ends in neither .png nor .svg.
    """
    if not memory:
        raise ValueError("a picture of a front needs at least one plan, met none")
    fitting = [candidate for candidate in devices if candidate["fits"]]
    panels = 2 if len(fitting) > 1 else 1
    width = (WIDTH - _LEFT_MARGIN - 40 - (panels - 1) * _GAP) // panels
    with open_sheet(path) as figure:
        header(figure, title or "What can be traded", _summarize_front(memory))
        _draw_memory(add_axes(figure, _LEFT_MARGIN, _TOP, width, HEIGHT - _TOP - _BOTTOM), memory)
        if panels == 2:
            _draw_devices(add_axes(figure, _LEFT_MARGIN + width + _GAP, _TOP, width, HEIGHT - _TOP - _BOTTOM), fitting)


def _summarize_front(memory: Sequence[Data]) -> str:
    fitting = [candidate for candidate in memory if candidate["fits"]]
    if not fitting:
        return f"{len(memory)} plans that no other beats, none of which fits"
    best = fitting[0]
    time, peak = format_time(best["step_time"]), format_size(best["peak_memory"])
    return f"fastest that fits: {time} with {peak} a device: {best['plan'].split(', ')[0]}"


def _draw_memory(ax: Axes, candidates: Sequence[Data]) -> None:
    unit, name = choose_time_unit(min(candidate["step_time"] for candidate in candidates))
    peaks = [candidate["peak_memory"] for candidate in candidates]
    size, size_name = choose_size_unit(sorted(peaks)[len(peaks) // 2])
    xs, ys = [peak / size for peak in peaks], [candidate["step_time"] / unit for candidate in candidates]
    ax.plot(xs, ys, drawstyle="steps-pre", color=QUIET, linewidth=1.2)
    for fitting, label, face in ((True, "fits", SERIES[0]), (False, "does not fit", "white")):
        rows = [index for index, candidate in enumerate(candidates) if candidate["fits"] is fitting]
        ax.plot(
            [xs[row] for row in rows], [ys[row] for row in rows], "o", color=SERIES[0], markerfacecolor=face,
            markersize=9, label=label, linestyle="none",
        )  # fmt: skip
    min_distance, last_label = (max(ys) - min(ys)) * _LABEL_SHARE, float("-inf")
    for row, candidate in enumerate(candidates):
        if ys[row] - last_label >= min_distance:  # plans come by rising step time
            words, last_label = clean_text(candidate["plan"].split(",")[0], 60), ys[row]
            ax.annotate(words, (xs[row], ys[row]), xytext=(9, 5), textcoords="offset points", fontsize=9, color=INK)
    ax.set_xscale("log")
    ax.set_xlim(min(xs) * 0.9, max(xs) * 5)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter(lambda value, _: "")
    ax.set_xlabel(f"memory of the fullest device ({size_name})")
    ax.set_ylabel(f"step time ({name})")
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(loc="upper right", fontsize=11)


def _draw_devices(ax: Axes, candidates: Sequence[Data]) -> None:
    unit, name = choose_time_unit(min(candidate["step_time"] for candidate in candidates))
    xs = [candidate["devices"] for candidate in candidates]
    ys = [candidate["step_time"] / unit for candidate in candidates]
    ax.plot(xs, ys, "o-", color=SERIES[1], markersize=9, linewidth=1.6)
    for x, y, candidate in zip(xs, ys, candidates, strict=True):
        words = f"{candidate['cost_per_million_tokens']:.3g} a million {candidate.get('unit', 'tokens')}"
        # the last label has no room on its right; the line comes from above on its left
        place, side = ((-9, -12), "right") if x == max(xs) else ((9, 5), "left")
        ax.annotate(words, (x, y), xytext=place, ha=side, textcoords="offset points", fontsize=10, color=INK)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(min(xs) * 0.85, max(xs) * 1.9)
    ax.set_xticks(xs, [f"{x:,}" for x in xs])
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("devices")
    ax.set_ylabel(f"step time ({name})")
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
