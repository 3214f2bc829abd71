"""Predicted against measured steps of executed plans, as a picture and as a Markdown page.

``python -m tests.studies.prediction_picture FOLDER`` draws the rows of every ``predictions-N-ranks.jsonl`` in a
folder, as ``python -m tests.studies.prediction_trials`` writes them.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from meshwise.reports.document import clean_text
from meshwise.reports.palette import SERIES
from meshwise.reports.pictures.figure import GRID, QUIET, WIDTH, add_axes, header, open_sheet
from meshwise.simulator.rank_correlation import kendall_tau

from .plan_matrix_picture import read_rows

PICTURE, PAGE = "predictions.png", "predictions.md"
_LEFT_MARGIN, _TOP, _SIDE, _GAP = 110, 150, 430, 80  # pixels
_NEAR_LABEL = "within 10 %"
_SPLITS = ("data parallel", "tensor parallel", "pipeline parallel", "several of them")

Row = Mapping[str, Any]


def draw_predictions(files: Sequence[tuple[Row, Sequence[Row]]], path: Path | str) -> None:
    """Draw predicted against measured step times, a panel for each number of ranks.

    Parameters
    ----------
    files
        For each number of ranks the head, which says how its rows were measured, and the rows.

    Raises
    ------
    ValueError
        Where there are no rows, or ``path`` ends in neither .png nor .svg.
    """
    if not files or not all(rows for _, rows in files):
        raise ValueError("a picture of predictions needs rows, met none")
    side = min(_SIDE, (WIDTH - _LEFT_MARGIN - 40) // len(files) - _GAP)
    with open_sheet(path, _TOP + side + 130) as figure:
        first_head = files[0][0]
        facts = f"{first_head['machine']}, torch {first_head['torch']}, {first_head['date']}"
        header(figure, "Steps of plans that ran: predicted against measured", facts)
        artists: dict[str, Artist] = {}
        for place, (head, rows) in enumerate(files):
            ax = add_axes(figure, _LEFT_MARGIN + place * (side + _GAP), _TOP, side, side)
            _draw_ranks(ax, head, rows)
            ax.set_ylabel("predicted, ms" if place == 0 else "")
            for artist, label in zip(*ax.get_legend_handles_labels(), strict=True):
                artists.setdefault(label, artist)
        names = [name for name in (*_SPLITS, _NEAR_LABEL) if name in artists]
        figure.legend(
            [artists[name] for name in names],
            names,
            loc="lower left",
            bbox_to_anchor=(_LEFT_MARGIN / WIDTH, 0.0),
            ncols=len(names),
            fontsize=11,
            handletextpad=0.3,
            frameon=False,
        )


def _draw_ranks(ax: Axes, head: Row, rows: Sequence[Row]) -> None:
    times = [1e3 * row[name] for row in rows for name in ("predicted_step_time", "measured_step_time")]
    low, high = min(times) / 1.15, max(times) * 1.15
    ax.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GRID, label=_NEAR_LABEL, lw=0)
    for split, colour, marker in zip(_SPLITS, SERIES, "os^D", strict=False):
        split_rows = [row for row in rows if classify_plan(row["plan"]) == split]
        if split_rows:
            measured, predicted = (
                [1e3 * row[f"{tick}_step_time"] for row in split_rows] for tick in ("measured", "predicted")
            )
            ax.scatter(measured, predicted, s=42, marker=marker, color=colour, label=split, zorder=3, alpha=0.85, lw=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ticks = [tick for tick in (20, 30, 50, 100, 200, 300, 500, 1000, 2000) if low <= tick <= high]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.set_xlabel("measured, ms")
    title = f"{head['ranks']} ranks, median of {head['steps']} steps"
    ax.text(0.0, 1.085, title, fontsize=14, fontweight="bold", transform=ax.transAxes)
    ax.text(0.0, 1.03, summarize_errors(rows), fontsize=11, color=QUIET, transform=ax.transAxes)


def classify_plan(plan: str) -> str:
    """Return which parallelism a plan uses, from its description.

    >>> classify_plan("data 2 x tensor 1 x pipeline 1, 1 microbatch of 8")
    'data parallel'
    """
    sizes = [int(part.split()[1]) for part in plan.split(",")[0].split(" x ")]
    used_splits = [name for name, size in zip(_SPLITS, sizes, strict=False) if size > 1]
    return used_splits[0] if len(used_splits) == 1 else _SPLITS[-1]


def summarize_errors(rows: Sequence[Row]) -> str:
    """Return the median and the worst error of step time, and Kendall's tau of the order of plans."""
    errors = [abs(row["time_error"]) for row in rows]
    tau = kendall_tau([(row["predicted_step_time"], row["measured_step_time"]) for row in rows])
    return f"{len(rows)} plans: median {median(errors):.1%}, worst {max(errors):.1%}, tau {tau:.2f}"


def write_page(files: Sequence[tuple[Row, Sequence[Row]]]) -> str:
    """Return all rows as Markdown."""
    lines = [
        "# Predicted and measured steps",
        "",
        "`python -m tests.studies.prediction_trials --ranks N --out predictions-N-ranks.jsonl`",
        "calibrates the machine with N processes, then predicts and runs 24 plans of a model that no calibration",
        "saw; `python -m tests.studies.prediction_picture` wrote this page from the rows. Drift is how many",
        "times as long a step of another model took before and after the plan as when the machine was calibrated:",
        "the prediction is for that pace. Where there are more ranks than cores times depend on the scheduler of",
        "the operating system, and the order of plans is what counts. Peak memory is compared with torch's memory",
        "tracker, run on the same trainer without data, and with torch's allocator in the run, which holds gloo's",
        "copies of what it reduces and gathers too, at the fullest moment or not as it happens.",
        "",
        f"![Predicted against measured step times]({PICTURE})",
        "",
    ]
    for head, rows in files:
        tracked, sizes = ([abs(row[name]) for row in rows] for name in ("tracked_memory_error", "memory_error"))
        lines += [
            f"## {head['ranks']} ranks",
            "",
            f"{summarize_errors(rows)}. Peak memory by torch's tracker: median error {median(tracked):.1%}, worst "
            f"{max(tracked):.1%}; by its allocator {median(sizes):.1%} and {max(sizes):.1%}.",
            f"Median of {head['steps']} steps, measured on {head['date']}: {head['machine']}, "
            f"Python {head['python']}, torch {head['torch']}.",
            "",
            "| plan | predicted | measured | error | drift | peak, tracker | peak, allocator |",
            "|---|---|---|---|---|---|---|",
            *map(_format_line, rows),
            "",
        ]
    return "\n".join(lines)


def _format_line(row: Row) -> str:
    times = " | ".join(f"{1e3 * row[f'{name}_step_time']:.1f} ms" for name in ("predicted", "measured"))
    drift = f"{row['before']:.2f} to {row['after']:.2f}"
    errors = " | ".join(f"{row[name]:+.1%}" for name in ("tracked_memory_error", "memory_error"))
    return f"| {clean_text(row['plan'], 200)} | {times} | {row['time_error']:+.1%} | {drift} | {errors} |"


def read_files(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return heads and rows of the files in a folder, in order of their number of ranks."""
    files = map(read_rows, folder.glob("predictions-*-ranks.jsonl"))
    return sorted(files, key=lambda file: int(file[0]["ranks"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.studies.prediction_picture")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    files = read_files(folder)
    draw_predictions(files, folder / PICTURE)
    (folder / PAGE).write_text(write_page(files))
