"""``meshwise demo``: calibrate, search, execute and report on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.reports.document import Section, to_markdown
from meshwise.reports.pictures.memory import draw_memory
from meshwise.reports.pictures.search import draw_search
from meshwise.reports.pictures.timeline import draw_timeline
from meshwise.scenarios.calibration.calibrate import calibrate
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.commands.page import write_page
from meshwise.scenarios.commands.run_report import follow, to_json, write_run
from meshwise.scenarios.commands.search import to_json as search_to_json
from meshwise.scenarios.console import FAILED, Ticker, emit, note, show
from meshwise.scenarios.files.results import folder, write
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.loader import load
from meshwise.simulator.units import format_size, format_time

PROCESSES = 2
CALIBRATION_SECONDS = 20.0
STEPS = 22
"""Training steps: two to warm up, twenty for the median."""
WALK = 60
"""Evaluations of the random walk (MCMC) in the picture beside the proven search."""

SCENARIO = """\
# A small byte-level GPT on this machine; cluster.yaml holds what `meshwise calibrate` measured.
name: meshwise demo

model:
  transformer: {layers: 4, hidden: 128, heads: 4, ffn: 512, vocab: 256, tied_embeddings: false}

training:
  global_batch: 16            # sequences
  sequence: 64                # tokens
  precision: fp32
  optimizer: adamw
  framework: torch

cluster:
  file: cluster.yaml

search:
  algorithm: best_first
"""


def demo(
    directory: Annotated[
        str, typer.Argument(metavar="[DIR]", help="Folder for everything it makes.")
    ] = "meshwise-demo",
    as_json: Json = False,
) -> None:
    """Show the whole chain on this machine: calibrate, search a plan, run it, compare and report."""
    target = folder(directory)
    ticker = Ticker()
    note(f"1/4 calibrate: measuring {PROCESSES} processes on this machine")
    cluster = calibrate(processes=PROCESSES, seconds=CALIBRATION_SECONDS, progress=lambda *words: ticker(str(words[0])))
    ticker.done()
    write_cluster(cluster, target / "cluster.yaml", "Measured on this machine by `meshwise demo`.")
    write(target / "scenario.yaml", SCENARIO)
    scenario = load(target / "scenario.yaml")

    note("2/4 search: the fastest plan for a small GPT")
    found = scenario.search()
    if found.best is None:
        note("no plan of the demo fits into this machine's memory")
        raise typer.Exit(FAILED)
    write(target / "plan.json", json.dumps(found.best.plan.to_json(), indent=2) + "\n")

    note(f"3/4 execute: {found.best.plan.describe()}")
    predicted = scenario.simulate(found.best.plan)
    run = scenario.execute(
        found.best.plan, steps=STEPS, verify=True, folder=folder(target / "run"), progress=follow(ticker)
    )
    ticker.done()
    result = to_json(run, predicted)
    write_run(target, result, predicted, run)

    note("4/4 report")
    searched = (found, scenario.search("mcmc", budget=WALK))
    _pictures(target, searched, predicted, run)
    _report(target, found, predicted, result)
    searches = [search_to_json(each, scenario.problem) for each in searched]
    write_page(target / "report.html", scenario, predicted, searches=searches, run=result, measured=run.timeline)
    document = {"folder": str(target), "plan": found.best.plan.to_json(), "gap": found.gap, **result}
    if as_json:
        emit(document)
    else:
        show([*_facts(found, predicted, result), ("report", str(target / "report.html"))])


def _pictures(target: Path, searches: tuple[Any, ...], predicted: Any, run: Any) -> None:
    draw_timeline(predicted.timeline, target / "predicted.png", title="predicted")
    draw_timeline(run.timeline, target / "measured.png", title="measured")
    draw_memory(predicted.timeline, target / "memory.png", title="predicted memory", reported=predicted.memory_capacity)
    histories = {found.algorithm: found.history for found in searches}
    draw_search(histories, target / "search.png", lower_bound=searches[0].lower_bound)


def _facts(found: Any, predicted: Any, result: dict[str, Any]) -> list[tuple[str, str]]:
    error = predicted.step_time / result["step_time"] - 1
    return [
        ("plan", found.best.plan.describe()),
        ("searched", f"{found.evaluations} evaluations of {found.considered} plans, {format_time(found.wall_time)}"),
        ("loss", f"{result['loss'][0]:.3f} at the first step, {result['loss'][-1]:.3f} after {len(result['loss'])}"),
        ("step time measured", f"{format_time(result['step_time'])} (median of {STEPS - 2})"),
        ("step time predicted", f"{format_time(predicted.step_time)} ({error:+.0%})"),
        ("peak memory measured", format_size(result["peak_memory"])),
        ("peak memory predicted", format_size(predicted.peak_memory)),
        ("equal to one process", "yes" if result["verify"] and result["verify"]["equal"] else "no"),
    ]


def _report(target: Path, found: Any, predicted: Any, result: dict[str, Any]) -> None:
    search = (
        f"Every plan of the space was considered by {found.algorithm}: {found.considered} plans, of which "
        f"{found.evaluations} were simulated. The best was then run for real on {PROCESSES} processes."
    )
    sections = (
        Section("Result", (search,), (("what", "value"), *_facts(found, predicted, result))),
        Section("Prediction over measurement", image="comparison.png", caption="One step, predicted and measured."),
        Section("Predicted step", image="predicted.png", caption="What the simulator says."),
        Section("Measured step", image="measured.png", caption="What the processes did."),
        Section("Memory", image="memory.png", caption="Predicted memory of a device over the step."),
        Section("Search", image="search.png", caption="Best plan so far, against a random walk (MCMC)."),
        Section("What the prediction rests on", predicted.assumptions),
    )
    write(target / "report.md", to_markdown("meshwise on this machine", sections))
