"""Plans beside the fastest: what each decision is worth, what can be traded, and what is safe.

Choosing by what a run may take, not by what it is predicted to take.

A plan that runs out of memory takes for ever: with probability ``p`` of that, the ``q`` quantile of its step time is
the ``q / (1 - p)`` quantile of the times of runs that go through, and infinite for ``q`` above ``1 - p``.

References
----------
Ben-Tal, El Ghaoui and Nemirovski, "Robust optimization", 2009, section 2.1: constraints that hold with a probability.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.ranking import Allowed, Among, Candidate, Ranking, fits, ranking
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.plan.layout import DEGREES, Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space

DECISIONS: dict[str, tuple[str, ...]] = {
    "mesh degrees": DEGREES,
    "microbatch": ("microbatch",),
    "schedule": ("schedule", "chunks"),
    "ZeRO": ("zero", "zero_shards"),
    "sequence parallel": ("sequence_parallel",),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "rank order": ("order", "placement"),
}
"""The fields of a layout that one decision is about."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The fastest plan that decides something otherwise; its ``margin`` is the fraction that it takes more."""

    decision: str
    trial: Trial
    margin: float


def runner_up(ranking: Ranking, best: Trial, layout: Layout) -> Alternative | None:
    """Return the fastest plan that fits, of all but ``layout``; its decisions are those in which it differs."""
    second = ranking.fastest(lambda each: each.fits and each.layout != layout)
    if second is None:
        return None
    other = next(each.layout for each in ranking.candidates if ranking.plan(each) == second.plan)
    return Alternative(", ".join(differing(layout, other)), second, _margin(best, second))


def alternatives(ranking: Ranking, best: Trial, layout: Layout) -> Iterator[Alternative]:
    """Yield for every decision of which the space has more than one the fastest plan that fits and has another."""
    for decision, names in DECISIONS.items():
        own = _values(layout, names)

        def otherwise(candidate: Candidate, names: tuple[str, ...] = names, own: tuple[object, ...] = own) -> bool:
            return fits(candidate) and _values(candidate.layout, names) != own

        found = ranking.fastest(otherwise)
        if found is not None:
            yield Alternative(decision, found, _margin(best, found))


def differing(one: Layout, other: Layout) -> tuple[str, ...]:
    """Return the decisions in which two layouts differ.

    >>> differing(Layout(data=2), Layout(tensor=2, microbatch=2))
    ('mesh degrees', 'microbatch')
    """
    return tuple(name for name, fields in DECISIONS.items() if _values(one, fields) != _values(other, fields))


def _values(layout: Layout, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _margin(best: Trial, other: Trial) -> float:
    return other.evaluation.step_time / best.evaluation.step_time - 1


SLOWEST = 1.25
"""How many times the step time of the best plan a front goes up to."""

APART = 0.98
"""A plan of the front needs at most this fraction of the memory of the one before."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A plan of a front.

    Parameters
    ----------
    fits
        Whether devices have its memory.
    cost
        Device-hours for a million tokens.
    """

    trial: Trial
    devices: int
    fits: bool
    cost: float


def memory_front(ranked: Ranking, best: Trial) -> Iterator[Tradeoff]:
    """Yield ever slower plans that need ever less memory, from the fastest of all, whether it fits or not.

    Of plans that need about the same memory only the fastest is shown; the front ends at `SLOWEST`.
    """
    least = float("inf")
    while (found := ranked.fastest(_within(least), below=SLOWEST * best.evaluation.step_time)) is not None:
        yield _tradeoff(ranked.problem, found)
        least = found.evaluation.peak_memory * APART


def device_front(
    problem: Problem, space: Space, best: Trial, seconds: Callable[[], float]
) -> Iterator[tuple[int, Tradeoff | None, Among | None]]:
    """Yield for ever fewer nodes, divisors of those there are, their devices and the fastest plan that fits on them.

    And among which plans it is; ``None`` of ``best``, and where no plan of these fits: then fewer nodes are not looked
    at.

    Raises
    ------
    OutOfTime
        Where no ``seconds`` are left.
    """
    yield problem.cluster.num_devices, _tradeoff(problem, best), None
    nodes = problem.cluster.num_nodes
    for count in range(nodes // 2, 0, -1):
        if nodes % count:
            continue
        smaller = replace(problem, cluster=problem.cluster.resized(count))
        ranked = ranking(smaller, _unlimited(space), seconds=seconds)
        found = ranked.fastest(fits)
        yield smaller.cluster.num_devices, _tradeoff(smaller, found) if found else None, ranked.among
        if found is None:
            return


def _within(memory: float) -> Allowed:
    return lambda candidate: candidate.peak <= memory


def _unlimited(space: Space) -> Space:
    """Return a space that leaves degrees open, for fewer devices have others."""
    return space.with_limits(data=None, pipeline=None)


def _tradeoff(problem: Problem, trial: Trial) -> Tradeoff:
    training, devices = problem.training, trial.plan.mesh.num_ranks
    tokens = training.global_batch * training.sequence
    hours = devices * trial.evaluation.step_time / 3600
    return Tradeoff(trial, devices, trial.evaluation.fits, hours / tokens * 1e6)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A plan with what its run may take: seconds at a quantile, and the probability that it lacks memory."""

    trial: Trial
    quantile: float
    out_of_memory: float
    allowed: bool


def prospect(problem: Problem, trial: Trial, uncertainty: Uncertainty, quantile: float, most: float) -> Prospect:
    """Return what a plan's run may take; it is allowed where it lacks memory with probability ``most`` at most."""
    at = trial.evaluation
    lacks = uncertainty.lacks_memory(problem.cluster, at.peak_memory)
    through = uncertainty.step_time_quantile(at.step_time, quantile / (1 - lacks)) if lacks < 1 else inf
    return Prospect(trial, through, lacks, lacks <= most)


def prospects(ranking: Ranking, uncertainty: Uncertainty, quantile: float, most: float) -> Iterator[Prospect]:
    """Yield plans, the fastest first, until none can come that is better at ``quantile`` than one allowed before.

    A plan without any danger to lack memory has the quantile of its step time: no later one can have less.
    """
    best = inf
    for trial in ranking.ascending(fits):
        if uncertainty.step_time_quantile(trial.evaluation.step_time, quantile) >= best:
            return
        found = prospect(ranking.problem, trial, uncertainty, quantile, most)
        if found.allowed:
            best = min(best, found.quantile)
        yield found
