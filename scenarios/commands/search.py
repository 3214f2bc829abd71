"""``meshwise search`` and ``meshwise compare``: the best plan found, and how algorithms get there."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.explanation import changes_lines, robust_lines
from meshwise.reports.pictures.search import draw_search
from meshwise.scenarios.commands.loading import describe_pricing, load_scenario, pricing_document
from meshwise.scenarios.commands.options import Brave, ClusterFile, Json, ScenarioName, SearchTarget
from meshwise.scenarios.commands.page import PageFile, check_page, write_page
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
from meshwise.scenarios.files.results import check_output, make_folder, write
from meshwise.scenarios.fitting import (
    EMPTY_SPACE,
    GRACE,
    describe_room,
    describe_shortfall,
    explain_space_shortfall,
    proves_nothing_fits,
    start_timer,
)
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.intervals import estimate_problem_risk, find_risk_limit
from meshwise.scenarios.launches import (
    RESERVE,
    Launch,
    Runnable,
    describe_launches,
    fastest_runnable,
    find_near_misses,
    list_launches,
    needs_runnable,
    seeks_trainer,
)
from meshwise.scenarios.robust_choice import check_robust, choose_robust
from meshwise.scenarios.scenario import SEARCH_SECONDS, Scenario
from meshwise.simulator.deadline import TimeLeft
from meshwise.simulator.units import Dimension, format_size, format_time, parse
from meshwise.strategies.explanation.shortfall import find_shortfall
from meshwise.strategies.explanation.uncertainty import format_limit
from meshwise.strategies.search.algorithms import PINNED_ALGORITHMS, list_installed
from meshwise.strategies.search.driver import BUDGET, FINISHED, OUT_OF_TIME, Progress, SearchResult
from meshwise.strategies.search.fan_out import processes
from meshwise.strategies.search.proposals import Certificate
from meshwise.strategies.search.space import Scope

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from meshwise.strategies.evaluation import Trial
    from meshwise.strategies.plan.plan import Plan
    from meshwise.strategies.plan.problem import Problem

LEAST_RESERVE = 2.0
"""Least reserve in seconds, up to half of the limit, to find a runnable plan: a search may end a second late."""

LATE = 0.5
"""Reserve in seconds without that: the last simulation may end late, and the plans of the space are counted."""

_NONE_RUNNABLE = "none was found in the time that is kept for it; --for megatron, torchtitan ... searches for one alone"

NEGLIGIBLE = 1e-6
"""Largest gap that is shown as a proven optimum: solvers in floating point leave as much."""

Budget = Annotated[int | None, typer.Option(min=1, help="Evaluations at most.")]
Seconds = Annotated[float | None, typer.Option(help="Wall time at most, in seconds.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of algorithms that draw.")]
AlgorithmName = Annotated[str | None, typer.Option(help="See `meshwise list algorithms`.")]
BestPlanFile = Annotated[
    str | None,
    typer.Option(
        help="Write the best plan so far (.json), whenever it becomes better; one that is fastest to run beside it."
    ),
]
Journal = Annotated[
    str | None, typer.Option(metavar="FILE", help="Keep every trial in this file, and go on from those that are in it.")
]
Workers = Annotated[int, typer.Option(help="Processes that evaluate plans; 0 for one a core.")]
Scheduler = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Evaluate plans on the Dask cluster at this address.")
]
Quantile = Annotated[
    float | None, typer.Option(help="Rank by this quantile of step time, out of memory taken for ever, as 0.95.")
]
Probability = Annotated[float, typer.Option(help="Probability up to which --robust allows a plan.")]


def search(
    scenario: ScenarioName,
    algorithm: AlgorithmName = None,
    budget: Budget = None,
    seconds: Seconds = None,
    seed: Seed = None,
    out: BestPlanFile = None,
    resume: Journal = None,
    workers: Workers = 1,
    scheduler: Scheduler = None,
    robust: Quantile = None,
    out_of_memory: Probability = 0.05,
    cluster: ClusterFile = None,
    target: SearchTarget = None,
    brave: Brave = False,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest plan that fits. Ctrl-C ends the search and keeps the best so far."""
    check_output(out, (".json",))
    check_page(report)
    check_robust(robust, out_of_memory)
    value = load_scenario(scenario, cluster=cluster, brave=brave)
    value.search_settings.make_algorithm(algorithm, seed)  # raises for a wrong name before workers start
    chosen_target = value.target if target is None else target
    value = value if chosen_target is None else value.for_target(chosen_target)
    keep, ticker, limit = _keep_best(out), Ticker(), value.limit_seconds(budget, seconds)
    time_left = start_timer(limit)
    follow = _follow_search(ticker)

    def tell(progress: Progress) -> None:
        keep(progress.best)
        follow(progress)

    with _open_executor(workers, scheduler) as executor:
        result = value.search(
            algorithm,
            budget=budget,
            seconds=_search_seconds(value, limit),
            seed=seed,
            resume=resume,
            progress=tell,
            executor=executor,
        )
    ticker.clear()
    keep(result.best)
    # without a limit, what follows gets its own time from now on
    time_left = start_timer(SEARCH_SECONDS) if limit is None else time_left
    answer = _Answer(value, result, to_json(result, value.problem) | pricing_document(value) | {"brave": brave})
    answer.add_trainers(time_left, budget, out)
    if robust is not None:
        answer.add_robust(robust, out_of_memory, time_left, keep)
    answer.add_reason(time_left)
    if report is not None:
        _write_page(report, value, [result], answer.robust_plan)
    answer.tell(as_json=as_json)
    if code := answer.tell_end(out):
        raise typer.Exit(code)


