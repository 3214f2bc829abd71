"""Alternatives to the fastest plan: by topic, on Pareto fronts, and by a quantile of the step time.

A run that lacks memory never ends. If it does so with probability ``p``, the ``q`` quantile of the step time is the
``q / (1 - p)`` quantile of the step times of runs with enough memory, and infinite for ``q`` above ``1 - p``.

References
----------
Ben-Tal, El Ghaoui and Nemirovski, "Robust optimization", 2009, section 2.1: constraints that hold with a probability.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.ranking import Candidate, CandidateFilter, RankedPlans, Ranking, fits, ranking
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space

TOPICS: dict[str, tuple[str, ...]] = {
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

PlanFilter = Callable[[Plan], bool]
"""Whether a plan may be named; asked of the fastest first, for it may be too slow to ask of all plans."""


def accept_all(_: Plan) -> bool:
    """Accept every plan."""
    return True


@dataclass(frozen=True, slots=True)
class Alternative:
    """The fastest plan that decides a topic otherwise; ``margin`` is its extra step time, as a fraction of the best."""

    topic: str
    trial: Trial
    margin: float


def find_runner_up(
    ranking: Ranking, best: Trial, layout: Layout, accepts: PlanFilter = accept_all
) -> Alternative | None:
    """Return the fastest accepted plan that fits other than ``layout``, with the topics in which it differs."""
    other_trials = ranking.list_ascending(lambda candidate: candidate.fits and candidate.layout != layout)
    second_trial = next((trial for trial in other_trials if accepts(trial.plan)), None)
    if second_trial is None:
        return None
    topics = list_differences(layout, ranking.find_layout(second_trial.plan))
    return Alternative(", ".join(topics), second_trial, _find_margin(best, second_trial))


def list_alternatives(
    ranking: Ranking, best: Trial, layout: Layout, accepts: PlanFilter = accept_all
) -> Iterator[Alternative]:
    """Yield for every topic the fastest accepted plan that fits and decides it otherwise, if the ranking has one."""
    for topic, names in TOPICS.items():
        trials = ranking.list_ascending(partial(_decides_otherwise, names, _read_values(layout, names)))
        trial = next((trial for trial in trials if accepts(trial.plan)), None)
        if trial is not None:
            yield Alternative(topic, trial, _find_margin(best, trial))


def _decides_otherwise(names: tuple[str, ...], own_values: tuple[object, ...], candidate: Candidate) -> bool:
    return candidate.fits and _read_values(candidate.layout, names) != own_values


def list_differences(layout: Layout, other_layout: Layout) -> tuple[str, ...]:
    """Return the topics in which two layouts differ; a decision of no topic is its own.

    >>> list_differences(Layout(data=2), Layout(tensor=2, microbatch=2, overlap_tensor=True))
    ('mesh degrees', 'microbatch', 'overlap tensor')
    """
    in_topics = {field for fields in TOPICS.values() for field in fields}
    topics = TOPICS | {name.replace("_", " "): (name,) for name in DECISIONS if name not in in_topics}
    pairs = (
        (name, _read_values(layout, fields), _read_values(other_layout, fields)) for name, fields in topics.items()
    )
    return tuple(name for name, values, other_values in pairs if values != other_values)


def _read_values(layout: Layout, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _find_margin(best: Trial, other_trial: Trial) -> float:
    return other_trial.evaluation.step_time / best.evaluation.step_time - 1


FRONT_TIME_FACTOR = 1.25
"""The step time at which a memory front ends, over that of the best plan."""

FRONT_MEMORY_FACTOR = 0.98
"""A plan of a memory front needs at most this fraction of the memory of the plan before it."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A plan of a Pareto front, the problem that it is a plan of, and its cost in device-hours per million tokens."""

    problem: Problem
    trial: Trial
    devices: int
    cost: float


