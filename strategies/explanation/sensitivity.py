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
from math import exp, log

from meshwise.simulator.brief import brief
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.machine_parts import MachinePart, with_memory
from meshwise.strategies.explanation.ranking import Allowed, Ranking, fits, fits_with
from meshwise.strategies.plan.plan import Plan

PERCENT = 0.01
"""Fraction by which a part is faster for its price."""

GIB = 2.0**30
"""Bytes of additional memory for its price."""


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """The saving of more of a resource.

    Parameters
    ----------
    resource, amount
        The resource and its amount, in words.
    increment
        The additional amount, in words.
    saved_seconds
        Seconds of a step that it saves.
    plan
        The faster plan with the increment; ``None`` where it is the same plan.
    """

    resource: str
    amount: str
    more: str
    saves: float
    plan: Plan | None = None


def prices_of_rates(ranking: Ranking, plan: Plan, parts: tuple[MachinePart, ...]) -> Iterator[ShadowPrice]:
    """Yield for every part of the machine what the same plan saves where the part is 1 % faster."""
    now = ranking.step_time(plan)
    for part in parts:
        ranking.look()
        problem = replace(ranking.problem, cluster=part.scaled(1 + PERCENT))
        yield ShadowPrice(part.name, part.speed, "1 %", now - SimulatedCost(problem).step_time(plan))


def price_of_memory(ranking: Ranking, best: Trial, more: float = GIB) -> ShadowPrice:
    """Return what the best plan saves that fits where every device has ``extra_bytes`` more."""
    has = ranking.problem.cluster.accelerator.memory
    better = ranking.fastest(fits_with(ranking.problem, lambda memory: memory + more)) or best
    saves = best.evaluation.step_time - better.evaluation.step_time
    return ShadowPrice(
        "memory", format_size(has), format_size(more), max(saves, 0.0), better.plan if saves > 0 else None
    )


def next_larger_memory(ranking: Ranking, best: Trial) -> Trial | None:
    """Return the plan that needs least memory of those faster than ``best``, which do not fit; ``None`` without any."""
    found, least = None, float("inf")
    while True:
        faster = ranking.fastest(_needing_less(least))
        if faster is None or faster.evaluation.step_time >= best.evaluation.step_time:
            return found
        found, least = faster, faster.evaluation.peak_memory


def _needing_less(memory: float) -> Allowed:
    """Return a filter for candidates that lack memory on devices alone and need less than ``memory`` bytes."""
    return lambda candidate: not candidate.fits and candidate.peak < memory and candidate.hosts_fit


OFF = 0.2
"""Fraction by which a part is slower and faster in the two outcomes."""

REACH = 1.5
"""Largest factor, slower and faster, up to which a region is looked for."""

NEARER = 0.02
"""Relative precision of the edge of a region."""

_SAME = 1 - 1e-6
"""Plans whose step times differ by less than a millionth count as equally fast: rounding to ticks differs as much."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan on a machine with a part ``factor`` times as fast, or as large.

    Parameters
    ----------
    best
        The best plan; ``None`` where nothing fits.
    step_time
        The step time of the plan in question on that machine, in seconds; ``None`` where it does not fit.
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
        best = self.best.evaluation.step_time
        return self.step_time / best - 1 if best < self.step_time * _SAME else 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the choice of a plan depends on one part of the machine.

    Parameters
    ----------
    outcomes
        The outcomes with the part slower, and faster, by `OFF`.
    region
        The factors between which the plan stays the best.
    is_open_ended
        Whether the region may go on below, and above, because it was looked for no farther.
    """

    part: str
    speed: str
    outcomes: tuple[Outcome, ...]
    region: tuple[float, float]
    reached: tuple[bool, bool]

    __repr__ = brief()


