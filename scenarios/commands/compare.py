"""``meshwise compare``: how several algorithms get to their best plans on one problem."""

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.pictures.search import draw_search
from meshwise.scenarios.commands.loading import load_scenario, tell_usual_loads
from meshwise.scenarios.commands.options import Budget, ClusterFile, Json, ScenarioName, Seconds, Seed
from meshwise.scenarios.commands.page import PageFile, check_page
from meshwise.scenarios.commands.search_progress import follow_search
from meshwise.scenarios.commands.search_report import (
    describe_gap,
    explain_failure,
    to_json,
    write_search_page,
)
from meshwise.scenarios.console import (
    DONE,
    FAILED,
    NOTHING_FITS,
    Ticker,
    emit,
    list_remarks,
    note,
    print_rows,
    print_table,
)
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.fitting import explain_misfit, proves_nothing_fits
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.files import escape_text
from meshwise.simulator.units import format_time
from meshwise.strategies.search.algorithms import list_installed
from meshwise.strategies.search.driver import SearchResult

if TYPE_CHECKING:
    from meshwise.strategies.plan.problem import Problem


def compare(
    scenario: ScenarioName,
    algorithms: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    budget: Budget = None,
    seconds: Seconds = None,
    seed: Seed = None,
    cluster: ClusterFile = None,
    out: Annotated[str | None, typer.Option(help="Folder for table, results and picture.")] = None,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Run several algorithms on one problem: quality against evaluations and against time."""
    check_page(report)
    value = load_scenario(scenario, cluster=cluster)
    tell_usual_loads(value)
    names = _parse_algorithms(algorithms)
    for name in names:
        value.search_settings.make_algorithm(name, seed)  # a wrong name is an error before the first search
    target = make_folder(out) if out is not None else None
    results: list[SearchResult] = []
    for name in names:
        ticker = Ticker()
        tell = follow_search(ticker)
        results.append(value.search_plan(name, budget=budget, seconds=seconds, seed=seed, progress=tell))
        ticker.clear()
        if results[-1].interrupted:
            break
    if target is not None:
        _write_comparison(target, results, value.problem)
    if report is not None:
        write_search_page(report, value, results)
    if as_json:
        emit([to_json(result, value.problem) for result in results])
    else:
        print_rows([*list_remarks(value), ("space", _describe_space(value))])
        _print_comparison(results, value.problem)
    if code := _tell_end(value, results):
        raise typer.Exit(code)


def _tell_end(value: Scenario, results: list[SearchResult]) -> int:
    """Print on stderr why no search found a plan, if none did; return the exit code."""
    if results[-1].interrupted:
        return INTERRUPTED
    if any(result.best is not None for result in results):
        return DONE
    known = next(filter(proves_nothing_fits, results), None)
    note(explain_failure(results[0]) if known is None else explain_misfit(value, known.nearest))
    return FAILED if known is None else NOTHING_FITS


def _parse_algorithms(text: str) -> list[str]:
    """Return the comma-separated names of algorithms, or all; raise ``ValueError`` where a name is empty."""
    if text == "all":
        return list(list_installed())
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        known = ", ".join(list_installed())
        raise ValueError(f"--algorithms: all, or names of {known} with commas between, met {text!r}; nearest: all")
    return names


def _describe_space(value: Scenario) -> str:
    """Return in words the limits on the plans of a scenario's search space."""
    space_fields = dict(value.search_settings.space)
    limits = [name for name, values in space_fields.items() if values is True]
    limits += [
        f"{name} {', '.join(map(str, values))}" for name, values in space_fields.items() if not isinstance(values, bool)
    ]
    if value.target is not None:
        limits.append(f"what {Acceptance(value.target, value.spec).can}")
    return "; ".join(limits) or "no limits"


class _Row(NamedTuple):
    """A line of the comparison: what an algorithm found; without a plan where it found none that fits."""

    algorithm: str
    step_time: float | None
    out_of_memory: float | None
    gap: float | None
    evaluations: int
    wall_time: float
    end: str
    plan: str


def _build_row(result: SearchResult, problem: "Problem") -> _Row:
    best = result.best
    time = best.evaluation.step_time if best else None
    risk = forecast_plan(problem, best.plan).out_of_memory if best else None
    plan = best.plan.describe() if best else ""
    return _Row(result.algorithm, time, risk, result.gap, result.evaluations, result.wall_time, result.end, plan)


def _print_comparison(results: list[SearchResult], problem: "Problem") -> None:
    """Print a line an algorithm, and then each plan once, fastest first, with the algorithms that found it."""
    rows = [_build_row(result, problem) for result in results]
    cells = [
        (
            row.algorithm,
            format_time(row.step_time) if row.step_time else "none found",
            "" if row.out_of_memory is None else f"{row.out_of_memory:.1%}",
            describe_gap(row.gap),
            f"{row.evaluations:,}",
            format_time(row.wall_time),
            row.end,
        )
        for row in rows
    ]
    print_table([word.replace("_", " ") for word in _Row._fields[:-1]], cells)
    finders: dict[tuple[float, str], list[str]] = {}
    for row in rows:
        if row.step_time:
            finders.setdefault((row.step_time, row.plan), []).append(row.algorithm)
    for (step_time, plan), algorithms in sorted(finders.items()):
        print(f"\n{format_time(step_time)} by {', '.join(algorithms)}:\n  {escape_text(plan)}")


def _write_comparison(target: Path, results: list[SearchResult], problem: "Problem") -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_Row._fields)
    writer.writerows(_build_row(result, problem) for result in results)
    write(target / "compare.csv", text.getvalue())
    write(target / "compare.json", json.dumps([to_json(result, problem) for result in results], indent=2) + "\n")
    histories = {result.algorithm: result.history for result in results if result.history}
    if histories:
        draw_search(histories, target / "compare.png", lower_bound=_common_bound(results))


def _common_bound(results: list[SearchResult]) -> float | None:
    """Return the largest lower bound among the searches of the largest space; other bounds are of a part of it."""
    sizes = {id(result): result.scope.plans for result in results if result.scope is not None}
    largest = max(sizes.values(), default=0)
    bounds = (result.lower_bound for result in results if sizes.get(id(result)) == largest)
    return max((bound for bound in bounds if bound is not None), default=None)
