"""One problem laid out three ways: by the default search, by its own published plan, and by what an engineer types.

All three are judged by one simulation, with one rule of fitting, so that they can be compared.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from math import inf
from pathlib import Path

from scenarios.errors import ScenarioError
from scenarios.interchange.acceptance import trainers_of
from scenarios.launches import fastest_runnable, launches
from scenarios.library import find, names, root
from scenarios.loader import load, scenario_in
from scenarios.nothing_fits import seconds_left
from scenarios.prediction_interval import FIGURES
from scenarios.recipes import FILE as RECIPES
from scenarios.recipes import Recipe, recipe_layouts, recipes
from scenarios.scenario import Measured, Scenario
from scenarios.search_journal import cost_model_version
from simulator.models.transformer import Transformer
from strategies.completion import complete
from strategies.cost_model import CostModel, SimulatedCost
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.starts import engineer_layouts

SLACK = 1e-3
"""Fraction by which the search may be slower than another plan before it counts as slower."""
_APART = ("local/", "operators/", "starter")
"""Scenarios of the library that are no training of a machine learning cluster: this machine's own, and a template."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulation says of one plan.

    Parameters
    ----------
    name
        What the plan is called.
    plan
        The plan in one line.
    step_time
        Seconds; ``None`` where the plan does not fit.
    peak_memory
        Bytes of the fullest device.
    """

    name: str
    plan: str
    step_time: float | None
    peak_memory: float

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.step_time is not None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What the default search says of its best plan: seconds, bytes, the gap that it has proven, and its effort.

    ``gap`` is 0 for a proven optimum and ``None`` where nothing is proven.
    """

    plan: str
    step_time: float
    peak_memory: float
    gap: float | None
    evaluations: int


