"""``meshwise simulate``: one simulated step of one plan."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.reports.explanation import changes_lines
from meshwise.reports.loads import list_loads_rows
from meshwise.reports.pictures.goodput import draw_goodput
from meshwise.reports.pictures.memory import draw_memory
from meshwise.reports.pictures.timeline import draw_timeline
from meshwise.reports.tables import console, print_result
from meshwise.scenarios.commands.loading import add_plan_target, describe_pricing, load_scenario, pricing_document
from meshwise.scenarios.commands.options import ClusterFile, Json, PlanFile, PricedTarget, ScenarioName
from meshwise.scenarios.commands.page import write_page
from meshwise.scenarios.commands.traces import compare_measured, print_measured, write_chakra, write_kineto, write_trace
from meshwise.scenarios.console import FAILED, NOTHING_FITS, Ticker, emit, list_remarks, note, print_rows, print_table
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.fitting import explain_shortfall, explain_unfit_plan, find_nearest_fit
from meshwise.simulator.reliability.goodput import best_interval
from meshwise.simulator.units import format_count, format_duration, format_size, format_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.schedules.schedule import to_csv

if TYPE_CHECKING:
    from meshwise.scenarios.oracle_check import Check, MemoryLine, TrafficLine
    from meshwise.scenarios.scenario import Scenario
    from meshwise.scenarios.simulation import Simulation
    from meshwise.simulator.timeline import Timeline


class Engine(StrEnum):
    """Evaluators of a program."""

    DISCRETE_EVENT = "discrete_event"
    LONGEST_PATH = "longest_path"


def simulate(
    scenario: ScenarioName,
    plan: PlanFile = None,
    cluster: ClusterFile = None,
    target: PricedTarget = None,
    brave: Annotated[
        bool, typer.Option("--brave", help="Take a plan that may run out of memory, as `search --brave` does.")
    ] = False,
    engine: Annotated[Engine, typer.Option(help="What evaluates the step.")] = Engine.DISCRETE_EVENT,
    timeline: Annotated[
        str | None, typer.Option(help="Draw the step (.png, .svg), or write it as a page to zoom into (.html).")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Draw memory over the step (.png, .svg).")] = None,
    trace: Annotated[str | None, typer.Option(help="Write a trace for a trace viewer (.json, .pftrace).")] = None,
    ranks: Annotated[
        str, typer.Option(help="Whose steps traces show: classes (ranks alike as one), all, or ranks as 0-7,16.")
    ] = "classes",
    kineto: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write traces as torch.profiler does, a file a rank.")
    ] = None,
    chakra: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write Chakra execution traces, a file a rank.")
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Compare with a rank's torch.profiler trace (.json, .json.gz); repeat it."),
    ] = None,
    schedule_csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the schedule as torch.distributed.pipelining reads it.")
    ] = None,
    save: Annotated[str | None, typer.Option(help="Write result, plan and spans (.json).")] = None,
    goodput: Annotated[str | None, typer.Option(help="Draw the scenario's long run (.png, .svg).")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Set memory and collectives beside one rank of each kind of the executor's model."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every assumption, not the first few.")] = False,
    as_json: Json = False,
) -> None:
    """Simulate one step of a plan: time, memory, and where both go.

    With --check one rank of every kind of the executor's own model takes a step too, on tensors without data and in a
    group that does not exist, with as many ranks as the plan has. What it keeps by category, its peak and its
    collectives stand beside the simulator's: exit code 0 where states and collectives are the same and peaks within
    3 %, 1 where not, 2 where the executor cannot build the plan. It needs torch.
    """
    outputs = (
        (timeline, (".png", ".svg", ".html")),
        (memory, (".png", ".svg")),
        (trace, (".json", ".pftrace")),
        (schedule_csv, (".csv",)),
        (save, (".json",)),
        (goodput, (".png", ".svg")),
    )
    for path, endings in outputs:
        check_output(path, endings)
    value = add_plan_target(load_scenario(scenario, plan, cluster, target, brave=brave), plan)
    if goodput is not None and value.run is None:
        raise ValueError(f"{value.file}: run: a picture of goodput needs a run, met none")
    result = value.simulate(engine=engine.value)
    document = result.to_json() | pricing_document(value)
    if not result.fits:
        _tell_what_would_fit(value, result, document, as_json=as_json)
        raise typer.Exit(NOTHING_FITS)
    if save is not None:
        figures = {name: value for name, value in document.items() if name != "wall_time"}  # the same bytes every time
        write(
            save,
            json.dumps({"result": figures, "plan": result.plan.to_json(), "timeline": _spans_to_json(result.timeline)}),
        )
    _draw_pictures(result, value, timeline, memory)
    if trace is not None:
        write_trace(result.timeline, trace, ranks)
    if kineto is not None:
        write_kineto(result.timeline, kineto, ranks)
    if chakra is not None:
        write_chakra(value, result, chakra)
    if schedule_csv is not None:
        write(schedule_csv, to_csv(result.plan.actions))
    step_difference = compare_measured(result, measured) if measured else None
    if step_difference is not None:
        document["difference"] = step_difference.to_json()
    check_result = _run_check(value) if check else None
    if check_result is not None:
        document["check"] = check_result.to_json()
    if goodput is not None and result.goodput is not None:
        best = best_interval(result.goodput.run, len(result.goodput.outcomes))
        draw_goodput(result.goodput, best, Path(goodput), title=value.name)
    if as_json:
        emit(document)
    else:
        _print_step(value, result.plan.describe(), document, verbose=verbose)
        if step_difference is not None:
            print_measured(step_difference)
        if check_result is not None:
            _print_check(check_result)
    if check_result is not None and not check_result.equal:
        note("the simulator and the executor's model differ")
        raise typer.Exit(FAILED)


def _tell_what_would_fit(value: "Scenario", result: "Simulation", document: dict[str, Any], *, as_json: bool) -> None:
    """Print why a plan does not fit, the nearest one that does, and changes that free memory."""
    problem, accepts = value.problem, value.make_space().accepts
    misfit_reason, nearest_plan = (
        explain_unfit_plan(problem, result.plan),
        find_nearest_fit(problem, result.plan, accepts),
    )
    suggestions = explain_shortfall(problem, [recover_layout(problem, result.plan)], accepts)
    if as_json:
        changes = {
            "reason": misfit_reason,
            "nearest": nearest_plan.to_json() if nearest_plan else None,
            "changes": suggestions["changes"],
        }
        emit(document | changes)
    if nearest_plan is None:
        note(f"{misfit_reason}; no plan near it fits")
    else:
        step_time = format_time(SimulatedCost(problem).evaluate(nearest_plan).step_time)
        note(f"{misfit_reason}; nearest plan that fits: {nearest_plan.describe()}, {step_time} a step")
    pricing_line = f"priced as {describe_pricing(value, simulated=True)}"
    for line in (*changes_lines(suggestions), pricing_line, *value.remarks):
        note(line)


def _run_check(value: "Scenario") -> "Check":
    ticker = Ticker()
    try:
        return value.check(progress=lambda text: ticker(f"check: {text}"))
    finally:
        ticker.clear()


def _print_check(check: "Check") -> None:
    """Print memory and collectives of the simulator beside those of the executor's model, rank by rank."""
    for rank in check.ranks:
        print(f"\ncheck of rank {rank.rank}, stages {', '.join(map(str, rank.stages))}")
        print_table(("memory", "simulated", "executor", ""), [_memory_cells(line) for line in rank.memory])
        print_table(("collectives", "simulated", "executor", ""), [_traffic_cells(line) for line in rank.traffic])


