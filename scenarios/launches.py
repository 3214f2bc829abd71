"""Where a plan can run: the trainers whose configuration can express it, and whether it fits by their conventions.

For plans that fit and that a target cannot express: the decisions that it refuses.
"""

from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from time import perf_counter

import numpy as np

from meshwise.scenarios.fitting import Left
from meshwise.scenarios.interchange.targets import EXECUTE, NAMES, Acceptance, trainers_of
from meshwise.scenarios.intervals import out_of_memory_of
from meshwise.scenarios.scenario import FRAMEWORK_OF, SEARCH_SECONDS, Scenario
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.units import format_size, format_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.ranking import unlimited
from meshwise.strategies.explanation.uncertainty import risk_in_words
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.acceptance import Answers
from meshwise.strategies.search.choices import offloadings
from meshwise.strategies.search.space import groups

RESERVE = 0.1
"""Fraction of a search's seconds that is reserved to find a plan that some trainer runs, if none runs the fastest."""

LEAST_SECONDS = 0.5
"""Least seconds for which a further search starts: listing its plans takes as long."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A trainer that can run a plan.

    Parameters
    ----------
    trainer
        Its name as a target of `meshwise export`, or `EXECUTE`.
    peak_memory
        Bytes of the fullest device by the conventions of the framework that the scenario names, else of the trainer;
        None where the scenario names none and those of the trainer are not known.
    fits
        Whether every device and host has enough memory, by the same conventions.
    out_of_memory
        The probability that a device lacks memory, by the same conventions.
    """

    trainer: str
    peak_memory: float | None = None
    fits: bool | None = None
    out_of_memory: float | None = None

    def describe(self) -> str:
        """Return the trainer in words and, where the plan does not fit there, the memory that it needs."""
        name = "meshwise execute" if self.trainer == EXECUTE else self.trainer
        if self.peak_memory is None or self.out_of_memory is None:
            return f"{name} (how it keeps memory is not known)"
        needs = f"{format_size(self.peak_memory)} by its conventions, {risk_in_words(self.out_of_memory)}"
        return name if self.fits else f"{name} (does not fit: {needs})"


def launches(scenario: Scenario, plan: Plan) -> tuple[Launch, ...]:
    """Return every trainer that can run a plan of a scenario, with the memory that it needs there."""
    rows: list[Launch] = []
    judged: dict[str, tuple[float, bool, float]] = {}  # by framework: its trainers have the same memory conventions
    for trainer in trainers_of(scenario.spec, scenario.problem, plan):
        if scenario.framework is None and trainer not in FRAMEWORK_OF:
            rows.append(Launch(trainer))
            continue
        priced = scenario.priced_for(trainer)
        framework = priced.training.framework
        if framework not in judged:
            costs = SimulatedCost(priced)
            peak = costs.peak_memory(plan)
            judged[framework] = peak, costs.fits(plan), out_of_memory_of(priced, peak)
        rows.append(Launch(trainer, *judged[framework]))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Runnable:
    """The fastest plan that a trainer can run and that fits by its conventions: seconds a step, peak bytes and risk."""

    trainer: str
    plan: Plan
    step_time: float
    peak_memory: float
    out_of_memory: float

    def describe(self) -> str:
        """Return in one line the plan, its time, memory and risk, and the option that searches for it."""
        figures = f"{format_time(self.step_time)}, {format_size(self.peak_memory)} by the conventions of {self.trainer}"
        return f"{self.plan.describe()}: {figures}, {risk_in_words(self.out_of_memory)} (--for {self.trainer})"


def seeks_trainer(scenario: Scenario) -> bool:
    """Return whether a scenario names no framework or target, and has a transformer, the only model of trainers."""
    return scenario.framework is None and scenario.target is None and isinstance(scenario.spec, Transformer)


def needs_runnable(scenario: Scenario, found: tuple[Launch, ...]) -> bool:
    """Return whether a trainer is sought for a scenario and its plan fits in none."""
    return seeks_trainer(scenario) and not any(launch.fits for launch in found)


