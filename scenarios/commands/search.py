"""``meshwise search``: the best plan found, what is proven of it, and where it runs."""

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
from meshwise.reports.loads import loaded_choice_lines
from meshwise.reports.tables import format_reserved
from meshwise.scenarios.choices.keywords import refuse_options
from meshwise.scenarios.choices.loaded_choice import LoadedChoice, weigh_result
from meshwise.scenarios.choices.robust_choice import check_robust, choose_robust
from meshwise.scenarios.choices.ties import Tie, find_tie
from meshwise.scenarios.commands.loading import describe_pricing, load_scenario, pricing_document, tell_usual_loads
from meshwise.scenarios.commands.options import (
    Brave,
    Budget,
    ClusterFile,
    Json,
    ScenarioName,
    SearchTarget,
    Seconds,
    Seed,
)
from meshwise.scenarios.commands.page import PageFile, check_page
from meshwise.scenarios.commands.search_progress import JSON, check_progress, follow_search, print_end, print_json
from meshwise.scenarios.commands.search_report import (
    MOST_STAGES,
    NEGLIGIBLE,
    describe_division,
    describe_gap,
    explain_failure,
    to_json,
    write_search_page,
)
from meshwise.scenarios.commands.search_setups import read_question, search_setups
from meshwise.scenarios.console import (
    DONE,
    FAILED,
    NOTHING_FITS,
    Ticker,
    emit,
    list_remarks,
    note,
    print_rows,
)
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.fitting import (
    GRACE,
    describe_peak,
    explain_misfit,
    explain_space_shortfall,
    proves_nothing_fits,
    start_timer,
)
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.intervals import find_risk_limit
from meshwise.scenarios.launches import (
    NONE_RUNNABLE,
    Launch,
    Runnable,
    describe_launches,
    fastest_runnable,
    find_near_misses,
    list_launches,
    needs_runnable,
    reserve_seconds,
)
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.scenarios.scenario import SEARCH_SECONDS, Scenario
from meshwise.simulator.deadline import TimeLeft
from meshwise.simulator.units import Dimension, format_time, parse
from meshwise.strategies.explanation.uncertainty import format_limit
from meshwise.strategies.operators.cut_summary import describe_stages
from meshwise.strategies.operators.operator_plan import cuts_operators
from meshwise.strategies.search.algorithms import TABLE_ALGORITHMS
from meshwise.strategies.search.driver import FINISHED, Progress, SearchResult
from meshwise.strategies.search.fan_out import processes
from meshwise.strategies.search.proposals import Certificate
from meshwise.strategies.search.space import Scope

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from meshwise.strategies.evaluation import Trial
    from meshwise.strategies.plan.plan import Plan


