"""Alternatives to the fastest plan: by topic, on Pareto fronts, and by a quantile of the step time.

A run that lacks memory never ends. If it does so with probability ``p``, the ``q`` quantile of the step time is the
``q / (1 - p)`` quantile of the step times of runs with enough memory, and infinite for ``q`` above ``1 - p``.

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
"""The fields of a layout by the topic that they decide together."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The fastest plan that decides a topic otherwise; ``margin`` is its extra step time, as a fraction of the best."""

    decision: str
    trial: Trial
    margin: float


def runner_up(ranking: Ranking, best: Trial, layout: Layout) -> Alternative | None:
    """Return the fastest plan that fits other than ``layout``, with the topics in which it differs."""
    second = ranking.fastest(lambda each: each.fits and each.layout != layout)
    if second is None:
        return None
    other = next(each.layout for each in ranking.candidates if ranking.plan(each) == second.plan)
    return Alternative(", ".join(differing(layout, other)), second, _margin(best, second))


def alternatives(ranking: Ranking, best: Trial, layout: Layout) -> Iterator[Alternative]:
    """Yield for every topic the fastest plan that fits and decides it otherwise, if the ranking has one."""
    for decision, names in DECISIONS.items():
        own = _values(layout, names)

        # defaults bind this topic's values: a closure would see those of a later turn
        def otherwise(candidate: Candidate, names: tuple[str, ...] = names, own: tuple[object, ...] = own) -> bool:
            return fits(candidate) and _values(candidate.layout, names) != own

        found = ranking.fastest(otherwise)
        if found is not None:
            yield Alternative(decision, found, _margin(best, found))


def differing(one: Layout, other: Layout) -> tuple[str, ...]:
    """Return the topics in which two layouts differ.

    >>> differing(Layout(data=2), Layout(tensor=2, microbatch=2))
    ('mesh degrees', 'microbatch')
    """
    return tuple(name for name, fields in DECISIONS.items() if _values(one, fields) != _values(other, fields))


def _values(layout: Layout, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _margin(best: Trial, other: Trial) -> float:
    return other.evaluation.step_time / best.evaluation.step_time - 1


SLOWEST = 1.25
"""The step time at which a memory front ends, over that of the best plan."""

APART = 0.98
"""A plan of a memory front needs at most this fraction of the memory of the plan before it."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A plan of a Pareto front.

    Parameters
    ----------
    fits
        Whether the plan fits in the memory of the devices.
    cost
        Device-hours per million tokens.
    """

    trial: Trial
    devices: int
    fits: bool
    cost: float


def memory_front(ranked: Ranking, best: Trial) -> Iterator[Tradeoff]:
    """Yield slower and slower plans that need less and less memory, from the fastest of all, which may not fit.

    Of plans that need about the same memory only the fastest is yielded; the front ends at `SLOWEST`.
    """
    least = float("inf")
    while (found := ranked.fastest(_within(least), below=SLOWEST * best.evaluation.step_time)) is not None:
        yield _tradeoff(ranked.problem, found)
        least = found.evaluation.peak_memory * APART


def device_front(
    problem: Problem, space: Space, best: Trial, seconds: Callable[[], float]
) -> Iterator[tuple[int, Tradeoff | None, Among | None]]:
    """Yield for fewer and fewer nodes the number of devices, the fastest plan that fits, and the plans ranked for it.

    Numbers of nodes divide that of the cluster. The first row is ``best``, with ``None`` for the ranked plans. The
    front ends with the first number on which no plan fits, whose plan is ``None``.

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
    """Return the space without limits on data and pipeline, because fewer devices have other degrees."""
    return space.with_limits(data=None, pipeline=None)


def _tradeoff(problem: Problem, trial: Trial) -> Tradeoff:
    training, devices = problem.training, trial.plan.mesh.num_ranks
    tokens = training.global_batch * training.sequence
    hours = devices * trial.evaluation.step_time / 3600
    return Tradeoff(trial, devices, trial.evaluation.fits, hours / tokens * 1e6)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A plan with the uncertainty of its run: the step time at a quantile (s), and the risk of lacking memory."""

    trial: Trial
    quantile: float
    out_of_memory: float
    allowed: bool


def prospect(problem: Problem, trial: Trial, uncertainty: Uncertainty, quantile: float, most: float) -> Prospect:
    """Return the prospect of a plan; it is allowed where it lacks memory with probability ``max_risk`` at most."""
    at = trial.evaluation
    lacks = uncertainty.lacks_memory(problem.cluster, at.peak_memory)
    through = uncertainty.step_time_quantile(at.step_time, quantile / (1 - lacks)) if lacks < 1 else inf
    return Prospect(trial, through, lacks, lacks <= most)


def prospects(ranking: Ranking, uncertainty: Uncertainty, quantile: float, most: float) -> Iterator[Prospect]:
    """Yield the prospects of plans, the fastest first, until no later one can be better than one allowed before.

    A later plan has at least the quantile of its step time without a risk of lacking memory, and step times rise.
    """
    best = inf
    for trial in ranking.ascending(fits):
        if uncertainty.step_time_quantile(trial.evaluation.step_time, quantile) >= best:
            return
        found = prospect(ranking.problem, trial, uncertainty, quantile, most)
        if found.allowed:
            best = min(best, found.quantile)
        yield found