def fastest_runnable(scenario: Scenario, left: Left, budget: int | None = None) -> Runnable | None:
    """Return the fastest plan that some trainer with known conventions can run; each trainer has a search of its own.

    Parameters
    ----------
    time_left
        Returns the seconds that are left. The first search has half of them, the next half of the rest, and so on;
        the trainer by whose conventions plans were priced is first. Half is enough: each search starts with known
        plans.
    budget
        Evaluations of each search.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends one of the searches.
    """
    rows: list[Runnable] = []
    assumed = scenario.problem.training.framework
    trainers = sorted(FRAMEWORK_OF, key=lambda trainer: FRAMEWORK_OF[trainer] != assumed)
    for number, trainer in enumerate(trainers, 1):
        seconds = min(left(), SEARCH_SECONDS) / (2 if number < len(trainers) else 1)
        if seconds <= (0 if number == 1 else LEAST_SECONDS):
            break
        try:
            aimed = scenario.for_target(trainer)
        except ValueError:  # it can express no plan of the model
            continue
        result = aimed.search(seconds=seconds, budget=budget)
        if result.interrupted:
            raise KeyboardInterrupt
        if (best := result.best) is not None:
            time, peak = best.evaluation.step_time, best.evaluation.peak_memory
            risk = out_of_memory_of(scenario.priced_for(trainer), peak)
            rows.append(Runnable(trainer, best.plan, time, peak, risk))
    return min(rows, key=lambda row: row.step_time, default=None)


def launches_in_words(found: tuple[Launch, ...]) -> str:
    """Return in one line the trainers that run a plan, or what to do where there is none."""
    if not found:
        return f"no trainer as it is; --for {'|'.join(NAMES)} finds the fastest that one can say"
    first = sorted(found, key=lambda launch: launch.fits is not True)  # a reader takes the first one for the answer
    return ", ".join(launch.describe() for launch in first)


SECONDS = 10.0
"""Seconds for listing candidates of `find_near_misses`."""

LOOKED_AT = 16
"""Members of a group that are candidates: those with the lowest time bounds."""

COMPLETED = 200
"""Candidates that are completed to see whether they fit: those with the fewest reasons against them."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A plan that fits, and its decisions that a target cannot express.

    ``peak_memory`` is in bytes of the fullest device, ``out_of_memory`` the probability that a device lacks memory.
    """

    plan: Plan
    peak_memory: float
    out_of_memory: float
    lacks: tuple[str, ...]

    def describe(self, target: str) -> str:
        """Return in one line the plan, the memory that it needs, and the decisions that the target refuses."""
        size, needs = format_size(self.peak_memory), " and ".join(self.lacks)
        risk = risk_in_words(self.out_of_memory)
        return f"{self.plan.describe()} fits with {size}, {risk}, but needs {needs}, which {target} cannot say"


def near_misses(value: Scenario, count: int = 3, left: Left = unlimited) -> tuple[NearMiss, ...]:
    """Return up to ``count`` plans that fit and that the target of a scenario refuses for the fewest reasons.

    No two have the same reasons. Of plans with equally many reasons, those with the lowest time bound come first. After
    `MAX_SECONDS`, or where no time is left, only the candidates listed until then count.
    """
    assert value.target is not None
    problem, accepts = value.problem, Acceptance(value.target, value.spec)
    answers, costs, start = Answers(accepts.rules(problem)), SimulatedCost(problem), perf_counter()
    found: list[tuple[int, float, int, Layout]] = []
    space = value.search_settings.make_space()
    offloaded = [space.with_limits(offload=offloadings())] if space.offload is None else []
    for group in chain.from_iterable(groups(problem, among) for among in (space, *offloaded)):
        bounds = costs.table(group).ravel()
        for cell in np.argsort(bounds, kind="stable")[:LOOKED_AT].tolist():
            if np.isfinite(bounds[cell]):
                layout = group.member(*divmod(cell, len(group.states)))
                if reasons := answers.refusals(layout):
                    found.append((len(reasons), float(bounds[cell]), len(found), layout))
        if perf_counter() - start > SECONDS or left() <= 0:
            break
    result: dict[tuple[str, ...], NearMiss] = {}
    for _, _, _, layout in nsmallest(COMPLETED, found):
        reasons = answers.refusals(layout)
        if reasons not in result and costs.fits(plan := complete(problem, layout)):
            peak = costs.peak_memory(plan)
            result[reasons] = NearMiss(plan, peak, out_of_memory_of(problem, peak), accepts.lacks(problem, plan))
            if len(result) == count:
                break
    return tuple(result.values())