class _Answer:
    """The answer of `meshwise search`: the result of a search, and what follows from it."""

    def __init__(self, value: Scenario, result: SearchResult, document: dict[str, Any]) -> None:
        self.value, self.result, self.document = value, result, document
        self.nothing_fits = proves_nothing_fits(result)
        self.interrupted = result.interrupted
        self.places: tuple[Launch, ...] = ()
        self.runnable: Runnable | None = None
        self.runnable_time = 0.0
        self.runnable_file: str | None = None
        self.robust_plan: Plan | None = None

    def add_trainers(self, time_left: TimeLeft, budget: int | None, out: str | None) -> None:
        """Add the trainers in which the best plan runs, and where it fits in none, the fastest plan that does.

        That plan is written beside ``out`` under the name of its trainer, since the best plan would run nowhere.
        """
        best = self.result.best
        if best is not None:
            self.places = list_launches(self.value, best.plan)
        if best is not None and not self.interrupted and needs_runnable(self.value, self.places):
            start = time.monotonic()
            try:
                self.runnable = fastest_runnable(self.value, lambda: time_left() - GRACE, budget)
            except KeyboardInterrupt:
                self.interrupted = True
            self.runnable_time = time.monotonic() - start
        runnable = self.runnable
        if runnable is not None and out is not None:
            path = Path(out)
            self.runnable_file = str(path.with_name(f"{path.stem}-{runnable.trainer}{path.suffix}"))
            _write_plan(self.runnable_file, runnable.plan)
        self.document["trainers"] = [asdict(place) for place in self.places]
        self.document["runnable"] = None if runnable is None else asdict(runnable) | {"plan": runnable.plan.to_json()}
        self.document["runnable_wall_time"] = self.runnable_time

    def add_robust(
        self, quantile: float, max_risk: float, time_left: TimeLeft, keep: "Callable[[Trial | None], None]"
    ) -> None:
        """Add the plan that is best at a quantile of the step time, and keep it as the best plan."""
        best = self.result.best
        if best is not None and not self.interrupted:
            choice = choose_robust(self.value, quantile, max_risk, time_left, best.plan)
            self.document["robust"], self.robust_plan = choice.to_json(), choice.plan
            keep(replace(best, plan=choice.plan or best.plan))

    def add_reason(self, time_left: TimeLeft) -> None:
        """Where there is no plan, add the reason and the changes that would make one fit."""
        if self.nothing_fits:
            self.document |= explain_space_shortfall(self.value, time_left) | _find_near_misses(self.value, time_left)
        elif self.result.best is None:
            self.document["reason"] = _explain_failure(self.result)

    def tell(self, *, as_json: bool) -> None:
        """Print the plan, or everything as one JSON document."""
        if as_json:
            emit(self.document)
        elif self.result.best is not None:
            print_rows(self._list_lines(self.result.best))
            if self.runnable_file is not None:
                note(f"the plan that is fastest to run is in {self.runnable_file}")
            if "robust" in self.document:
                print("\n".join(robust_lines(self.document["robust"])))

    def _list_lines(self, best: "Trial") -> Iterator[tuple[str, str]]:
        """Yield the lines of the report: the best plan, what is proven of it, and where it runs."""
        value, result, problem = self.value, self.result, self.value.problem
        peak = best.evaluation.peak_memory
        yield "scenario", value.name
        yield from list_remarks(value)
        yield "algorithm", result.algorithm
        if value.target is not None:
            yield "space", f"what {Acceptance(value.target, value.spec).can}"
        yield "priced as", describe_pricing(value)
        yield "best plan", best.plan.describe()
        yield "step time", format_time(best.evaluation.step_time)
        devices = problem.cluster.accelerators
        usable, reported = min((problem.usable_memory(device), device.memory) for device in devices)
        yield "peak memory", f"{format_size(peak)}; {describe_room(usable, reported)}"
        risk, limit = estimate_problem_risk(problem, peak), format_limit(find_risk_limit(problem))
        yield "out of memory", f"with a probability of {risk:.1%} ({limit})"
        yield "runs in", describe_launches(self.places)
        if needs_runnable(value, self.places):
            yield "fastest to run", _NONE_RUNNABLE if self.runnable is None else self.runnable.describe()
        extent = "" if result.gap is None or result.scope is None else f" among {result.scope.plans:,} plans"
        yield "gap", _describe_gap(result.gap) + extent
        yield from _describe_scope(result.scope)
        if result.certificate is not None:
            yield "sum of operators' costs", _describe_proof(result.certificate)
        yield "plans", f"{result.considered:,} considered, {result.evaluations:,} simulated"
        end = "" if result.end == FINISHED else f", {result.end}"
        rest = f", and {format_time(self.runnable_time)} for what is fastest to run" if self.runnable_time else ""
        yield "wall time", format_time(result.wall_time) + end + rest

    def tell_end(self, out: str | None) -> int:
        """Print on stderr why the search ended without a plan or too early; return the exit code."""
        if self.interrupted:
            if out is not None and self.result.best is not None:
                note(f"the best plan so far is in {out}")
            return INTERRUPTED
        if self.result.best is not None:
            return DONE
        if not self.nothing_fits:
            note(_explain_failure(self.result))
            return FAILED
        note(_explain_misfit(self.value, self.result))
        for miss in self.document.get("near_misses", ()):
            note(f"  {miss['words']}")
        for line in changes_lines(self.document):
            note(line)
        return NOTHING_FITS


