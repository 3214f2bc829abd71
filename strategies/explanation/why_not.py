"""Why not another plan: the rules that it breaks, the memory that it lacks, or its extra time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf, log2
from typing import Any

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.engine import simulate
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.critical_path import compare_times, device_time
from meshwise.strategies.explanation.ranking import Ranking, fits, ranking
from meshwise.strategies.explanation.shortfall import Shortfall, find_shortfall
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.layout import Layout, Violation
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import EVERYTHING, Space

AskedFields = Mapping[str, Any]
"""Fields of a layout with the values that the user asks about."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The answer about all plans that have the fields asked for.

    Parameters
    ----------
    asked_fields
        The fields of the plan that were asked for, and their values.
    num_legal
        The number of legal plans.
    broken_rules
        The rules that the plans break; empty where some are legal.
    shortfall
        Where none of them fits: the memory that the one with the least peak lacks.
    trial
        The fastest plan that fits, or the one with the least peak memory; ``None`` where none is legal.
    margin
        The extra time of ``trial`` over the plan in question, as a fraction; ``None`` where it does not fit.
    extra_seconds
        The extra seconds of ``trial`` by kind; they add up to the difference of the step times.
    nearest_trial
        The plan that fits and differs least from what was asked for, the fastest of those; ``None`` where none fits.
    is_outside
        Whether there are such plans, but the limits of the space allow none of them.
    is_complete
        Whether ``num_legal`` counts all such plans, not only known plans and those near the best of them.
    """

    asked_fields: tuple[tuple[str, Any], ...]
    num_legal: int
    broken_rules: tuple[Violation, ...] = ()
    shortfall: Shortfall | None = None
    trial: Trial | None = None
    margin: float | None = None
    extra_seconds: tuple[tuple[str, float], ...] = ()
    nearest_trial: Trial | None = None
    is_outside: bool = False
    is_complete: bool = True

    __repr__ = brief_repr()


def explain_why_not(
    plan_ranking: Ranking, best: Trial, layout: Layout, asked_fields: AskedFields, space: Space = EVERYTHING
) -> WhyNot:
    """Return why the plan of ``layout`` is preferred to all plans that have the fields asked for.

    The other fields are searched, within the limits of ``space``.
    """
    problem, asked_items = plan_ranking.problem, tuple(asked_fields.items())
    other_ranking, is_complete = _rank_asked(plan_ranking, layout, asked_fields, space)
    num_legal = len(other_ranking.candidates)
    if not num_legal:
        is_outside = bool(_rank_asked(plan_ranking, layout, asked_fields, EVERYTHING)[0].candidates)
        broken_rules = () if is_outside else _find_broken_rules(problem, layout, asked_fields)
        return WhyNot(
            asked_items, 0, broken_rules, nearest_trial=find_nearest(plan_ranking, asked_fields), is_outside=is_outside
        )
    other_trial = other_ranking.find_fastest(fits)
    if other_trial is None:
        least_candidate = other_ranking.find_least_memory()
        assert least_candidate is not None  # there are some
        plan = other_ranking.complete_candidate(least_candidate)
        return WhyNot(
            asked_items,
            num_legal,
            shortfall=find_shortfall(problem, plan),
            trial=Trial(plan, Evaluation(inf, least_candidate.peak, False), 0.0),
            nearest_trial=find_nearest(plan_ranking, asked_fields),
            is_complete=is_complete,
        )
    device_times = [device_time(simulate(lower(problem, trial.plan))) for trial in (best, other_trial)]
    margin = other_trial.evaluation.step_time / best.evaluation.step_time - 1
    extra_seconds = tuple(compare_times(*device_times).items())
    return WhyNot(asked_items, num_legal, (), None, other_trial, margin, extra_seconds, is_complete=is_complete)


def find_nearest(plan_ranking: Ranking, asked_fields: AskedFields) -> Trial | None:
    """Return the fastest of the plans that fit and differ least from the fields asked for."""
    distances = [
        _find_distance(candidate.layout, asked_fields) if candidate.fits else (inf, inf)
        for candidate in plan_ranking.candidates
    ]
    least_distance = min(distances, default=(inf, inf))
    if least_distance[0] == inf:
        return None
    return plan_ranking.find_fastest(
        lambda candidate: candidate.fits and _find_distance(candidate.layout, asked_fields) == least_distance
    )


def _find_distance(layout: Layout, asked_fields: AskedFields) -> tuple[float, float]:
    """Return the number of asked fields in which a layout differs, and the sum of logarithms of factors of numbers."""
    count, factors = 0, 0.0
    for name, asked_value in asked_fields.items():
        value = getattr(layout, name)
        if value != asked_value:
            count += 1
            if type(value) is int and type(asked_value) is int:
                factors += abs(log2(max(value, 1) / max(asked_value, 1)))
    return count, round(factors, 9)


def _rank_asked(plan_ranking: Ranking, layout: Layout, asked_fields: AskedFields, space: Space) -> tuple[Ranking, bool]:
    """Return the ranking of legal layouts that have the fields asked for and are otherwise in a space.

    Also return whether it has all of them. Values to which a space cannot be limited are put in afterwards.
    """
    problem, limits, other_values = plan_ranking.problem, dict[str, Any](), dict[str, Any]()
    for name, value in asked_fields.items():
        (limits if _is_limitable(name, value) else other_values)[name] = (value,)
    probes = dict.fromkeys(_list_probes(problem, layout, asked_fields))
    starts = (probe for probe in probes if next(violations(problem, probe), None) is None)
    limited_space = replace(space.with_limits(**limits), starts=(*starts, *space.starts))
    limited_ranking = ranking(plan_ranking.costs, limited_space, seconds=plan_ranking.seconds)
    if not other_values:
        return limited_ranking, limited_ranking.is_complete
    new_values: dict[str, Any] = {name: value for name, (value,) in other_values.items()}
    # a schedule that no space tries may be looped or not; 0 keeps the chunks of the candidate
    chunks = (1, 2) if "schedule" in other_values and "chunks" not in asked_fields else (0,)
    full_ranking = Ranking(plan_ranking.costs, seconds=plan_ranking.seconds)
    for candidate, num_chunks in product(limited_ranking.candidates, chunks):
        changed_layout = replace(candidate.layout, **new_values | ({"chunks": num_chunks} if num_chunks else {}))
        if next(violations(problem, changed_layout), None) is None:
            full_ranking.add_layouts([changed_layout])
    return full_ranking, limited_ranking.is_complete


def _is_limitable(name: str, value: Any) -> bool:
    """Return whether a space can be limited to a value of a field."""
    try:
        Space(**{name: (value,)})
    except (TypeError, ValueError):
        return False
    return True


def _find_broken_rules(problem: Problem, layout: Layout, asked_fields: AskedFields) -> tuple[Violation, ...]:
    """Return the rules broken by the layout with the fields asked for that breaks fewest.

    Only rules about these fields, where there are any.
    """
    probes = _list_probes(problem, layout, asked_fields)
    broken_rules = min((tuple(violations(problem, probe)) for probe in probes), key=len)
    asked_rules = tuple(rule for rule in broken_rules if rule.field.split(".")[0] in asked_fields)
    return asked_rules or broken_rules


def _list_probes(problem: Problem, layout: Layout, asked_fields: AskedFields) -> Iterator[Layout]:
    """Yield layouts with the fields asked for, and as many data ranks as the devices allow if data is not asked.

    The fields asked for may be illegal beside the plan's other choices, so these give way where they must.
    """
    schedules = ((layout.schedule, layout.chunks), ("1f1b", 1), ("interleaved", 2))
    flags, divisions = (layout.sequence_parallel, False), (layout.stages, "even", "balanced")
    for (schedule, chunks), microbatch, flag, stages in product(schedules, (layout.microbatch, 1), flags, divisions):
        choice: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "microbatch": microbatch, "stages": stages}
        probe = replace(layout, **choice | {"sequence_parallel": flag} | dict(asked_fields))
        data = len(problem.cluster.free_devices) // max(probe.model_ranks, 1)
        yield probe if "data" in asked_fields else replace(probe, data=max(data, 1))
