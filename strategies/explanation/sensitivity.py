"""Sensitivity of the best plan to the machine, and shadow prices of resources.

The shadow price of a resource is what one more unit of it saves while all else stays optimal [1]_, here by finite
differences. For rates, the same plan is simulated on a machine with one part 1 % faster. For memory, no plan runs
faster by having more; its price is what a better plan saves that then fits.

References
----------
.. [1] Dantzig, "Linear programming and extensions", 1963, section 12-1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.machine_parts import MachinePart, with_memory
from meshwise.strategies.explanation.ranking import CandidateFilter, Ranking, fits
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

PERCENT = 0.01
"""Fraction by which a part is faster for its price."""

GIB = 2.0**30
"""Bytes of additional memory for its price."""


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """The seconds of a step that an increment of a resource saves; resource, amount and increment are in words.

    ``plan`` is the faster plan with the increment; ``None`` where it is the same plan.
    """

    resource: str
    amount: str
    increment: str
    saved_seconds: float
    plan: Plan | None = None


def prices_of_rates(ranking: Ranking, plan: Plan, parts: tuple[MachinePart, ...]) -> Iterator[ShadowPrice]:
    """Yield for every part of the machine what the same plan saves where the part is 1 % faster."""
    step_time = ranking.step_time(plan)
    for part in parts:
        ranking.check_time()
        problem = replace(ranking.problem, cluster=part.scale_cluster(1 + PERCENT))
        yield ShadowPrice(part.name, part.speed, "1 %", step_time - SimulatedCost(problem).step_time(plan))


def price_of_memory(ranking: Ranking, best: Trial, extra_bytes: float = GIB) -> ShadowPrice:
    """Return what the best plan saves that fits where every device has ``extra_bytes`` more."""
    device_memory = ranking.problem.cluster.accelerator.memory
    better_trial = ranking.find_fastest(fits_with(ranking.problem, lambda memory: memory + extra_bytes)) or best
    saved_seconds = best.evaluation.step_time - better_trial.evaluation.step_time
    return ShadowPrice(
        "memory",
        format_size(device_memory),
        format_size(extra_bytes),
        max(saved_seconds, 0.0),
        better_trial.plan if saved_seconds > 0 else None,
    )


def find_next_memory(ranking: Ranking, best: Trial) -> Trial | None:
    """Return the plan that needs least memory of those faster than ``best``, which do not fit; ``None`` without any."""
    trial, max_memory = None, float("inf")
    while True:
        faster_trial = ranking.find_fastest(_allow_less_memory(max_memory))
        if faster_trial is None or faster_trial.evaluation.step_time >= best.evaluation.step_time:
            return trial
        trial, max_memory = faster_trial, faster_trial.evaluation.peak_memory


def _allow_less_memory(memory: float) -> CandidateFilter:
    """Return a filter for candidates that lack memory on devices alone and need less than ``memory`` bytes."""
    return lambda candidate: not candidate.fits and candidate.peak < memory and candidate.hosts_fit


OFF_FRACTION = 0.2
"""Fraction by which a part is slower and faster in the two outcomes."""

REGION_FACTOR = 1.5
"""Largest factor, slower and faster, up to which a region is looked for."""

EDGE_TOLERANCE = 0.02
"""Relative precision of the edge of a region."""

_SAME_TIME = 1 - 1e-6
"""Plans whose step times differ by less than a millionth count as equally fast: rounding to ticks differs as much."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan on a machine with a part ``factor`` times as fast, or as large; ``None`` where nothing fits.

    ``step_time`` is that of the plan in question on that machine, in seconds; ``None`` where it does not fit.
    """

    factor: float
    best: Trial | None
    step_time: float | None

    @property
    def stays(self) -> bool:
        """Whether the plan in question stays the best."""
        return self.loses == 0

    @property
    def loses(self) -> float | None:
        """The extra time of the plan in question over the best, as a fraction; ``None`` where it does not fit."""
        if self.step_time is None or self.best is None:
            return None
        best_time = self.best.evaluation.step_time
        return self.step_time / best_time - 1 if best_time < self.step_time * _SAME_TIME else 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the choice of a plan depends on one part of the machine.

    ``outcomes`` are those with the part slower, and faster, by `OFF_FRACTION`. ``region`` are the factors between which
    the plan stays the best; ``is_open_ended`` says whether it may go on below, and above, because it was looked for no
    farther.
    """

    part: str
    speed: str
    outcomes: tuple[Outcome, ...]
    region: tuple[float, float]
    is_open_ended: tuple[bool, bool]

    __repr__ = brief_repr()


