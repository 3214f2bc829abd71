"""Where a plan can be run: the trainers in whose words it can be said, and whether it fits by their conventions."""

from dataclasses import dataclass

from scenarios.interchange.acceptance import EXECUTE, NAMES, trainers_of
from scenarios.nothing_fits import Left
from scenarios.prediction_interval import out_of_memory_of
from scenarios.scenario import FRAMEWORK_OF, SEARCH_SECONDS, Scenario
from simulator.models.transformer import Transformer
from simulator.units import format_size, format_time
from strategies.cost_model import SimulatedCost
from strategies.explanation.uncertainty import risk_in_words
from strategies.plan import Plan

RESERVE = 0.1
"""Of the seconds of a search, those that are kept to find a plan that runs where the fastest one runs nowhere."""

LEAST_SECONDS = 0.5
"""With less no further search begins: to list its plans takes as long."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A trainer that can say a plan.

    Parameters
    ----------
    trainer
        Its name as a target of `meshwise export`, or `EXECUTE`.
    peak_memory
        Bytes of the fullest device by the conventions of what the scenario names, or else of the trainer; None where
        neither are known.
    fits
        Whether every device and host has the memory, in the same way.
    out_of_memory
        The probability that a device lacks memory, in the same way.
    """

    trainer: str
    peak_memory: float | None = None
    fits: bool | None = None
    out_of_memory: float | None = None

    def describe(self) -> str:
        """Return the trainer and, where the plan does not fit there, what it needs."""
        name = "meshwise execute" if self.trainer == EXECUTE else self.trainer
        if self.peak_memory is None or self.out_of_memory is None:
            return f"{name} (how it keeps memory is not known)"
        needs = f"{format_size(self.peak_memory)} by its conventions, {risk_in_words(self.out_of_memory)}"
        return name if self.fits else f"{name} (does not fit: {needs})"


def launches(scenario: Scenario, plan: Plan) -> tuple[Launch, ...]:
    """Return every trainer that can say a plan of a scenario, with the memory that it needs there."""
    rows: list[Launch] = []
    judged: dict[str, tuple[float, bool, float]] = {}  # trainers of one framework keep memory alike: it is asked once
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
    """The fastest plan that a trainer can say and that fits by its own conventions: seconds a step, bytes and risk."""

    trainer: str
    plan: Plan
    step_time: float
    peak_memory: float
    out_of_memory: float

    def describe(self) -> str:
        """Return the plan, what it takes and how it is asked for, in one line."""
        figures = f"{format_time(self.step_time)}, {format_size(self.peak_memory)} by the conventions of {self.trainer}"
        return f"{self.plan.describe()}: {figures}, {risk_in_words(self.out_of_memory)} (--for {self.trainer})"


def seeks_trainer(scenario: Scenario) -> bool:
    """Return whether a scenario leaves open what runs its plans, and its model is a transformer, as trainers have."""
    return scenario.framework is None and scenario.target is None and isinstance(scenario.spec, Transformer)


def needs_runnable(scenario: Scenario, found: tuple[Launch, ...]) -> bool:
    """Return whether a plan fits in no trainer although one is sought."""
    return seeks_trainer(scenario) and not any(launch.fits for launch in found)


def fastest_runnable(scenario: Scenario, left: Left, budget: int | None = None) -> Runnable | None:
    """Return the fastest plan that fits in a trainer whose conventions are known, each searched for in its own way.

    Parameters
    ----------
    left
        How many seconds are left. The trainer by whose conventions plans were priced has the first half of them, the
        next one half of the rest, and so on: known plans come first in each of these searches.
    budget
        Evaluations of each of these searches.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends one of these searches.
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
        except ValueError:  # it can say no plan of the model
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
    """Return where a plan runs in one line, and what to do where nowhere."""
    if not found:
        return f"no trainer as it is; --for {'|'.join(NAMES)} finds the fastest that one can say"
    first = sorted(found, key=lambda launch: launch.fits is not True)  # a reader takes the first for the answer
    return ", ".join(launch.describe() for launch in first)