def _search_seconds(value: Scenario, limit: float | None) -> float | None:
    """Return the seconds for the search alone, less a reserve for what follows; ``None`` where it has no limit."""
    if limit is None or limit <= 0:
        return limit
    reserve = max(RESERVE * limit, LEAST_RESERVE) if seeks_trainer(value) else LATE
    return max(limit / 2, limit - reserve)


def _find_near_misses(value: Scenario, time_left: TimeLeft) -> dict[str, Any]:
    """Return the plans that fit and that the target cannot express, as JSON-ready data; empty without a target."""
    if value.target is None:
        return {}
    trainer = Acceptance(value.target, value.spec).versioned_name
    misses = [
        {
            "plan": miss.plan.describe(),
            "peak_memory": miss.peak_memory,
            "out_of_memory": miss.out_of_memory,
            "lacks": list(miss.refused_decisions),
            "words": miss.describe(trainer),
        }
        for miss in find_near_misses(value, time_left=time_left)
    ]
    return {"near_misses": misses}


@contextmanager
def _open_executor(workers: int, scheduler: str | None) -> "Iterator[Executor | None]":
    """Yield the executor that evaluates plans; None for one worker, which is this process.

    At the end of the block evaluations that still run are given up.
    """
    if scheduler is not None:
        from distributed import Client

        try:
            client = Client(scheduler, timeout="10s")
        except (OSError, ValueError) as error:
            words = " ".join(str(error).split())
            raise ValueError(f"--scheduler: the address of a Dask scheduler, met {scheduler}: {words}") from None
        with client:
            yield client.get_executor()
    elif workers == 1:
        yield None
    else:
        executor = processes(workers)
        try:
            yield executor
        finally:
            executor.give_up()


