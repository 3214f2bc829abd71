"""``meshwise benchmark``: the program's own speed on this machine."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.scenarios.benchmark.benchmark import benchmark as measure_figures
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import Ticker, emit, print_table
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from meshwise.scenarios.benchmark.figure import Figure


def benchmark(
    group: Annotated[str, typer.Argument(metavar="[engine|search|all]", help="Which figures.")] = "all",
    as_json: Json = False,
) -> None:
    """Measure the program's own speed on this machine, in CPU time of one core."""
    figures: list[Figure] = []
    ticker = Ticker()
    for figure in measure_figures(group):
        figures.append(figure)
        ticker(f"{figure.name}: {format_figure(figure.value, figure.unit)}")
    ticker.clear()
    if as_json:
        emit([asdict(figure) | {"reached": figure.reached} for figure in figures])
        return
    rows = [(f.name, format_figure(f.value, f.unit), *_describe_goal(f), f.detail) for f in figures]
    print_table(("figure", "measured", "asked", "reached", "what"), rows)


def _describe_goal(figure: "Figure") -> tuple[str, str]:
    """Return what is asked, and whether it is reached."""
    if figure.goal is None:
        return "", ""
    return format_figure(figure.goal, figure.unit), "yes" if figure.reached else "no"


def format_figure(value: float, unit: str) -> str:
    """Return a figure for people.

    >>> format_figure(2.5e6, "tasks/s"), format_figure(0.05, "s"), format_figure(2.0**30, "byte")
    ('2.5 M tasks/s', '50 ms', '1 GiB')
    """
    if unit == "s":
        return format_time(value)
    if unit == "byte":
        return format_size(value)
    for factor, prefix in ((1e9, "G "), (1e6, "M "), (1e3, "k ")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.2g} {unit}"