@dataclass(frozen=True, slots=True)
class Sayable:
    """The fastest plan found that a trainer can say and that fits by its conventions: its seconds a step and bytes."""

    trainer: str
    plan: str
    step_time: float
    peak_memory: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A problem with its layouts.

    Parameters
    ----------
    digest
        Hash of the problem as it is stated and of the program: a row with another one is made again.
    seconds
        Wall time that the search was given.
    ran, published
        Of a recipe: whether it ran, and the seconds of a step that the publisher states.
    found
        ``None`` where the search found nothing that fits.
    own
        The plan that the recipe or the scenario states.
    dozen, carried
        The fastest of what an engineer types, and of all recipes' plans carried over; ``None`` where none fits.
    trainers
        Trainers in whose words the search's plan can be said.
    sayable
        Where it fits in none of these by their own conventions, what was found that fits in one; ``None`` elsewhere.
    """

    name: str
    digest: str
    seconds: float
    capacity: float
    ran: bool | None
    published: float | None
    found: SearchOutcome | None
    own: Outcome | None
    dozen: Outcome | None
    carried: Outcome | None
    trainers: tuple[str, ...]
    sayable: Sayable | None

    @property
    def others(self) -> list[Outcome]:
        """The plans that fit of those that the search did not choose, fastest first."""
        stated = [each for each in (self.own, self.dozen, self.carried) if each is not None and each.fits]
        return sorted(stated, key=lambda each: each.step_time or inf)

    @property
    def ratio(self) -> float | None:
        """The search's step time over the fastest of the others; ``None`` where either has no plan."""
        if not self.others:
            return None
        fastest = self.others[0].step_time
        return None if fastest is None or self.found is None else self.found.step_time / fastest

    @property
    def slower(self) -> bool:
        """Whether another plan is faster than the search's by more than `SLACK`, or the search found none."""
        return bool(self.others) and (self.ratio is None or self.ratio > 1 + SLACK)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem to compare on: a published recipe, or a scenario of the library by name."""

    name: str
    recipe: Recipe | None = None

    def scenario(self) -> Scenario:
        """Return the scenario with its own plan, where it states one."""
        return load(self.name) if self.recipe is None else recipe_scenario(self.recipe)

    def digest(self) -> str:
        """Return the digest of the problem as it is stated, of the program, its recipes, and how memory is judged.

        Also of what says which trainers can say a plan.
        """
        stated = find(self.name).read_bytes() if self.recipe is None else self.recipe.record()
        return sha256(cost_model_version().encode() + _judges() + stated).hexdigest()[:16]


@lru_cache(maxsize=1)
def _judges() -> bytes:
    """Return what besides the cost model a comparison follows from: margins, recipes, and the words of trainers."""
    words = sorted((root() / "interchange").glob("*.py"))
    modules = (root().parent / each for each in ("scenarios/prediction_interval.py", "scenarios/launches.py"))
    judges = (root() / FIGURES, root() / RECIPES, *modules, *words)
    return b"".join(path.read_bytes() for path in judges)


def recipe_scenario(recipe: Recipe) -> Scenario:
    """Return a recipe as a scenario with its own plan.

    Raises
    ------
    ScenarioError
        Where anything in the record is wrong; it lists everything, with file, line and column.
    """
    try:
        found = scenario_in(recipe.document())
    except ScenarioError:
        found = scenario_in(recipe.document(placed=True))
    problem = found.problem
    if recipe.device_memory is not None:
        memory = recipe.device_memory
        sized = problem.cluster.with_accelerators(lambda each: replace(each, memory=memory))
        problem = replace(problem, cluster=sized)
    measured = Measured(recipe.measured.seconds(problem), str(recipe.source)) if recipe.measured is not None else None
    return replace(found, problem=problem, measured=measured, assumptions=(*found.assumptions, *recipe.notes))


def cases() -> tuple[Case, ...]:
    """Return all recipes, and the scenarios of the library that are trained on a cluster."""
    library = (Case(name) for name in names() if not name.startswith(_APART))
    return (*(Case(recipe.name, recipe) for recipe in recipes()), *library)


def compare_case(case: Case, seconds: float) -> Comparison:
    """Return the comparison of one problem, whose search has so many seconds of wall time.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends the search: what it has found so far is no result.
    """
    scenario = case.scenario()
    problem = scenario.problem
    result = scenario.search(seconds=seconds)
    if result.interrupted:
        raise KeyboardInterrupt
    costs = SimulatedCost(problem)
    best, found = result.best, None
    if best is not None:
        evaluation = best.evaluation
        found = SearchOutcome(
            best.plan.describe(), evaluation.step_time, evaluation.peak_memory, result.gap, result.evaluations
        )
    recipe = case.recipe
    measured = recipe.measured if recipe is not None else None
    return Comparison(
        name=case.name,
        digest=case.digest(),
        seconds=seconds,
        capacity=min(problem.usable(each) for each in problem.cluster.accelerators),
        ran=None if recipe is None else recipe.ran,
        published=None if measured is None else measured.seconds(problem),
        found=found,
        own=None if scenario.plan is None else outcome("its own plan", scenario.plan, costs),
        dozen=fastest(problem, engineer_layouts(problem), costs),
        carried=fastest(problem, recipe_layouts(problem), costs),
        trainers=() if best is None else trainers_of(scenario.spec, problem, best.plan),
        sayable=None if best is None else _sayable(scenario, best.plan, seconds),
    )


def _sayable(scenario: Scenario, plan: Plan, seconds: float) -> Sayable | None:
    """Return what fits in a trainer, where a plan of a decoder does in none; the search for it has so many seconds.

    Where the scenario names a framework, its conventions price the plans of all trainers.
    """
    if not isinstance(scenario.spec, Transformer) or any(launch.fits for launch in launches(scenario, plan)):
        return None
    fastest = fastest_runnable(scenario, seconds_left(seconds))
    if fastest is None:
        return None
    return Sayable(fastest.trainer, fastest.plan.describe(), fastest.step_time, fastest.peak_memory)


def outcome(name: str, plan: Plan, costs: CostModel) -> Outcome:
    """Return what the simulation says of one plan."""
    evaluation = costs.evaluate(plan)
    time = evaluation.step_time if evaluation.fits else None
    return Outcome(name, plan.describe(), time, evaluation.peak_memory)


def fastest(problem: Problem, named: Iterable[tuple[str, Layout]], costs: CostModel) -> Outcome | None:
    """Return the fastest of the layouts that fit; those whose bound is above it are not simulated."""
    plans = [(name, complete(problem, layout)) for name, layout in named]
    ordered = sorted(
        ((costs.bound(plan), name, plan) for name, plan in plans if costs.fits(plan)), key=lambda row: row[0]
    )
    best: Outcome | None = None
    for bound, name, plan in ordered:
        if best is not None and best.step_time is not None and bound >= best.step_time:
            break
        met = outcome(name, plan, costs)
        if best is None or (met.step_time or inf) < (best.step_time or inf):
            best = met
    return best


def read(path: Path) -> Iterator[Comparison]:
    """Yield the comparisons in a file of them; lines of other versions and torn ones are dropped."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            parts = {name: Outcome(**row[name]) if row[name] else None for name in ("own", "dozen", "carried")}
            found = SearchOutcome(**row["found"]) if row["found"] else None
            sayable = Sayable(**row["sayable"]) if row["sayable"] else None
            yield Comparison(**row | parts | {"found": found, "trainers": tuple(row["trainers"]), "sayable": sayable})
        except (ValueError, TypeError, KeyError):
            continue


def to_line(row: Comparison) -> str:
    """Return a comparison as one line of JSON."""
    return json.dumps(asdict(row)) + "\n"