TIE_SECONDS = 2.0
"""Most seconds to look for a plan that is as fast as the best and takes less."""

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
Minimize = Annotated[
    str | None, typer.Option(metavar="OBJECTIVE", help="What is made least: time, cost, devices or energy of a run.")
]
Nodes = Annotated[str | None, typer.Option(metavar="A..B", help="Numbers of nodes to choose among, as 1,2,4..8.")]
Batches = Annotated[
    str | None, typer.Option("--batch", metavar="A,B", help="Global batches to choose among, in sequences.")
]
Tokens = Annotated[str | None, typer.Option(help="Tokens of the run at the scenario's batch, as 15T or 300B.")]
CriticalBatch = Annotated[
    str | None,
    typer.Option(help="Tokens of the batch at which a run needs twice the tokens of one with small batches."),
]
Deadline = Annotated[str | None, typer.Option(help="Time that the run may take, as 30d.")]
BudgetDollars = Annotated[str | None, typer.Option("--budget-usd", help="US dollars that the run may cost.")]
Price = Annotated[str | None, typer.Option(help="US dollars for an hour of one device, as 2.50.")]
Spot = Annotated[str | None, typer.Option(help="The same on spot machines, whose nodes may be reclaimed.")]
ReclaimEvery = Annotated[str | None, typer.Option(help="Mean time between reclaims of one spot node, as 8h.")]
Front = Annotated[bool, typer.Option("--front", help="Search every setup, and show those that no other beats.")]
FrontPicture = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw time against money of all setups (.png, .svg).")
]
ProgressKind = Annotated[
    str | None, typer.Option("--progress", metavar="json", help="Tell the progress as JSON lines on stderr.")
]


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
    minimize: Minimize = None,
    nodes: Nodes = None,
    batch: Batches = None,
    tokens: Tokens = None,
    critical_batch: CriticalBatch = None,
    deadline: Deadline = None,
    budget_usd: BudgetDollars = None,
    price: Price = None,
    spot: Spot = None,
    reclaim_every: ReclaimEvery = None,
    front: Front = False,
    plot: FrontPicture = None,
    progress: ProgressKind = None,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest plan that fits. Ctrl-C ends the search and keeps the best so far.

    With an objective, terms of a run or numbers of nodes: for the machine, the batch and the plan that are best for it.
    """
    check_output(out, (".json",))
    check_output(plot, (".png", ".svg"))
    check_progress(progress)
    check_page(report)
    check_robust(robust, out_of_memory)
    value = load_scenario(scenario, cluster=cluster, brave=brave)
    value.search_settings.make_algorithm(algorithm, seed)  # raises for a wrong name before workers start
    chosen_target = value.target if target is None else target
    value = value if chosen_target is None else value.for_target(chosen_target)
    options = {"minimize": minimize, "nodes": nodes, "batch": batch, "tokens": tokens, "deadline": deadline}
    options |= {"critical_batch": critical_batch, "budget_usd": budget_usd, "price": price}
    options |= {"spot": spot, "reclaim_every": reclaim_every}
    asked = dict(value.search_settings.asked) | {name: text for name, text in options.items() if text is not None}
    shows_front = front or plot is not None
    question = read_question(asked, compares=shows_front)
    if question is not None:
        named = asked | ({"front": True} if shows_front else {})
        plan_options: dict[str, Any] = {
            "algorithm": algorithm,
            "budget": budget,
            "resume": resume,
            "scheduler": scheduler,
        }
        plan_options |= {"workers": None if workers == 1 else workers, "seed": seed, "robust": robust, "report": report}
        refuse_options(named, plan_options, "--")
        tell_usual_loads(value)
        limit = value.limit_seconds(None, seconds)
        search_setups(
            value,
            question,
            SEARCH_SECONDS if limit is None else limit,
            out,
            as_json=as_json,
            progress=progress,
            front=shows_front,
            plot=plot,
        )
        return
    keep, ticker, limit = _keep_best(out), Ticker(), value.limit_seconds(budget, seconds)
    time_left = start_timer(limit)
    follow = print_json if progress == JSON else follow_search(ticker)

    def tell(state: Progress) -> None:
        keep(state.best)
        follow(state)

    with _open_executor(workers, scheduler) as executor:
        result = value.search_plan(
            algorithm,
            budget=budget,
            seconds=reserve_seconds(value, limit),
            seed=seed,
            resume=resume,
            progress=tell,
            executor=executor,
        )
    ticker.clear()
    # without a limit, what follows gets its own time from now on
    time_left = start_timer(SEARCH_SECONDS) if limit is None else time_left
    result, loaded_choice = weigh_result(value, result, time_left)
    keep(result.best)
    answer = _Answer(value, result, to_json(result, value.problem) | pricing_document(value) | {"brave": brave})
    answer.add_loads(loaded_choice)
    answer.add_tie(time_left)
    answer.add_trainers(time_left, budget, out)
    if robust is not None:
        answer.add_robust(robust, out_of_memory, time_left, keep)
    answer.add_reason(time_left)
    if report is not None:
        write_search_page(report, value, [result], answer.robust_plan)
    answer.tell(as_json=as_json)
    if progress == JSON:
        print_end({"end": result.end, "gap": result.gap, "wall_time": result.wall_time})
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
        self.tie: Tie | None = None
        self.loaded_choice: LoadedChoice | None = None

    def add_loads(self, choice: LoadedChoice | None) -> None:
        """Add how the best plan was chosen under loads that vary."""
        self.loaded_choice = choice
        if choice is not None:
            self.document["loads"] = choice.to_json()

    def add_tie(self, time_left: TimeLeft) -> None:
        """Add the plan that is as fast as the best one and takes less, where there is one."""
        best = self.result.best
        if best is not None and not self.interrupted and self.result.certificate is None and self.loaded_choice is None:
            own_time = start_timer(TIE_SECONDS)
            try:
                self.tie = find_tie(self.value, best, self.result.trials, lambda: min(time_left() - GRACE, own_time()))
            except KeyboardInterrupt:
                self.interrupted = True
        self.document["tie"] = None if self.tie is None else asdict(self.tie) | {"plan": self.tie.plan.to_json()}

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
            self.document["reason"] = explain_failure(self.result)

    def tell(self, *, as_json: bool) -> None:
        """Print the plan, or everything as one JSON document."""
        if as_json:
            emit(self.document)
        elif self.result.best is not None:
            print_rows(self._list_lines(self.result.best))
            if self.runnable_file is not None:
                note(f"the plan that is fastest to run is in {self.runnable_file}")
            if "loads" in self.document:
                print("\n".join(loaded_choice_lines(self.document["loads"])))
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
        if cuts_operators(problem, best.plan):
            lines = list(describe_stages(problem, best.plan))
            yield from ((f"  stage {number}", line) for number, line in enumerate(lines[:MOST_STAGES]))
            if len(lines) > MOST_STAGES:
                yield "", f"and {len(lines) - MOST_STAGES} more (--out writes all)"
        elif (division := describe_division(problem, best.plan)) is not None:
            yield "layers", division
        full = " with full sequences" if value.loads is not None and value.loads.lengths is not None else ""
        yield "step time", format_time(best.evaluation.step_time) + full
        yield "peak memory", describe_peak(problem, best.plan, peak)
        forecast, limit = forecast_plan(problem, best.plan), format_limit(find_risk_limit(problem))
        yield "reserved", format_reserved(forecast.reserved, forecast.device)
        yield "out of memory", f"with a probability of {forecast.out_of_memory:.1%} ({limit})"
        if self.tie is not None:
            yield "as fast", self.tie.describe()
        yield "runs in", describe_launches(self.places, value.spec)
        if needs_runnable(value, self.places):
            yield "fastest to run", NONE_RUNNABLE if self.runnable is None else self.runnable.describe()
        extent = "" if result.gap is None or result.scope is None else f" among {result.scope.count}"
        yield "gap", describe_gap(result.gap) + extent + full
        yield from _describe_scope(result.scope, result.algorithm)
        if result.certificate is not None:
            yield result.certificate.subject, _describe_proof(result.certificate)
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
            note(explain_failure(self.result))
            return FAILED
        note(explain_misfit(self.value, self.result.nearest))
        for miss in self.document.get("near_misses", ()):
            note(f"  {miss['words']}")
        for line in changes_lines(self.document):
            note(line)
        return NOTHING_FITS


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


def _describe_scope(scope: Scope | None, algorithm: str) -> list[tuple[str, str]]:
    """Return the lines on what the search tried and did not try; operator algorithms have no scope of layouts."""
    if scope is None:
        places_tables = algorithm in TABLE_ALGORITHMS
        words = (
            "placements of tables beside data-parallel layers"
            if places_tables
            else "shardings of single operators, on one stage"
        )
        return [("space", words)]
    return [("space", "; ".join(scope.tried)), ("not tried", ", ".join(scope.left_out))]