def _keep_best(out: str | None) -> "Callable[[Trial | None], None]":
    """Return a callback that writes the best plan to ``out`` whenever it is a new one."""
    last_best: Trial | None = None

    def keep(best: "Trial | None") -> None:
        nonlocal last_best
        if out is not None and best is not None and best is not last_best:
            _write_plan(out, best.plan)
            last_best = best

    return keep


def _write_plan(path: str, plan: "Plan") -> None:
    write(path, json.dumps(plan.to_json(), indent=2) + "\n")


def _follow_search(ticker: Ticker) -> Callable[[Progress], None]:
    def follow(progress: Progress) -> None:
        words = [format_time(progress.best.evaluation.step_time) if progress.best else "none fits yet"]
        if progress.lower_bound is not None:
            words.append(f"bound {format_time(progress.lower_bound)}")
        if progress.gap is not None:
            words.append(f"gap {progress.gap:.1%}")
        remaining_text = f" ({progress.seconds_left:.0f} s left)" if progress.seconds_left is not None else ""
        plans_text = f"{progress.considered:,} plans, {progress.evaluations:,} simulated"
        ticker(f"best {', '.join(words)}; {plans_text}, {progress.elapsed:.1f} s{remaining_text}")

    return follow


def to_json(result: SearchResult, problem: "Problem") -> dict[str, Any]:
    """Return a search result as JSON-ready data."""
    proof = result.certificate
    return {
        "algorithm": result.algorithm,
        "best": _trial_to_json(result.best, problem),
        "nearest": _trial_to_json(result.nearest, problem),
        "evaluations": result.evaluations,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "scope": None if result.scope is None else asdict(result.scope),
        "certificate": None if proof is None else asdict(proof),
        "wall_time": result.wall_time,
        "interrupted": result.interrupted,
        "end": result.end,
        "history": [{"evaluations": n, "elapsed": elapsed, "best": best} for n, elapsed, best in result.history],
    }


def _trial_to_json(trial: "Trial | None", problem: "Problem") -> dict[str, Any] | None:
    if trial is None:
        return None
    fields = ("step_time", "peak_memory", "fits")
    evaluation = {name: getattr(trial.evaluation, name) for name in fields}
    evaluation["out_of_memory"] = estimate_problem_risk(problem, trial.evaluation.peak_memory)
    return {"plan": trial.plan.to_json(), "evaluation": evaluation, "elapsed": trial.elapsed}


def _explain_misfit(value: Scenario, result: SearchResult) -> str:
    if result.nearest is None:
        return EMPTY_SPACE if value.target is None else f"{EMPTY_SPACE} that {Acceptance(value.target, value.spec).can}"
    plan = result.nearest.plan
    lacking = describe_shortfall(value.problem, find_shortfall(value.problem, plan))
    return f"nothing fits: the plan that needs the least on devices is {plan.describe()}: {lacking}"


