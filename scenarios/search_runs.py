"""Runs of search algorithms on the problems that they are compared on, kept in a file as they are made.

Every algorithm runs once a problem, those that draw once a seed, with one budget: what it has after fewer
evaluations, or after some seconds, is in its history. One process makes all runs of a problem in turn. What one run
has simulated is a look-up for the next, which is charged the CPU time that it took; bounds and memory are computed
again, with the costs of operators kept.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from time import process_time
from typing import Any, ClassVar, TypeVar, cast

from scenarios.search_cases import Case
from scenarios.search_journal import cost_model_version
from simulator.brief import brief
from strategies.cost_model import CostModel, SimulatedCost
from strategies.evaluation import Evaluation
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.resources import Resource
from strategies.search import LAYOUT_ALGORITHMS, Proposals, SearchAlgorithm, Space, layouts, search

BUDGET = 10_000
"""Evaluations of a run."""
SECONDS = 60.0
"""CPU seconds of a run."""
MOST_PLANS = 20_000
"""Plans of a space that the exhaustive search is asked to evaluate."""
PROVING = "best_first"
"""The algorithm whose proof others are measured by."""
SLACK = 1e-9
"""Fraction by which step times that are called equal may differ."""

Point = tuple[int, float, float]
"""Evaluations, CPU seconds, and the best step time so far in s."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchRun:
    """What one algorithm did on one problem.

    Parameters
    ----------
    seed
        ``None`` for an algorithm that does not draw.
    seconds
        CPU time, that of evaluations which another run had made included.
    lower_bound
        Seconds that no plan is faster than, where it was proven.
    history
        Whenever the best became better.
    cold_seconds
        CPU time of the same run as the first on its problem, with no costs of operators at hand; 0 where it was not
        timed.
    refused
        Why the algorithm does not search this problem; empty where it does.
    """

    case: str
    algorithm: str
    seed: int | None
    evaluations: int
    considered: int
    seconds: float
    lower_bound: float | None
    history: tuple[Point, ...]
    cold_seconds: float = 0.0
    refused: str = ""

    __repr__ = brief()

    @property
    def best(self) -> float:
        """The best step time in s; infinite where no plan was found."""
        return self.history[-1][2] if self.history else inf

    @property
    def proven(self) -> bool:
        """Whether no plan is faster."""
        return self.lower_bound is not None and self.best <= self.lower_bound * (1 + SLACK)

    def after(self, limit: float, column: int = 0) -> float:
        """Return the best step time after so many evaluations (column 0) or CPU seconds (column 1)."""
        return min((point[2] for point in self.history if point[column] <= limit), default=inf)


class SharedCosts(SimulatedCost):
    """The simulated costs of one problem for several searches in turn, and the clock of each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._found: dict[tuple[str, Plan], tuple[Any, float]] = {}
        self._charged = 0.0

    def clock(self) -> float:
        """Return CPU seconds: those of this process, and those that another search spent on what this one asked."""
        return process_time() + self._charged

    def _once(self, what: str, plan: Plan, work: Callable[[Plan], T]) -> T:
        if (what, plan) in self._found:
            found, took = self._found[what, plan]
            self._charged += took
        else:
            begun = process_time()
            found = work(plan)
            self._found[what, plan] = found, process_time() - begun
        return cast(T, found)

    def forget(self) -> None:
        """Forget what plans take, and keep what their parts cost."""
        self._found.clear()

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory."""
        return self._once("evaluation", plan, super().evaluate)

    def spent(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes."""
        return self._once("spent", plan, super().spent)


@dataclass(frozen=True, slots=True)
class Until:
    """An algorithm that draws, ended when it has found a step time that is proven to be the least of its space."""

    name: ClassVar[str] = "until"

    algorithm: SearchAlgorithm
    target: float

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield what the algorithm yields."""
        proposals = self.algorithm.propose(problem, space, costs)
        answer = cast(Evaluation, None)  # what a generator is first sent
        with closing(proposals):
            while True:
                try:
                    proposal = proposals.send(answer)
                except StopIteration as end:
                    return cast("None", end.value)
                answer = yield proposal
                if isinstance(proposal, Plan) and answer.step_time <= self.target * (1 + SLACK):
                    return None


def run_case(
    case: Case, rounds: int, made: Sequence[SearchRun] = (), names: Sequence[str] = tuple(LAYOUT_ALGORITHMS)
) -> Iterator[SearchRun]:
    """Yield the runs of every algorithm on one problem that were not ``made`` before, the proof first.

    Parameters
    ----------
    rounds
        Seeds of algorithms that draw.
    """
    known = {(run.algorithm, run.seed): run for run in made if run.case == case.name}
    wanted = [
        (name, seed)
        for name in sorted(names, key=lambda name: name != PROVING)
        for seed in (range(rounds) if _draws(name) else (None,))
    ]
    if all(each in known for each in wanted):
        return
    problem = case.problem()
    small = sum(1 for _ in islice(layouts(problem, case.space), MOST_PLANS + 1)) <= MOST_PLANS
    costs, target = SharedCosts(problem), 0.0
    begun = process_time()
    search(
        LAYOUT_ALGORITHMS[PROVING](), problem, case.space, costs=costs
    )  # so that no run pays for the costs of operators
    costs.forget()
    cold = round(process_time() - begun, 6)
    for name, seed in wanted:
        run = known.get((name, seed))
        if run is None and (small or name != "exhaustive"):
            run = _run(case, name, seed, problem, costs, target)
            yield replace(run, cold_seconds=cold) if name == PROVING else run
        if name == PROVING and run is not None and run.proven:
            target = run.best


def _draws(name: str) -> bool:
    return "seed" in {field.name for field in fields(LAYOUT_ALGORITHMS[name])}


def _run(case: Case, name: str, seed: int | None, problem: Problem, costs: SharedCosts, target: float) -> SearchRun:
    make = cast("Callable[..., SearchAlgorithm]", LAYOUT_ALGORITHMS[name])
    algorithm = make() if seed is None else Until(make(seed=seed), target)
    limits: Any = {"budget": BUDGET, "seconds": None if name == PROVING else SECONDS}
    empty = partial(SearchRun, case.name, name, seed)
    try:
        result = search(algorithm, problem, case.space, costs=costs, clock=costs.clock, **limits)
    except ValueError as error:
        return empty(0, 0, 0.0, None, (), refused=str(error))
    if result.interrupted:
        raise KeyboardInterrupt
    points = tuple((count, round(elapsed, 6), time) for count, elapsed, time in result.history)
    return empty(result.evaluations, result.considered, round(result.wall_time, 6), result.lower_bound, points)


def read_runs(path: Path) -> list[SearchRun]:
    """Return the runs of this version of the program in a file of them; lines of others and torn ones are dropped."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row.pop("version") == cost_model_version():
                found.append(SearchRun(**row | {"history": tuple(map(tuple, row["history"]))}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return found


def to_line(run: SearchRun) -> str:
    """Return a run as one line of JSON."""
    return json.dumps({"version": cost_model_version()} | asdict(run)) + "\n"
