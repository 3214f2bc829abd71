"""``meshwise search`` and ``meshwise compare``: the best plan found, and how algorithms get there."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    describe_launches,
    fastest_runnable,
    find_near_misses,
    list_launches,
    needs_runnable,
    seeks_trainer,
)
from meshwise.scenarios.robust_choice import check_robust, choose_robust
from meshwise.scenarios.scenario import SEARCH_SECONDS
from meshwise.simulator.units import Dimension, format_size, format_time, parse
from meshwise.strategies.explanation.shortfall import find_shortfall
from meshwise.strategies.explanation.uncertainty import format_limit
from meshwise.strategies.search.algorithms import PINNED_ALGORITHMS, list_installed
from meshwise.strategies.search.driver import BUDGET, FINISHED, OUT_OF_TIME
from meshwise.strategies.search.fan_out import processes

if TYPE_CHECKING:
    from concurrent.futures import Executor

LEAST_RESERVE = 2.0
"""Least reserve in seconds, up to half of the limit, to find a runnable plan: a search may end a second late."""

LATE = 0.5
"""Reserve in seconds without that: the last simulation may end late, and the plans of the space are counted."""

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
    str | None,
    typer.Option(metavar="FILE", help="Keep every trial in this file, and go on from those that are in it."),
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
    _check_options(out, report, robust, out_of_memory)
    value = load_scenario(scenario, cluster=cluster, brave=brave)
    value.search_settings.make_algorithm(algorithm, seed)  # raises for a wrong name before workers start
    value = _aim_at_target(value, target)
    keep, ticker, limit = _keep_best(out), Ticker(), value.limit_seconds(budget, seconds)
    time_left = _seconds_left(limit)
    settings = {"budget": budget, "seconds": _search_seconds(value, limit), "seed": seed, "resume": resume}
    with _open_executor(workers, scheduler) as executor:
        result = value.search(
            algorithm, progress=_tell_both(keep, _follow_search(ticker)), executor=executor, **settings
        )
    ticker.clear()
    keep(result.best)
    # without a limit, what follows gets its own time from now on
    time_left = _seconds_left(limit) if limit is None else time_left
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


def _check_options(out: str | None, report: str | None, robust: float | None, out_of_memory: float) -> None:
    """Raise ``ValueError`` where an option of a search is wrong, before anything slow is loaded."""
    check_output(out, (".json",))
    check_page(report)
    check_robust(robust, out_of_memory)


def _aim_at_target(value: Any, target: str | None) -> Any:
    """Return a scenario whose search is limited to plans that its target can express; ``target`` replaces its own."""
    chosen = value.target if target is None else target
    return value if chosen is None else value.for_target(chosen)


def _tell_both(keep: Callable[[Any], None], follow: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a callback that calls ``keep`` with the best plan of a search and ``follow`` with its progress."""

    def tell(progress: Any) -> None:
        keep(progress.best)
        follow(progress)

    return tell


