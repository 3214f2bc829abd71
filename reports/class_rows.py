"""The sheet of pictures that have a row for every class of runs: its name, its runs, and figures in columns."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.figure import GRID, HEIGHT, QUIET, WIDTH, axes
from reports.text import plain

MOST_CLASSES = 24
_LEFT, _TOP, _BOTTOM, _RIGHT = 240, 110, 80, 420  # pixels; to the right stand the figures of each class

Columns = Sequence[tuple[float, str]]
"""Where columns of figures begin, as parts of the room on the right, and what they are called."""


def class_axes(figure: Figure) -> Axes:
    """Return the axes of runs, with room for names on the left and figures on the right."""
    return axes(figure, _LEFT, _TOP, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)


def name_rows(ax: Axes, names: Sequence[str], columns: Columns) -> None:
    """Name the rows, from the top, and the columns."""
    ax.set_yticks(range(len(names)), [plain(name, 26) for name in names], fontsize=13)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines["left"].set_visible(False)
    write_columns(ax, -0.65, columns, [words for _, words in columns], QUIET)


def write_columns(ax: Axes, place: float, columns: Columns, words: Sequence[str], colour: str) -> None:
    """Write words into the columns of a row."""
    width = _RIGHT / (WIDTH - _LEFT - _RIGHT)
    for (column, _), word in zip(columns, words, strict=True):
        ax.text(
            1 + column * width, place, word, transform=ax.get_yaxis_transform(), fontsize=13, color=colour, va="center",
            clip_on=False,
        )  # fmt: skip