def sensitivity(ranking: Ranking, plan: Plan, part: MachinePart) -> Sensitivity:
    """Return how the choice of a plan depends on the speed of a part, by exact rankings and bisection between plans."""
    own = frozenset(each.layout for each in ranking.candidates if ranking.plan(each) == plan and each.fits)

    def outcome(factor: float) -> Outcome:
        changed = ranking.on(part.scaled(factor), factor)
        now = changed.step_time(plan)  # first: then only plans that may take less are looked at
        other = changed.fastest(lambda each: each.fits and each.layout not in own, below=now)
        if other is not None or not own:
            return Outcome(factor, other or changed.fastest(fits), now)
        at = Evaluation(now, ranking.costs.peak_memory(plan), fits=True)
        return Outcome(factor, Trial(plan, at, 0.0), now)

    times = _Times(ranking, part.scaled)
    outcomes = outcome(1 - OFF), outcome(1 + OFF)
    low, high = (
        _edge(outcome, times, plan, first, far) for first, far in zip(outcomes, (1 / REACH, REACH), strict=True)
    )
    return Sensitivity(part.name, part.speed, outcomes, (low[0], high[0]), (low[1], high[1]))


def memory_sensitivity(ranking: Ranking, trial: Trial, speed: str) -> Sensitivity:
    """Return how the choice of a plan depends on device memory; exact, because plans need the same bytes anywhere."""
    cluster = ranking.problem.cluster

    def outcome(factor: float) -> Outcome:
        best = ranking.fastest(fits_with(ranking.problem, lambda memory: memory * factor))
        changed = replace(ranking.problem, cluster=with_memory(cluster, lambda memory: memory * factor))
        has = SimulatedCost(changed).fits(trial.plan)
        return Outcome(factor, best, trial.evaluation.step_time if has else None)

    outcomes = outcome(1 - OFF), outcome(1 + OFF)
    larger, device = next_larger_memory(ranking, trial), cluster.accelerator
    low = ranking.problem.needed(device, trial.evaluation.peak_memory) / device.memory
    high = ranking.problem.needed(device, larger.evaluation.peak_memory) / device.memory if larger else REACH
    return Sensitivity("memory", speed, outcomes, (low, high), (False, larger is None))


class _Times:
    """Step times of plans on machines with one scaled part; each machine has one cost model, with its caches."""

    def __init__(self, ranking: Ranking, scaled: Callable[[float], Cluster]) -> None:
        self.ranking, self.scaled = ranking, scaled
        self._costs: dict[float, SimulatedCost] = {}

    def __call__(self, plan: Plan, factor: float) -> float:
        self.ranking.look()
        if factor not in self._costs:
            self._costs[factor] = SimulatedCost(replace(self.ranking.problem, cluster=self.scaled(factor)))
        return self._costs[factor].step_time(plan)


def _edge(
    outcome: Callable[[float], Outcome], times: _Times, plan: Plan, first: Outcome, far: float
) -> tuple[float, bool]:
    """Return the last factor from 1 towards ``far_factor`` at which the plan is the best, and whether it is the last.

    Bisection between the plan and the plan that beats it finds the factor at which both are equally fast. Where a third
    plan is faster there, it goes on between the plan and the third one.
    """
    beaten = first if not first.stays else outcome(far)
    if beaten.stays:
        return far, True
    while True:
        assert beaten.best is not None  # the plan fits, and so does what beats it
        edge = _crossing(times, plan, beaten.best.plan, beaten.factor)
        beaten = outcome(edge)
        if beaten.stays or abs(log(edge)) <= NEARER:
            return edge, False


def _crossing(times: _Times, plan: Plan, other: Plan, far: float) -> float:
    """Return the factor between 1 and ``far_factor`` up to which a plan is no slower than another, which wins there."""
    # by logarithms of factors, so that slower and faster machines are alike
    stays, beaten = 0.0, log(far)
    while abs(beaten - stays) > NEARER:
        middle = (stays + beaten) / 2
        if times(plan, exp(middle)) * _SAME <= times(other, exp(middle)):
            stays = middle
        else:
            beaten = middle
    return exp(stays)
