"""``meshwise demo``: calibrate, search, execute and report on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.reports.document import Section, to_markdown
from meshwise.reports.pictures.memory import draw_memory
from meshwise.reports.pictures.search import draw_search
from meshwise.reports.pictures.timeline import draw_timeline
from meshwise.scenarios.calibration.calibrate import calibrate
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.commands.page import write_page
from meshwise.scenarios.commands.run_report import follow, to_json, write_run
from meshwise.scenarios.commands.search_report import to_json as search_to_json
from meshwise.scenarios.console import FAILED, Ticker, emit, note, print_rows
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.loader import load
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from meshwise.executor.launch.run import Run
    from meshwise.scenarios.simulation import Simulation
    from meshwise.strategies.search.driver import SearchResult

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
  framework: execute

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
    target = make_folder(directory)
    ticker = Ticker()
    note(f"1/4 calibrate: measuring {PROCESSES} processes on this machine")
    cluster = calibrate(processes=PROCESSES, seconds=CALIBRATION_SECONDS, progress=lambda *words: ticker(str(words[0])))
    ticker.clear()
    write_cluster(cluster, target / "cluster.yaml", "Measured on this machine by `meshwise demo`.")
    write(target / "scenario.yaml", SCENARIO)
    scenario = load(target / "scenario.yaml")

    note("2/4 search: the fastest plan for a small GPT")
    search_result = scenario.search_plan()
    if search_result.best is None:
        note("no plan of the demo fits into this machine's memory")
        raise typer.Exit(FAILED)
    plan = search_result.best.plan
    write(target / "plan.json", json.dumps(plan.to_json(), indent=2) + "\n")

    note(f"3/4 execute: {plan.describe()}")
    predicted = scenario.simulate(plan)
    run_folder = make_folder(target / "run")
    run = scenario.execute(plan, steps=STEPS, verify=True, folder=run_folder, progress=follow(ticker))
    ticker.clear()
    result = to_json(run, predicted)
    write_run(target, result, predicted, run)

    note("4/4 report")
    search_results = (search_result, scenario.search_plan("mcmc", budget=WALK))
    _draw_pictures(target, search_results, predicted, run)
    _write_report(target, search_result, predicted, result)
    searches = [search_to_json(search_run, scenario.problem) for search_run in search_results]
    write_page(target / "report.html", scenario, predicted, searches=searches, run=result, measured=run.timeline)
    document = {"folder": str(target), "plan": plan.to_json(), "gap": search_result.gap, **result}
    if as_json:
        emit(document)
    else:
        print_rows([*_list_facts(search_result, predicted, result), ("report", str(target / "report.html"))])


def _draw_pictures(target: Path, searches: "tuple[SearchResult, ...]", predicted: "Simulation", run: "Run") -> None:
    draw_timeline(predicted.timeline, target / "predicted.png", title="predicted")
    draw_timeline(run.timeline, target / "measured.png", title="measured")
    draw_memory(predicted.timeline, target / "memory.png", title="predicted memory", reported=predicted.memory_capacity)
    histories = {search_result.algorithm: search_result.history for search_result in searches}
    draw_search(histories, target / "search.png", lower_bound=searches[0].lower_bound)


def _list_facts(
    search_result: "SearchResult", predicted: "Simulation", result: dict[str, Any]
) -> list[tuple[str, str]]:
    error = predicted.step_time / result["step_time"] - 1
    wall_time = format_time(search_result.wall_time)
    return [
        ("plan", predicted.plan.describe()),
        ("searched", f"{search_result.evaluations} evaluations of {search_result.considered} plans, {wall_time}"),
        ("loss", f"{result['loss'][0]:.3f} at the first step, {result['loss'][-1]:.3f} after {len(result['loss'])}"),
        ("step time measured", f"{format_time(result['step_time'])} (median of {STEPS - 2})"),
        ("step time predicted", f"{format_time(predicted.step_time)} ({error:+.0%})"),
        ("peak memory measured", format_size(result["peak_memory"])),
        ("peak memory predicted", format_size(predicted.peak_memory)),
        ("equal to one process", "yes" if result["verify"] and result["verify"]["equal"] else "no"),
    ]


def _write_report(target: Path, search_result: "SearchResult", predicted: "Simulation", result: dict[str, Any]) -> None:
    search = (
        f"Every plan of the space was considered by {search_result.algorithm}: {search_result.considered} plans, "
        f"of which {search_result.evaluations} were simulated. "
        f"The best was then run for real on {PROCESSES} processes."
    )
    sections = (
        Section("Result", (search,), (("what", "value"), *_list_facts(search_result, predicted, result))),
        Section("Prediction over measurement", image="comparison.png", caption="One step, predicted and measured."),
        Section("Predicted step", image="predicted.png", caption="What the simulator says."),
        Section("Measured step", image="measured.png", caption="What the processes did."),
        Section("Memory", image="memory.png", caption="Predicted memory of a device over the step."),
        Section("Search", image="search.png", caption="Best plan so far, against a random walk (MCMC)."),
        Section("What the prediction rests on", predicted.assumptions),
    )
    write(target / "report.md", to_markdown("meshwise on this machine", sections))
