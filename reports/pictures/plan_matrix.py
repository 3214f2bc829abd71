"""Picture of a matrix of plans: for every pair of techniques, how far its gradients are from those of one process.

``python -m meshwise.reports.pictures.plan_matrix FOLDER`` draws the rows that ``python -m
meshwise.executor.studies.plan_matrix`` left in a folder.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from meshwise.reports.document import plain
from meshwise.reports.palette import blend
from meshwise.reports.pictures.figure import QUIET, WIDTH, axes, header, sheet

ROWS, PICTURE = "plan-matrix.jsonl", "plan-matrix.png"
_LEFT, _TOP, _BOTTOM, _CELL = 210, 110, 190, 27  # pixels
_LEAST, _MOST = -17.0, -12.0
"""Powers of ten of the gradient errors at the ends of the scale; errors up to the upper one count as equal."""
_NEAR, _FAR = "#D6E8F5", "#1D5B96"
_WRONG, _REFUSED = "#D55E00", "#E6E3DC"

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
    with sheet(path, _TOP + side + _BOTTOM) as figure:
        header(figure, "Techniques of plans that run, together and alone, against one process", _facts(head, rows))
        ax = axes(figure, _LEFT, _TOP, side, side)
        _draw_cells(ax, {name: place for place, name in enumerate(names)}, rows)
        _label(ax, names)
        _draw_key(axes(figure, _LEFT + side // 2, _TOP + 20, min(side // 2, WIDTH - _LEFT - side // 2 - 20), 200))


def _facts(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    own = [row for row in rows if "same_as" not in row]
    ran = [row for row in own if row.get("state") in ("equal", "different", "failed")]
    equal = sum(row["state"] == "equal" for row in ran)
    threes = sum(len(row["techniques"]) == 3 for row in ran)
    return (
        f"{equal} of {len(ran)} plans equal, {threes} of them of three techniques; {head['steps']} steps in "
        f"{head['precision']}, torch {head['torch']}, {head['date']}"
    )


def _draw_cells(ax: Axes, place: Mapping[str, int], rows: Sequence[Row]) -> None:
    for row in rows:
        found = sorted(place[name] for name in row["techniques"])
        if len(found) < 3:
            colour = colour_of(row)
            if colour is not None:
                ax.add_patch(Rectangle((found[0], found[-1]), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    ax.set_xlim(0, len(place))
    ax.set_ylim(len(place), 0)


def colour_of(row: Row) -> str | None:
    """Return the colour of a cell: darker for a larger gradient error; None where there is no result.

    >>> colour_of({"state": "equal", "gradient": 1e-17}), colour_of({"state": "equal", "gradient": 0.0})
    ('#d6e8f5', '#d6e8f5')
    """
    state = row.get("state")
    if state == "equal":
        power = log10(max(float(row["gradient"]), 10**_LEAST))
        return blend(_NEAR, _FAR, min((power - _LEAST) / (_MOST - _LEAST), 1.0))
    return {"different": _WRONG, "failed": _WRONG, "refused": _REFUSED}.get(str(state))


def _label(ax: Axes, names: Sequence[str]) -> None:
    middles = [place + 0.5 for place in range(len(names))]
    ax.set_yticks(middles, [plain(name, 30) for name in names], fontsize=10)
    ax.set_xticks(middles, [plain(name, 30) for name in names], fontsize=10, rotation=90)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_key(ax: Axes) -> None:
    """Draw the legend of colours, in the empty half above the diagonal."""
    steps = range(int(_LEAST), int(_MOST) + 1)
    entries = [(colour_of({"state": "equal", "gradient": 10.0**power}), f"1e{power}") for power in steps]
    ax.text(0, 0.4, "largest difference of a gradient from one process", fontsize=13, va="center")
    for place, (colour, text) in enumerate(entries):
        ax.add_patch(Rectangle((place, 0.8), 0.95, 0.7, facecolor=str(colour)))
        ax.text(place + 0.475, 1.9, text, fontsize=11, ha="center", va="center", color=QUIET)
    others = ((_REFUSED, "refused before anything starts, with the reason"), (_WRONG, "not equal, or failed"))
    for place, (colour, text) in enumerate(others):
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
    parser = argparse.ArgumentParser(prog="python -m meshwise.reports.pictures.plan_matrix")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    draw_plan_matrix(*read_rows(folder / ROWS), folder / PICTURE)
