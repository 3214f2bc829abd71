"""Picture of a matrix of plans: for every pair of techniques, how far its gradients are from those of one process.

``python -m tests.studies.plan_matrix_picture FOLDER`` draws the rows that ``python -m
tests.studies.plan_matrix`` left in a folder.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from meshwise.reports.document import clean_text
from meshwise.reports.palette import blend
from meshwise.reports.pictures.figure import QUIET, WIDTH, add_axes, header, open_sheet

ROWS, PICTURE = "plan-matrix.jsonl", "plan-matrix.png"
_LEFT_MARGIN, _TOP, _BOTTOM, _CELL = 210, 110, 190, 27  # pixels
_MIN_POWER, _MAX_POWER = -17.0, -12.0
"""Powers of ten of the gradient errors at the ends of the scale; errors up to the upper one count as equal."""
_NEAR_COLOUR, _FAR_COLOUR = "#D6E8F5", "#1D5B96"
_WRONG_COLOUR, _REFUSED_COLOUR = "#D55E00", "#E6E3DC"

Row = Mapping[str, Any]


def draw_plan_matrix(head: Mapping[str, Any], rows: Sequence[Row], path: Path | str) -> None:
    """Draw every technique alone, on the diagonal, and every pair below it.

    Parameters
    ----------
    head
        Date and machine of the measurement.
    rows
        Results of combinations of techniques, as the plan matrix study writes them; triples are only counted.

    Raises
    ------
    ValueError
        Where no technique is alone, or ``path`` ends in neither .png nor .svg.
    """
    names = [row["techniques"][0] for row in rows if len(row["techniques"]) == 1]
    if not names:
        raise ValueError("a picture of a matrix of plans needs techniques that are alone, met none")
    side = _CELL * len(names)
    with open_sheet(path, _TOP + side + _BOTTOM) as figure:
        header(
            figure,
            "Techniques of plans that run, together and alone, against one process",
            _summarize_plans(head, rows),
        )
        ax = add_axes(figure, _LEFT_MARGIN, _TOP, side, side)
        _draw_cells(ax, {name: place for place, name in enumerate(names)}, rows)
        _label_techniques(ax, names)
        _draw_key(
            add_axes(
                figure, _LEFT_MARGIN + side // 2, _TOP + 20, min(side // 2, WIDTH - _LEFT_MARGIN - side // 2 - 20), 200
            )
        )


def _summarize_plans(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    distinct_rows = [row for row in rows if "same_as" not in row]
    run_rows = [row for row in distinct_rows if row.get("state") in ("equal", "different", "failed")]
    num_equal = sum(row["state"] == "equal" for row in run_rows)
    num_triples = sum(len(row["techniques"]) == 3 for row in run_rows)
    return (
        f"{num_equal} of {len(run_rows)} plans equal, {num_triples} of them of three techniques; "
        f"{head['steps']} steps in {head['precision']}, torch {head['torch']}, {head['date']}"
    )


def _draw_cells(ax: Axes, places: Mapping[str, int], rows: Sequence[Row]) -> None:
    for row in rows:
        cell = sorted(places[name] for name in row["techniques"])
        if len(cell) < 3:
            colour = cell_colour(row)
            if colour is not None:
                ax.add_patch(Rectangle((cell[0], cell[-1]), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    ax.set_xlim(0, len(places))
    ax.set_ylim(len(places), 0)


def cell_colour(row: Row) -> str | None:
    """Return the colour of a cell: darker for a larger gradient error; None where there is no result.

    >>> cell_colour({"state": "equal", "gradient": 1e-17}), cell_colour({"state": "equal", "gradient": 0.0})
    ('#d6e8f5', '#d6e8f5')
    """
    state = row.get("state")
    if state == "equal":
        power = log10(max(float(row["gradient"]), 10**_MIN_POWER))
        return blend(_NEAR_COLOUR, _FAR_COLOUR, min((power - _MIN_POWER) / (_MAX_POWER - _MIN_POWER), 1.0))
    return {"different": _WRONG_COLOUR, "failed": _WRONG_COLOUR, "refused": _REFUSED_COLOUR}.get(str(state))


def _label_techniques(ax: Axes, names: Sequence[str]) -> None:
    middles = [place + 0.5 for place in range(len(names))]
    ax.set_yticks(middles, [clean_text(name, 30) for name in names], fontsize=10)
    ax.set_xticks(middles, [clean_text(name, 30) for name in names], fontsize=10, rotation=90)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_key(ax: Axes) -> None:
    """Draw the legend of colours, in the empty half above the diagonal."""
    steps = range(int(_MIN_POWER), int(_MAX_POWER) + 1)
    entries = [(cell_colour({"state": "equal", "gradient": 10.0**power}), f"1e{power}") for power in steps]
    ax.text(0, 0.4, "largest difference of a gradient from one process", fontsize=13, va="center")
    for place, (colour, text) in enumerate(entries):
        ax.add_patch(Rectangle((place, 0.8), 0.95, 0.7, facecolor=str(colour)))
        ax.text(place + 0.475, 1.9, text, fontsize=11, ha="center", va="center", color=QUIET)
    state_entries = (
        (_REFUSED_COLOUR, "refused before anything starts, with the reason"),
        (_WRONG_COLOUR, "not equal, or failed"),
    )
    for place, (colour, text) in enumerate(state_entries):
        ax.add_patch(Rectangle((0, 2.5 + place), 0.95, 0.7, facecolor=colour))
        ax.text(1.2, 2.85 + place, text, fontsize=12, va="center")
    ax.text(0, 4.85, "blank: two values of one choice, or not run", fontsize=12, va="center", color=QUIET)
    ax.set_xlim(0, 8)
    ax.set_ylim(5.2, 0)
    ax.axis("off")


def read_rows(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head and the rows of a file of JSON lines."""
    head, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return head, rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_matrix_picture")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    draw_plan_matrix(*read_rows(folder / ROWS), folder / PICTURE)