def memory_front(plan_ranking: Ranking, best: Trial) -> Iterator[Tradeoff]:
    """Yield slower and slower plans that need less and less memory, from the fastest of all, which may not fit.

    Of plans that need about the same memory only the fastest is yielded; the front ends at `FRONT_TIME_FACTOR`.
    """
    max_memory, time_limit = inf, FRONT_TIME_FACTOR * best.evaluation.step_time
    while (trial := plan_ranking.find_fastest(_allow_memory(max_memory), time_limit)) is not None:
        yield _build_tradeoff(plan_ranking.problem, trial)
        max_memory = trial.evaluation.peak_memory * FRONT_MEMORY_FACTOR


def device_front(
    problem: Problem, space: Space, best: Trial, seconds: Callable[[], float]
) -> Iterator[tuple[int, Tradeoff | None, RankedPlans | None]]:
    """Yield for fewer and fewer nodes the number of devices, the fastest plan that fits, and the plans ranked for it.

    Numbers of nodes divide that of the cluster. The first row is ``best``, with ``None`` for the ranked plans. The
    front ends with the first number on which no plan fits, whose plan is ``None``.

    Raises
    ------
    OutOfTime
        Where no ``seconds`` are left.
    """
    yield problem.cluster.num_devices, _build_tradeoff(problem, best), None
    nodes = problem.cluster.num_nodes
    for count in range(nodes // 2, 0, -1):
        if nodes % count:
            continue
        smaller_problem = replace(problem, cluster=problem.cluster.with_size(count))
        # fewer devices have other degrees of data and pipeline
        open_space = space.with_limits(data=None, pipeline=None)
        plan_ranking = ranking(SimulatedCost(smaller_problem), open_space, seconds=seconds)
        trial = plan_ranking.find_fastest(fits)
        tradeoff = _build_tradeoff(smaller_problem, trial) if trial else None
        yield smaller_problem.cluster.num_devices, tradeoff, plan_ranking.ranked_plans
        if trial is None:
            return


def _allow_memory(memory: float) -> CandidateFilter:
    return lambda candidate: candidate.peak <= memory


def _build_tradeoff(problem: Problem, trial: Trial) -> Tradeoff:
    training, devices = problem.training, trial.plan.mesh.num_ranks
    tokens = training.global_batch * training.sequence
    hours = devices * trial.evaluation.step_time / 3600
    return Tradeoff(problem, trial, devices, hours / tokens * 1e6)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A plan with the uncertainty of its run: the step time at a quantile (s), and the risk of lacking memory."""

    trial: Trial
    quantile: float
    out_of_memory: float
    is_allowed: bool


RiskEstimate = Callable[[Trial], float]
"""The probability that a plan lacks memory."""


def build_prospect(
    trial: Trial, estimate_risk: RiskEstimate, uncertainty: Uncertainty, quantile: float, max_risk: float
) -> Prospect:
    """Return the prospect of a plan; it is allowed where it lacks memory with probability ``max_risk`` at most."""
    step_time, risk = trial.evaluation.step_time, estimate_risk(trial)
    time_quantile = uncertainty.step_time_quantile(step_time, quantile / (1 - risk)) if risk < 1 else inf
    return Prospect(trial, time_quantile, risk, risk <= max_risk)


def list_prospects(
    ranking: Ranking, estimate_risk: RiskEstimate, uncertainty: Uncertainty, quantile: float, max_risk: float
) -> Iterator[Prospect]:
    """Yield the prospects of plans, the fastest first, until no later one can be better than one allowed before.

    A later plan has at least the quantile of its step time without a risk of lacking memory, and step times rise.
    """
    best_quantile = inf
    for trial in ranking.list_ascending(fits):
        if uncertainty.step_time_quantile(trial.evaluation.step_time, quantile) >= best_quantile:
            return
        next_prospect = build_prospect(trial, estimate_risk, uncertainty, quantile, max_risk)
        if next_prospect.is_allowed:
            best_quantile = min(best_quantile, next_prospect.quantile)
        yield next_prospect