def _explain_failure(result: SearchResult) -> str:
    """Return why a search found no plan, for a search that leaves open whether one fits."""
    num_plans = f"{result.considered:,} plan{'' if result.considered == 1 else 's'}"
    if result.nearest is not None and result.nearest.evaluation.fits:
        return f"{result.algorithm} evaluated no plan that fits; one that does is {result.nearest.plan.describe()}"
    ends = {OUT_OF_TIME: "time ran out", BUDGET: "the budget was used"}
    if result.end in ends:
        return f"{ends[result.end]} after {num_plans} before one was found that fits; whether one does is not known"

    search_extent = f"{num_plans} of one stage" if result.algorithm in PINNED_ALGORITHMS else num_plans
    return f"{result.algorithm} looked at {search_extent} and found none that fits; whether another does is not known"


def _describe_gap(gap: float | None) -> str:
    if gap is None:
        return "none known"
    return "proven optimal" if gap <= NEGLIGIBLE else f"{gap:.1%}"


def _describe_proof(certificate: Certificate) -> str:
    """Return in words what a certificate proves about the sum of operators' costs."""
    scope_text = f" among {certificate.among}" if certificate.among else ""
    sentences = ["nothing proven"]
    if certificate.gap is not None:
        bound_text = f"within {100 * certificate.gap:.2g} % of " if certificate.gap > NEGLIGIBLE else ""
        sentences = [f"proven {bound_text}the least{scope_text}"]
    if certificate.memory_price is not None:
        saved_time = certificate.memory_price * parse("1 GiB", Dimension.SIZE)
        sentences.append(
            f"1 GiB more a device saves {format_time(saved_time)} a step" if saved_time else "memory does not bind"
        )
    return "; ".join(sentences)


def _describe_scope(scope: Scope | None) -> list[tuple[str, str]]:
    """Return the lines on what the search tried and did not try; operator algorithms have no scope of layouts."""
    if scope is None:
        return [("space", "shardings of single operators, on one stage")]
    return [("space", "; ".join(scope.tried)), ("not tried", ", ".join(scope.left_out))]


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
    names = _parse_algorithms(algorithms)
    for name in names:
        value.search_settings.make_algorithm(name, seed)  # a wrong name is an error before the first search
    target = make_folder(out) if out is not None else None
    results: list[SearchResult] = []
    for name in names:
        ticker = Ticker()
        results.append(value.search(name, budget=budget, seconds=seconds, seed=seed, progress=_follow_search(ticker)))
        ticker.clear()
        if results[-1].interrupted:
            break
    if target is not None:
        _write_comparison(target, results, value.problem)
    if report is not None:
        _write_page(report, value, results)
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
    note(_explain_failure(results[0]) if known is None else _explain_misfit(value, known))
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


def _write_page(path: str, value: Scenario, results: list[SearchResult], chosen: "Plan | None" = None) -> None:
    """Write the page of ``chosen``, by default the fastest plan found, with all searches; nothing where none fits."""
    best_trials = [result.best for result in results if result.best is not None]
    if best_trials:
        plan = chosen or min(best_trials, key=lambda trial: trial.evaluation.step_time).plan
        write_page(path, value, value.simulate(plan), searches=[to_json(result, value.problem) for result in results])


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
    risk = estimate_problem_risk(problem, best.evaluation.peak_memory) if best else None
    plan = best.plan.describe() if best else ""
    return _Row(result.algorithm, time, risk, result.gap, result.evaluations, result.wall_time, result.end, plan)


def _print_comparison(results: list[SearchResult], problem: "Problem") -> None:
    rows = [
        (
            row.algorithm,
            format_time(row.step_time) if row.step_time else "none found",
            "" if row.out_of_memory is None else f"{row.out_of_memory:.1%}",
            _describe_gap(row.gap),
            f"{row.evaluations:,}",
            format_time(row.wall_time),
            row.end,
            row.plan,
        )
        for row in (_build_row(result, problem) for result in results)
    ]
    print_table([word.replace("_", " ") for word in _Row._fields], rows)


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
