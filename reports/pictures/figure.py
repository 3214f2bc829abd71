"""The sheet that every picture is drawn on: its size and type, cleaned text, and reproducible bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.reports.document import clean_text
from meshwise.simulator.files import whole_file
from meshwise.simulator.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

DPI = 100
WIDTH, HEIGHT = 1600, 900
SUFFIXES = (".png", ".svg")
INK, QUIET, GRID = "#1A1A1A", "#5C5C5C", "#D9D9D9"
_TIME_UNITS = ((2.0, 1.0, "s"), (2e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "meshwise",
    "svg.fonttype": "path",
    "agg.path.chunksize": 20000,
}


@contextmanager
def open_sheet(path: Path | str, height: int = HEIGHT) -> Iterator[Figure]:
    """Yield an empty figure of 1600 by ``height`` pixels, and write it to ``path`` when the block ends.

    The same drawing gives the same bytes: SVG identifiers are salted and no date is written.

    Raises
    ------
    ValueError
        Where the suffix is neither .png nor .svg.
    """
    import matplotlib.figure  # a third of a second to load: where nothing is drawn, nobody waits for it
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a picture ends in .png or .svg, met {path.name!r}; nearest: {path.stem}.png")
    is_vector = path.suffix.lower() == ".svg"
    with matplotlib.rc_context(_STYLE):
        # not pyplot, which keeps global state, needs a display on some backends and is not safe in threads
        figure = matplotlib.figure.Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks: drawn as boxes
            with whole_file(path) as draft:
                figure.savefig(
                    draft, dpi=2 * DPI if is_vector else DPI, metadata={"Date" if is_vector else "Software": None}
                )


def header(figure: Figure, title: str, facts: str) -> None:
    """Write a title and, below it, a line of facts at the top of ``figure``."""
    height = figure_height(figure)
    figure.text(0.02, 1 - 32 / height, clean_text(title, 105), fontsize=18, fontweight="bold", va="center")
    figure.text(0.02, 1 - 70 / height, clean_text(facts, 150), fontsize=13, color=QUIET, va="center")


def key_patch(**style: Any) -> Patch:
    """Return a patch of colour for a legend, as `matplotlib.patches.Patch` takes its ``style``."""
    from matplotlib.patches import Patch

    return Patch(**style)


def figure_height(figure: Figure) -> int:
    """Return the height of ``figure`` in pixels."""
    return round(float(figure.get_size_inches()[1]) * DPI)


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the best unit for a time axis up to ``seconds``: its length in s and its name.

    >>> choose_time_unit(0.5)
    (0.001, 'ms')
    """
    return next((unit, name) for min_seconds, unit, name in _TIME_UNITS if seconds >= min_seconds)


def choose_size_unit(size: float) -> tuple[float, str]:
    """Return the best unit for an axis up to ``size`` bytes: its bytes and its name.

    >>> choose_size_unit(80 * 2**30)
    (1073741824.0, 'GiB')
    """
    name = format_size(size).split()[-1]
    return 2.0 ** (10 * ("B", "KiB", "MiB", "GiB", "TiB").index(name)), name


def add_axes(figure: Figure, left_edge: int, top: int, width: int, height: int) -> Axes:
    """Return new axes at whole pixels from the left and the top of ``figure``, so that lanes fall on pixels."""
    sheet_height = figure_height(figure)
    return figure.add_axes(
        (left_edge / WIDTH, (sheet_height - top - height) / sheet_height, width / WIDTH, height / sheet_height)
    )


def axes_pixels(ax: Axes) -> tuple[int, int]:
    """Return width and height of ``ax`` in pixels."""
    box = ax.get_window_extent()
    return round(box.width), round(box.height)
