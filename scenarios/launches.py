"""Where a plan can run: the trainers whose configuration can express it, and whether it fits by their conventions.

For plans that fit and that a target cannot express: the decisions that it refuses.
"""

from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from time import perf_counter

import numpy as np

from meshwise.scenarios.inputs.graph_file import GraphModel
from meshwise.scenarios.interchange.targets import EXECUTE, NAMES, Acceptance, list_trainers
from meshwise.scenarios.memory_forecast import forecast_memory, forecast_plan
from meshwise.scenarios.scenario import FRAMEWORK_OF, SEARCH_SECONDS, Scenario
from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.units import format_size, format_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.uncertainty import format_risk
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.acceptance import Answers
from meshwise.strategies.search.choices import list_offloadings
from meshwise.strategies.search.space import groups

RESERVE = 0.1
"""Fraction of a search's seconds that is reserved to find a plan that some trainer runs, if none runs the fastest."""

LEAST_RESERVE = 2.0
"""Least reserve in seconds, up to half of the limit, to find a runnable plan: a search may end a second late."""

LATE = 0.5
"""Reserve in seconds without that: the last simulation may end late, and the plans of the space are counted."""

NONE_RUNNABLE = "none was found in the time that is kept for it; --for megatron, torchtitan ... searches for one alone"

MIN_SECONDS = 0.5
"""Least seconds for which a further search starts: listing its plans takes as long."""


TRAIN = "meshwise train FILE.py --plan"
"""What runs the plan of a captured module."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A trainer that can run a plan: a target of `meshwise export` by name, or `EXECUTE`.

    Figures are by the conventions of the framework that the scenario names, else of the trainer; None where the
    scenario names none and those of the trainer are not known. ``peak_memory`` is in bytes of the fullest device,
    ``fits`` says whether every device and host has enough memory, and ``out_of_memory`` is the probability that a
    device lacks it. ``command`` is that of this program which runs the plan, where one does.
    """

    trainer: str
    peak_memory: float | None = None
    fits: bool | None = None
    out_of_memory: float | None = None
    command: str = ""

    def describe(self) -> str:
        """Return the trainer in words and, where the plan does not fit there, the memory that it needs."""
        name = self.command or self.trainer
        if self.peak_memory is None or self.out_of_memory is None:
            return f"{name} (how it keeps memory is not known)"
        memory_text = f"{format_size(self.peak_memory)} by its conventions, {format_risk(self.out_of_memory)}"
        return name if self.fits else f"{name} (does not fit: {memory_text})"


def list_launches(scenario: Scenario, plan: Plan) -> tuple[Launch, ...]:
    """Return every trainer that can run a plan of a scenario, with the memory that it needs there."""
    rows: list[Launch] = []
    verdicts: dict[str, tuple[float, bool, float]] = {}  # by framework: its trainers have the same memory conventions
    own = TRAIN if isinstance(scenario.spec, GraphModel) else "meshwise execute"
    for trainer in list_trainers(scenario.spec, scenario.problem, plan):
        command = own if trainer == EXECUTE else ""
        if scenario.framework is None and trainer not in FRAMEWORK_OF:
            rows.append(Launch(trainer, command=command))
            continue
        priced_problem = scenario.to_target_problem(trainer)
        framework = priced_problem.training.framework
        if framework not in verdicts:
            cost_model = SimulatedCost(priced_problem)
            forecast = forecast_memory(cost_model, plan)
            verdicts[framework] = cost_model.peak_memory(plan), forecast.fits, forecast.out_of_memory
        rows.append(Launch(trainer, *verdicts[framework], command=command))
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
        return f"{self.plan.describe()}: {figures}, {format_risk(self.out_of_memory)} (--for {self.trainer})"


def seeks_trainer(scenario: Scenario) -> bool:
    """Return whether a scenario names no framework or target, and has a transformer, the only model of trainers."""
    return scenario.framework is None and scenario.target is None and isinstance(scenario.spec, Transformer)


def reserve_seconds(scenario: Scenario, limit: float | None) -> float | None:
    """Return the seconds for a search alone, less a reserve for what follows; ``None`` where it has no limit."""
    if limit is None or limit <= 0:
        return limit
    reserve = max(RESERVE * limit, LEAST_RESERVE) if seeks_trainer(scenario) else LATE
    return max(limit / 2, limit - reserve)


def needs_runnable(scenario: Scenario, trainer_launches: tuple[Launch, ...]) -> bool:
    """Return whether a trainer is sought for a scenario and its plan fits in none."""
    return seeks_trainer(scenario) and not any(launch.fits for launch in trainer_launches)