class _Answer:
    """The answer of `meshwise search`: the result of a search, and what follows from it."""

    def __init__(self, value: Any, result: Any, document: dict[str, Any]) -> None:
        self.value, self.result, self.document = value, result, document
        self.nothing_fits = proves_nothing_fits(result)
        self.interrupted = result.interrupted
        self.places: Any = ()
        self.runnable: Any = None
        self.runnable_time = 0.0
        self.runnable_file: str | None = None
        self.robust_plan: Any = None

    @property
    def goes_on(self) -> bool:
        """Whether the search found a plan and was not interrupted, so that more is computed from the plan."""
        return self.result.best is not None and not self.interrupted

    def add_trainers(self, time_left: Callable[[], float], budget: int | None, out: str | None) -> None:
        """Add the trainers in which the best plan runs, and where it fits in none, the fastest plan that does.

        That plan is written beside ``out`` under the name of its trainer, since the best plan would run nowhere.
        """
        if self.result.best is not None:
            self.places = list_launches(self.value, self.result.best.plan)
        if self.goes_on and needs_runnable(self.value, self.places):
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
        self, quantile: float, max_risk: float, time_left: Callable[[], float], keep: Callable[[Any], None]
    ) -> None:
        """Add the plan that is best at a quantile of the step time, and keep it as the best plan."""
        if self.goes_on:
            best = self.result.best
            choice = choose_robust(self.value, quantile, max_risk, time_left, best.plan)
            self.document["robust"], self.robust_plan = choice.to_json(), choice.plan
            keep(replace(best, plan=choice.plan or best.plan))

    def add_reason(self, time_left: Callable[[], float]) -> None:
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
            _print_result(self.value, self.result, self.places, self.runnable, self.runnable_time)
            if self.runnable_file is not None:
                note(f"the plan that is fastest to run is in {self.runnable_file}")
            _print_more("robust", self.document)

    def tell_end(self, out: str | None) -> int:
        """Print on stderr why the search ended without a plan or too early; return the exit code."""
        if self.interrupted:
            if out is not None and self.result.best is not None:
                note(f"the best plan so far is in {out}")
            return INTERRUPTED
        if self.result.best is not None:
            return DONE
        self._tell_nothing()
        return NOTHING_FITS if self.nothing_fits else FAILED

    def _tell_nothing(self) -> None:
        """Print on stderr why there is no plan, and the changes that would make one fit."""
        if not self.nothing_fits:
            note(_explain_failure(self.result))
            return
        note(_explain_misfit(self.value, self.result))
        for miss in self.document.get("near_misses", ()):
            note(f"  {miss['words']}")
        _print_more("changes", self.document)


def _seconds_left(limit: float | None) -> Callable[[], float]:
    """Return a clock of the seconds left for a search and what follows it; without a limit, for what follows."""
    return start_timer(SEARCH_SECONDS if limit is None else limit)


def _search_seconds(value: Any, limit: float | None) -> float | None:
    """Return the seconds for the search alone, less a reserve for what follows; ``None`` where it has no limit."""
    if limit is None or limit <= 0:
        return limit
    reserve = max(RESERVE * limit, LEAST_RESERVE) if seeks_trainer(value) else LATE
    return max(limit / 2, limit - reserve)


def _find_target(value: Any) -> Any:
    if value.target is None:
        return None

    return Acceptance(value.target, value.spec)


def _find_near_misses(value: Any, time_left: Callable[[], float]) -> dict[str, Any]:
    """Return the plans that fit and that the target cannot express, as JSON-ready data; empty without a target."""
    target = _find_target(value)
    if target is None:
        return {}

    return {
        "near_misses": [
            {
                "plan": miss.plan.describe(),
                "peak_memory": miss.peak_memory,
                "out_of_memory": miss.out_of_memory,
                "lacks": list(miss.refused_decisions),
                "words": miss.describe(target.versioned_name),
            }
            for miss in find_near_misses(value, time_left=time_left)
        ]
    }


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


def _keep_best(out: str | None) -> Callable[[Any], None]:
    """Return a callback that writes the best plan to ``out`` whenever it is a new one."""
    last_best: list[Any] = [None]

    def keep(best: Any) -> None:
        if out is not None and best is not last_best[0]:
            _write_plan(out, best.plan)
            last_best[0] = best

    return keep


def _write_plan(path: str, plan: Any) -> None:
    write(path, json.dumps(plan.to_json(), indent=2) + "\n")


def _print_more(section: str, document: dict[str, Any]) -> None:
    """Print a section of the document, if it has it: the robust choice on stdout, or changes to fit on stderr."""
    if section == "robust" and section in document:
        print("\n".join(robust_lines(document[section])))
    if section == "changes":
        for line in changes_lines(document):
            note(line)


def _follow_search(ticker: Ticker) -> Any:
    def follow(progress: Any) -> None:
        words = [format_time(progress.best.evaluation.step_time) if progress.best else "none fits yet"]
        if progress.lower_bound is not None:
            words.append(f"bound {format_time(progress.lower_bound)}")
        if progress.gap is not None:
            words.append(f"gap {progress.gap:.1%}")
        remaining_text = f" ({progress.seconds_left:.0f} s left)" if progress.seconds_left is not None else ""
        plans_text = f"{progress.considered:,} plans, {progress.evaluations:,} simulated"
        ticker(f"best {', '.join(words)}; {plans_text}, {progress.elapsed:.1f} s{remaining_text}")

    return follow