def _memory_cells(line: "MemoryLine") -> tuple[str, ...]:
    return line.category, format_size(line.simulated), format_size(line.oracle), _describe_equality(line.equal)


def _traffic_cells(line: "TrafficLine") -> tuple[str, ...]:
    sides = ((line.simulated, line.simulated_bytes), (line.oracle, line.oracle_bytes))
    return (
        f"{line.kind} along {', '.join(line.axes)}",
        *(f"{count} of {format_size(size)}" for count, size in sides),
        _describe_equality(line.equal),
    )


def _describe_equality(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def _draw_pictures(result: "Simulation", value: "Scenario", timeline: str | None, memory: str | None) -> None:
    if timeline is not None and Path(timeline).suffix.lower() == ".html":
        write_page(timeline, value, result)
    elif timeline is not None:
        draw_timeline(result.timeline, Path(timeline), title=value.name)
    if memory is not None:
        draw_memory(result.timeline, Path(memory), title=value.name, reported=result.memory_capacity)


def _spans_to_json(timeline: "Timeline") -> dict[str, Any]:
    fields = timeline.spans[0]._fields if timeline.spans else ()
    return {
        "source": timeline.source,
        "rank_classes": [members._asdict() for members in timeline.rank_classes],
        "spans": {name: [getattr(span, name) for span in timeline.spans] for name in fields},
    }


def _print_step(value: "Scenario", plan: str, document: dict[str, Any], *, verbose: bool) -> None:
    pricing = describe_pricing(value, simulated=True)
    print_rows([("scenario", value.name), *list_remarks(value), ("priced as", pricing), ("plan", plan)])
    other_assumptions = [line for line in document["assumptions"] if line not in value.remarks]
    print_result(console(), document | {"assumptions": other_assumptions}, verbose=verbose)
    if "loads" in document:
        print_rows(list_loads_rows(document["loads"]))
    if "goodput" in document:
        print_rows(_list_goodput_rows(document["goodput"]))


def _list_goodput_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines on the goodput of a long run and on its losses."""
    wall_time = result["wall_time"]
    length, interval = format_duration(wall_time), format_duration(result["checkpoint_interval"])
    goodput = f"{result['goodput']:.1%} +- {result['standard_error']:.1%} over {length}, checkpoint every {interval}"
    parts = {
        "lost": "training repeated",
        "checkpointing": "checkpoints",
        "recovering": "recovery",
        "waiting": "waiting for hosts",
    }
    losses = ", ".join(f"{result[part] / wall_time:.1%} {name}" for part, name in parts.items())
    interruptions = format_count(round(result["interruptions"]), "interruption")
    return [("goodput", goodput), ("losses", f"{interruptions}: {losses}")]