def fastest_runnable(scenario: Scenario, time_left: TimeLeft, budget: int | None = None) -> Runnable | None:
    """Return the fastest plan that some trainer with known conventions can run; each trainer has a search of its own.

    Of the seconds that ``time_left`` returns the first search has half, the next half of the rest, and so on; the
    trainer by whose conventions plans were priced is first. Half is enough: each search starts with known plans.
    ``budget`` is the evaluations of each search.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends one of the searches.
    """
    rows: list[Runnable] = []
    assumed_framework = scenario.problem.training.framework
    trainers = sorted(FRAMEWORK_OF, key=lambda trainer: FRAMEWORK_OF[trainer] != assumed_framework)
    for number, trainer in enumerate(trainers, 1):
        seconds = min(time_left(), SEARCH_SECONDS) / (2 if number < len(trainers) else 1)
        if seconds <= (0 if number == 1 else MIN_SECONDS):
            break
        try:
            target_scenario = scenario.for_target(trainer)
        except ValueError:  # it can express no plan of the model
            continue
        result = target_scenario.search_plan(seconds=seconds, budget=budget)
        if result.interrupted:
            raise KeyboardInterrupt
        if (best_trial := result.best) is not None:
            step_time, peak_memory = best_trial.evaluation.step_time, best_trial.evaluation.peak_memory
            risk = forecast_plan(scenario.to_target_problem(trainer), best_trial.plan).out_of_memory
            rows.append(Runnable(trainer, best_trial.plan, step_time, peak_memory, risk))
    return min(rows, key=lambda row: row.step_time, default=None)


CAPTURED = "no trainer: each builds models of its own; --for execute finds the fastest that meshwise train runs"
"""Where a plan of a captured graph runs that no run of its module can follow."""


def describe_launches(trainer_launches: tuple[Launch, ...], spec: Model | None = None) -> str:
    """Return in one line the trainers that run a plan of a model, or what to do where there is none."""
    if not trainer_launches and isinstance(spec, GraphModel):
        return CAPTURED
    if not trainer_launches:
        return f"no trainer as it is; --for {'|'.join(NAMES)} finds the fastest that one can say"
    # a reader takes the first one for the answer
    sorted_launches = sorted(trainer_launches, key=lambda launch: launch.fits is not True)
    return ", ".join(launch.describe() for launch in sorted_launches)


MAX_SECONDS = 10.0
"""Seconds for listing candidates of `find_near_misses`."""

MAX_MEMBERS = 16
"""Members of a group that are candidates: those with the lowest time bounds."""

MAX_COMPLETED = 200
"""Candidates that are completed to see whether they fit: those with the fewest reasons against them."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A plan that fits, and its decisions that a target cannot express.

    ``peak_memory`` is in bytes of the fullest device, ``out_of_memory`` the probability that a device lacks memory.
    """

    plan: Plan
    peak_memory: float
    out_of_memory: float
    refused_decisions: tuple[str, ...]

    def describe(self, target: str) -> str:
        """Return in one line the plan, the memory that it needs, and the decisions that the target refuses."""
        size, needs_text = format_size(self.peak_memory), " and ".join(self.refused_decisions)
        risk = format_risk(self.out_of_memory)
        return f"{self.plan.describe()} fits with {size}, {risk}, but needs {needs_text}, which {target} cannot say"


def find_near_misses(
    scenario: Scenario, count: int = 3, time_left: TimeLeft = unlimited_seconds
) -> tuple[NearMiss, ...]:
    """Return up to ``count`` plans that fit and that the target of a scenario refuses for the fewest reasons.

    No two have the same reasons. Of plans with equally many reasons, those with the lowest time bound come first. After
    `MAX_SECONDS`, or where no time is left, only the candidates listed until then count.
    """
    assert scenario.target is not None
    problem, acceptance = scenario.problem, Acceptance(scenario.target, scenario.spec)
    answers, cost_model, start = Answers(acceptance.list_rules(problem)), SimulatedCost(problem), perf_counter()
    candidates: list[tuple[int, float, int, Layout]] = []
    space = scenario.search_settings.make_space()
    offload_spaces = [space.with_limits(offload=list_offloadings())] if space.offload is None else []
    for group in chain.from_iterable(groups(problem, subspace) for subspace in (space, *offload_spaces)):
        bounds = cost_model.group_bounds(group).ravel()
        for cell in np.argsort(bounds, kind="stable")[:MAX_MEMBERS].tolist():
            if np.isfinite(bounds[cell]):
                layout = group.build_layout(*divmod(cell, len(group.states)))
                if reasons := answers.list_refusals(layout):
                    candidates.append((len(reasons), float(bounds[cell]), len(candidates), layout))
        if perf_counter() - start > MAX_SECONDS or time_left() <= 0:
            break
    result: dict[tuple[str, ...], NearMiss] = {}
    for _, _, _, layout in nsmallest(MAX_COMPLETED, candidates):
        reasons = answers.list_refusals(layout)
        if reasons not in result and cost_model.fits(plan := complete(problem, layout)):
            peak_memory = cost_model.peak_memory(plan)
            risk = forecast_memory(cost_model, plan).out_of_memory
            result[reasons] = NearMiss(plan, peak_memory, risk, acceptance.list_lacking(problem, plan))
            if len(result) == count:
                break
    return tuple(result.values())