def to_json(result: Any, problem: Any) -> dict[str, Any]:
    """Return a search result as JSON-ready data."""
    return {
        "algorithm": result.algorithm,
        "best": _trial_to_json(result.best, problem),
        "nearest": _trial_to_json(result.nearest, problem),
        "evaluations": result.evaluations,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "scope": None if result.scope is None else asdict(result.scope),
        "certificate": _certificate_to_json(result.certificate),
        "wall_time": result.wall_time,
        "interrupted": result.interrupted,
        "end": result.end,
        "history": [{"evaluations": n, "elapsed": elapsed, "best": best} for n, elapsed, best in result.history],
    }


def _certificate_to_json(certificate: Any) -> dict[str, Any] | None:
    if certificate is None:
        return None
    return {name: getattr(certificate, name) for name in ("gap", "memory_price", "among")}


def _trial_to_json(trial: Any, problem: Any) -> dict[str, Any] | None:
    if trial is None:
        return None
    fields = ("step_time", "peak_memory", "fits")
    evaluation = {name: getattr(trial.evaluation, name) for name in fields}
    evaluation["out_of_memory"] = estimate_problem_risk(problem, trial.evaluation.peak_memory)
    return {"plan": trial.plan.to_json(), "evaluation": evaluation, "elapsed": trial.elapsed}


def _explain_misfit(value: Any, result: Any) -> str:
    if result.nearest is None:
        target = _find_target(value)
        return f"{EMPTY_SPACE} that {target.can}" if target is not None else EMPTY_SPACE
    plan = result.nearest.plan
    lacking = describe_shortfall(value.problem, find_shortfall(value.problem, plan))
    return f"nothing fits: the plan that needs the least on devices is {plan.describe()}: {lacking}"


def _explain_failure(result: Any) -> str:
    """Return why a search found no plan, for a search that leaves open whether one fits."""
    num_plans = f"{result.considered:,} plan{'' if result.considered == 1 else 's'}"
    if result.nearest is not None and result.nearest.evaluation.fits:
        return f"{result.algorithm} evaluated no plan that fits; one that does is {result.nearest.plan.describe()}"
    if result.end == OUT_OF_TIME:
        return f"time ran out after {num_plans} before one was found that fits; whether one does is not known"
    if result.end == BUDGET:
        return f"the budget was used after {num_plans} before one was found that fits; whether one does is not known"

    search_extent = f"{num_plans} of one stage" if result.algorithm in PINNED_ALGORITHMS else num_plans
    return f"{result.algorithm} looked at {search_extent} and found none that fits; whether another does is not known"


def _describe_gap(gap: float | None) -> str:
    if gap is None:
        return "none known"
    return "proven optimal" if gap <= NEGLIGIBLE else f"{gap:.1%}"


def _describe_proof(certificate: Any) -> str:
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


def _describe_room(problem: Any) -> str:
    """Return in words the usable and the reported memory of the smallest device."""
    return describe_room(
        *min((problem.usable_memory(device), device.memory) for device in problem.cluster.accelerators)
    )


def _describe_risk(value: Any, peak: float) -> str:
    """Return in words the probability of running out of memory at a peak in bytes, and the limit on it."""
    limit = format_limit(find_risk_limit(value.problem))
    return f"with a probability of {estimate_problem_risk(value.problem, peak):.1%} ({limit})"


def _describe_runnable(runnable: Any) -> str:
    """Return in words the fastest plan that fits in a trainer, or that none was found and what to do."""
    if runnable is None:
        return "none was found in the time that is kept for it; --for megatron, torchtitan ... searches for one alone"
    return str(runnable.describe())