def sensitivity(ranking: Ranking, plan: Plan, part: MachinePart) -> Sensitivity:
    """Return how the choice of a plan depends on the speed of a part, by exact rankings and bisection between plans."""
    own_layouts = frozenset(
        candidate.layout
        for candidate in ranking.candidates
        if ranking.complete_candidate(candidate) == plan and candidate.fits
    )

    @cache
    def build_costs(factor: float) -> SimulatedCost:  # each machine has one cost model, with its caches
        return SimulatedCost(replace(ranking.problem, cluster=part.scale_cluster(factor)))

    def outcome(factor: float) -> Outcome:
        changed_ranking = ranking.with_costs(build_costs(factor), factor)
        step_time = changed_ranking.step_time(plan)  # first: then only plans that may take less are looked at
        other_trial = changed_ranking.find_fastest(
            lambda candidate: candidate.fits and candidate.layout not in own_layouts, time_limit=step_time
        )
        if other_trial is not None or not own_layouts:
            return Outcome(factor, other_trial or changed_ranking.find_fastest(fits), step_time)
        evaluation = Evaluation(step_time, ranking.costs.peak_memory(plan), fits=True)
        return Outcome(factor, Trial(plan, evaluation, 0.0), step_time)

    def find_time(plan: Plan, factor: float) -> float:
        ranking.check_time()
        return build_costs(factor).step_time(plan)

    outcomes = outcome(1 - OFF_FRACTION), outcome(1 + OFF_FRACTION)
    low_edge, high_edge = (
        _find_edge(outcome, find_time, plan, first_outcome, far_factor)
        for first_outcome, far_factor in zip(outcomes, (1 / REGION_FACTOR, REGION_FACTOR), strict=True)
    )
    return Sensitivity(part.name, part.speed, outcomes, (low_edge[0], high_edge[0]), (low_edge[1], high_edge[1]))


def fits_with(problem: Problem, memory: Callable[[float], float]) -> CandidateFilter:
    """Return a filter for candidates that would fit if devices had other memory; ``memory`` maps old to new bytes."""
    changed_problem = replace(problem, cluster=with_memory(problem.cluster, memory))
    if len(changed_problem.cluster.accelerators) == 1:
        capacity = changed_problem.usable_memory(changed_problem.cluster.accelerator)
        return lambda candidate: candidate.peak <= capacity and candidate.hosts_fit
    costs = SimulatedCost(changed_problem)
    return lambda candidate: costs.fits(complete(changed_problem, candidate.layout))


def memory_sensitivity(ranking: Ranking, trial: Trial, speed: str) -> Sensitivity:
    """Return how the choice of a plan depends on device memory; exact, because plans need the same bytes anywhere."""
    cluster = ranking.problem.cluster

    def outcome(factor: float) -> Outcome:
        best_trial = ranking.find_fastest(fits_with(ranking.problem, lambda memory: memory * factor))
        changed_problem = replace(ranking.problem, cluster=with_memory(cluster, lambda memory: memory * factor))
        has_memory = SimulatedCost(changed_problem).fits(trial.plan)
        return Outcome(factor, best_trial, trial.evaluation.step_time if has_memory else None)

    outcomes = outcome(1 - OFF_FRACTION), outcome(1 + OFF_FRACTION)
    larger_trial, device = find_next_memory(ranking, trial), cluster.accelerator
    low = ranking.problem.needed_memory(device, trial.evaluation.peak_memory) / device.memory
    high = REGION_FACTOR
    if larger_trial is not None:
        high = ranking.problem.needed_memory(device, larger_trial.evaluation.peak_memory) / device.memory
    return Sensitivity("memory", speed, outcomes, (low, high), (False, larger_trial is None))


_FindTime = Callable[[Plan, float], float]
"""Returns the step time of a plan on a machine with one scaled part."""


def _find_edge(
    outcome: Callable[[float], Outcome], find_time: _FindTime, plan: Plan, first_outcome: Outcome, far_factor: float
) -> tuple[float, bool]:
    """Return the last factor from 1 towards ``far_factor`` at which the plan is the best, and whether it is the last.

    Bisection between the plan and the plan that beats it finds the factor at which both are equally fast. Where a third
    plan is faster there, it goes on between the plan and the third one.
    """
    lost_outcome = first_outcome if not first_outcome.stays else outcome(far_factor)
    if lost_outcome.stays:
        return far_factor, True
    while True:
        assert lost_outcome.best is not None  # the plan fits, and so does what beats it
        edge = _find_crossing(find_time, plan, lost_outcome.best.plan, lost_outcome.factor)
        lost_outcome = outcome(edge)
        if lost_outcome.stays or abs(log(edge)) <= EDGE_TOLERANCE:
            return edge, False


def _find_crossing(find_time: _FindTime, plan: Plan, other_plan: Plan, far_factor: float) -> float:
    """Return the factor between 1 and ``far_factor`` up to which a plan is no slower than another, which wins there."""
    # by logarithms of factors, so that slower and faster machines are alike
    winning_log, losing_log = 0.0, log(far_factor)
    while abs(losing_log - winning_log) > EDGE_TOLERANCE:
        middle = (winning_log + losing_log) / 2
        if find_time(plan, exp(middle)) * _SAME_TIME <= find_time(other_plan, exp(middle)):
            winning_log = middle
        else:
            losing_log = middle
    return exp(winning_log)
