"""The report of a plan as one HTML file, which several commands write."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.reports.page.html import html
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.simulation import Simulation, build_page_report

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario
    from meshwise.simulator.timeline import Timeline

PageFile = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE.html", help="Write what is known of the plan as one page for a browser."),
]


def check_page(path: str | None) -> None:
    """Raise ``ValueError`` where no page can be written to ``path``."""
    check_output(path, (".html",))


def write_page(
    path: str | Path,
    value: "Scenario",
    simulation: Simulation,
    *,
    searches: Sequence[Mapping[str, Any]] = (),
    explanation: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    measured: "Timeline | None" = None,
) -> None:
    """Write the report of a simulated plan of the scenario ``value``, with other results as ``--json`` prints them."""
    extras = {"searches": tuple(searches), "explanation": explanation or {}, "run": run or {}, "measured": measured}
    write(path, html(build_page_report(simulation, value.name, **extras)))