def _print_result(value: Any, result: Any, places: Any, runnable: Any, runnable_time: float) -> None:
    best, certificate = result.best, result.certificate
    target = _find_target(value)
    runnable_text = f", and {format_time(runnable_time)} for what is fastest to run" if runnable_time else ""
    print_rows(
        [
            ("scenario", value.name),
            *list_remarks(value),
            ("algorithm", result.algorithm),
            *([("space", f"what {target.can}")] if target is not None else []),
            ("priced as", describe_pricing(value)),
            ("best plan", best.plan.describe()),
            ("step time", format_time(best.evaluation.step_time)),
            ("peak memory", f"{format_size(best.evaluation.peak_memory)}; {_describe_room(value.problem)}"),
            ("out of memory", _describe_risk(value, best.evaluation.peak_memory)),
            ("runs in", describe_launches(places)),
            *([("fastest to run", _describe_runnable(runnable))] if needs_runnable(value, places) else []),
            ("gap", _describe_gap(result.gap) + _describe_extent(result)),
            *_describe_scope(result.scope),
            *([("sum of operators' costs", _describe_proof(certificate))] if certificate is not None else []),
            ("plans", f"{result.considered:,} considered, {result.evaluations:,} simulated"),
            (
                "wall time",
                format_time(result.wall_time) + ("" if result.end == FINISHED else f", {result.end}") + runnable_text,
            ),
        ]
    )


def _describe_scope(scope: Any) -> list[tuple[str, str]]:
    """Return the lines on what the search tried and did not try; operator algorithms have no scope of layouts."""
    if scope is None:
        return [("space", "shardings of single operators, on one stage")]
    return [("space", "; ".join(scope.tried)), ("not tried", ", ".join(scope.left_out))]


def _describe_extent(result: Any) -> str:
    """Return in words the number of plans that the gap covers; empty without a gap."""
    return "" if result.gap is None or result.scope is None else f" among {result.scope.plans:,} plans"


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
    results = []
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


def _tell_end(value: Any, results: list[Any]) -> int:
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


def _write_page(path: str, value: Any, results: list[Any], chosen: Any = None) -> None:
    """Write the page of ``chosen``, by default the fastest plan found, with all searches; nothing where none fits."""
    best_trials = [result.best for result in results if result.best is not None]
    if best_trials:
        plan = chosen or min(best_trials, key=lambda trial: trial.evaluation.step_time).plan
        write_page(path, value, value.simulate(plan), searches=[to_json(result, value.problem) for result in results])


def _describe_space(value: Any) -> str:
    """Return in words the limits on the plans of a scenario's search space."""
    space_fields = dict(value.search_settings.space)
    limits = [name for name, values in space_fields.items() if values is True]
    limits += [
        f"{name} {', '.join(map(str, values))}" for name, values in space_fields.items() if not isinstance(values, bool)
    ]
    target = _find_target(value)
    return "; ".join([*limits, *([f"what {target.can}"] if target is not None else [])]) or "no limits"


_HEAD = ("algorithm", "step_time", "out_of_memory", "gap", "evaluations", "wall_time", "end", "plan")


def _list_rows(results: list[Any], problem: Any) -> list[tuple[Any, ...]]:
    rows = []
    for result in results:
        best = result.best
        time = best.evaluation.step_time if best else None
        risk = estimate_problem_risk(problem, best.evaluation.peak_memory) if best else None
        plan = best.plan.describe() if best else ""
        rows.append((result.algorithm, time, risk, result.gap, result.evaluations, result.wall_time, result.end, plan))
    return rows


def _print_comparison(results: list[Any], problem: Any) -> None:
    rows = [
        (
            name,
            format_time(time) if time else "none found",
            "" if risk is None else f"{risk:.1%}",
            _describe_gap(gap),
            f"{count:,}",
            format_time(wall),
            end,
            plan,
        )
        for name, time, risk, gap, count, wall, end, plan in _list_rows(results, problem)
    ]
    print_table([word.replace("_", " ") for word in _HEAD], rows)


def _write_comparison(target: Path, results: list[Any], problem: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    writer.writerows(_list_rows(results, problem))
    write(target / "compare.csv", text.getvalue())
    write(target / "compare.json", json.dumps([to_json(result, problem) for result in results], indent=2) + "\n")
    histories = {result.algorithm: result.history for result in results if result.history}
    if histories:
        draw_search(histories, target / "compare.png", lower_bound=_common_bound(results))


def _common_bound(results: list[Any]) -> float | None:
    """Return the largest lower bound among the searches of the largest space; other bounds are of a part of it."""
    sizes = {id(result): result.scope.plans for result in results if result.scope is not None}
    largest = max(sizes.values(), default=0)
    bounds = (result.lower_bound for result in results if sizes.get(id(result)) == largest)
    return max((bound for bound in bounds if bound is not None), default=None)
