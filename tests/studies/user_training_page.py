"""Draws and tabulates trials of users' files, as ``python -m tests.studies.user_training`` leaves them.

Run ``python -m tests.studies.user_training_page RESULTS.json REPORT.md``; the picture is written beside the report.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.reports.pictures.figure import GRID, add_axes, header, open_sheet
from meshwise.simulator.units import format_size, format_time

Row = Mapping[str, Any]
_COLOURS = {1: "#9A9A9A", 2: "#0072B2", 4: "#D55E00"}
_COLUMNS, _TOP, _WIDTH, _HEIGHT, _GAP = 4, 130, 320, 190, 75
_SMOOTHING = 10
"""Steps whose mean loss is a point of a curve."""


def smooth(losses: Sequence[float], width: int = _SMOOTHING) -> list[float]:
    """Return the mean of every loss and those before it, so many together.

    >>> smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    windows = (losses[max(end - width, 0) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


def group_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of every file, by its name."""
    names = sorted({row["file"] for row in rows})
    return {
        name: sorted((row for row in rows if row["file"] == name), key=lambda row: row["processes"]) for name in names
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves of every file."""
    groups = group_rows(rows)
    height = _TOP + ceil(len(groups) / _COLUMNS) * (_HEIGHT + _GAP)
    with open_sheet(path, height) as figure:
        steps = max(len(row.get("loss", ())) for row in rows)
        facts = f"loss over {steps} steps, mean of {_SMOOTHING}; dropout has other draws on every number of processes"
        header(figure, "Users' files under the plans that the search chose: on 1, 2 and 4 processes", facts)
        for place, (name, own_rows) in enumerate(groups.items()):
            line, column = divmod(place, _COLUMNS)
            left, top = 80 + column * (_WIDTH + _GAP), _TOP + line * (_HEIGHT + _GAP)
            ax = add_axes(figure, left, top, _WIDTH, _HEIGHT)
            for row in own_rows:
                width = 3.0 if row["processes"] == 1 else 1.2
                label = str(row["processes"])
                ax.plot(smooth(row.get("loss", ())), color=_COLOURS[row["processes"]], linewidth=width, label=label)
            ax.set_title(name.replace("_", " "), fontsize=11, loc="left")
            ax.grid(color=GRID, linewidth=0.6)
            if not place:
                ax.legend(title="processes", fontsize=9)


def write_table(rows: Sequence[Row]) -> str:
    """Return a table of what every file was trained under, and how that compares."""
    heads = "file", "processes", "plan that was searched", "loss, first and last", "from one process in fp64"
    heads = (*heads, "step, predicted", "memory, predicted")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, own_rows in group_rows(rows).items():
        for row in own_rows:
            if "error" in row:
                lines.append(f"| {name} | {row['processes']} | {row['error']} |" + " |" * (len(heads) - 3))
                continue
            losses, difference = row["loss"], row.get("difference")
            cells = [
                ModuleLayout.from_json(row["plan"]).describe(),
                f"{losses[0]:.3f}, {losses[-1]:.3f}",
                "" if row["processes"] == 1 else row.get("difference_error") or f"{difference:.0e}",
                f"{format_time(row['step_time'])}, {_compare(row, 'step_time')}",
                f"{format_size(row['peak_memory'])}, {_compare(row, 'peak_memory')}",
            ]
            lines.append(f"| {name} | {row['processes']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compare(row: Row, name: str) -> str:
    predicted = row.get(f"predicted_{name}")
    return "none" if not predicted or not row[name] else f"{predicted / row[name] - 1:+.0%}".replace("%", " %")


def main(arguments: Sequence[str]) -> None:
    """Write the report and its picture."""
    rows: list[Row] = json.loads(Path(arguments[0]).read_text())
    report = Path(arguments[1])
    draw(rows, report.with_suffix(".png"))
    compared = [row["difference"] for row in rows if "difference" in row]
    num_files, num_steps = len(group_rows(rows)), len(rows[0]["loss"])
    errors = {
        name: median(abs(row[f"predicted_{name}"] / row[name] - 1) for row in rows if row.get(f"predicted_{name}"))
        for name in ("step_time", "peak_memory")
    }
    text = f"""# Users' files under the plans that the search chose

{num_files} files, written by someone who knew the guide but not the program, each trained {num_steps} steps on 1, 2 and
4 processes (`python -m tests.studies.user_training tests/studies/user_modules OUT.json`).

- The first 20 steps of each plan were made again in fp64, without dropout, beside a plain loop of torch on the whole
  batch: {len(compared)} plans, losses at most {max(compared):.0e} apart.
- Predictions are off by {100 * errors["peak_memory"]:.1f} % in the median for memory, and by
  {100 * errors["step_time"]:.0f} % for step time; the machine has two cores and was busy with other work, also while
  modules were measured for their predictions, so that single times say little.
- On two cores, and for modules this small, the search chose data parallelism everywhere.

![Curves of all files]({report.stem}.png)

{write_table(rows)}
"""
    report.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
