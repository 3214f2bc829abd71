"""Why not another plan: the rules that it breaks, the memory that it lacks, or its extra time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf, log2
from typing import Any

from meshwise.simulator.brief import brief
from meshwise.simulator.engine import simulate
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.critical_path import device_time, difference
from meshwise.strategies.explanation.ranking import Candidate, Ranking, fits, ranking
from meshwise.strategies.explanation.shortfall import Shortfall, shortfall
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.layout import Layout, Violation
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import EVERYTHING, Space

Asked = Mapping[str, Any]
"""Fields of a layout with the values that the user asks about."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The answer about all plans that have the fields asked for.

    Parameters
    ----------
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

    asked: tuple[tuple[str, Any], ...]
    legal: int
    broken: tuple[Violation, ...] = ()
    lacking: Shortfall | None = None
    trial: Trial | None = None
    margin: float | None = None
    more: tuple[tuple[str, float], ...] = ()
    nearest: Trial | None = None
    outside: bool = False
    whole: bool = True

    __repr__ = brief()


def why_not(ranked: Ranking, best: Trial, layout: Layout, asked: Asked, space: Space = EVERYTHING) -> WhyNot:
    """Return why the plan of ``layout`` is preferred to all plans that have the fields asked for.

    The other fields are searched, within the limits of ``space``.
    """
    problem, told = ranked.problem, tuple(asked.items())
    others, whole = _ranked(ranked, layout, asked, space)
    legal = len(others.candidates)
    if not legal:
        outside = bool(_ranked(ranked, layout, asked, EVERYTHING)[0].candidates)
        broken = () if outside else _broken(problem, layout, asked)
        return WhyNot(told, 0, broken, nearest=nearest(ranked, asked), outside=outside)
    other = others.fastest(fits)
    if other is None:
        least = others.least_memory()
        assert least is not None  # there are some
        plan = others.plan(least)
        lacking, near = shortfall(problem, plan), nearest(ranked, asked)
        return WhyNot(told, legal, (), lacking, _unsimulated(plan, least), nearest=near, whole=whole)
    spent = [device_time(simulate(lower(problem, trial.plan))) for trial in (best, other)]
    margin = other.evaluation.step_time / best.evaluation.step_time - 1
    return WhyNot(told, legal, (), None, other, margin, tuple(difference(*spent).items()), whole=whole)


def nearest(ranked: Ranking, asked: Asked) -> Trial | None:
    """Return the fastest of the plans that fit and differ least from the fields asked for."""
    distances = [_distance(each.layout, asked) if each.fits else (inf, inf) for each in ranked.candidates]
    least = min(distances, default=(inf, inf))
    if least[0] == inf:
        return None
    return ranked.fastest(lambda each: each.fits and _distance(each.layout, asked) == least)


def _unsimulated(plan: Plan, least: Candidate) -> Trial:
    return Trial(plan, Evaluation(inf, least.peak, False), 0.0)


def _distance(layout: Layout, asked: Asked) -> tuple[float, float]:
    """Return the number of asked fields in which a layout differs, and the sum of logarithms of factors of numbers."""
    count, factors = 0, 0.0
    for name, wanted in asked.items():
        has = getattr(layout, name)
        if has != wanted:
            count += 1
            if type(has) is int and type(wanted) is int:
                factors += abs(log2(max(has, 1) / max(wanted, 1)))
    return count, round(factors, 9)


def _ranked(of: Ranking, layout: Layout, asked: Asked, space: Space) -> tuple[Ranking, bool]:
    """Return the ranking of legal layouts that have the fields asked for and are otherwise in a space.

    Also return whether it has all of them. Values to which a space cannot be limited are put in afterwards.
    """
    problem, limits, others = of.problem, dict[str, Any](), dict[str, Any]()
    for name, value in asked.items():
        (limits if _limits(name, value) else others)[name] = (value,)
    own = (_probe(problem, replace(layout, **choice), asked) for choice in _choices(layout))
    starts = (probe for probe in dict.fromkeys(own) if next(violations(problem, probe), None) is None)
    limited = replace(space.with_limits(**limits), starts=(*starts, *space.starts))
    ranked = ranking(problem, limited, seconds=of.seconds)
    if not others:
        return ranked, ranked.whole
    changed: dict[str, Any] = {name: value for name, (value,) in others.items()}
    # a schedule that no space tries may be looped or not; 0 keeps the chunks of the candidate
    chunks = (1, 2) if "schedule" in others and "chunks" not in asked else (0,)
    found = Ranking(problem, seconds=of.seconds)
    for candidate, number in product(ranked.candidates, chunks):
        whole = replace(candidate.layout, **changed | ({"chunks": number} if number else {}))
        if next(violations(problem, whole), None) is None:
            found.add([whole])
    return found, ranked.whole


def _limits(name: str, value: Any) -> bool:
    """Return whether a space can be limited to a value of a field."""
    try:
        Space(**{name: (value,)})
    except (TypeError, ValueError):
        return False
    return True


def _broken(problem: Problem, layout: Layout, asked: Asked) -> tuple[Violation, ...]:
    """Return the rules broken by the layout with the fields asked for that breaks fewest.

    Only rules about these fields, where there are any.
    """
    probes = (_probe(problem, replace(layout, **choice), asked) for choice in _choices(layout))
    found = min((tuple(violations(problem, probe)) for probe in probes), key=len)
    return tuple(each for each in found if each.field.split(".")[0] in asked) or found


def _choices(layout: Layout) -> Iterator[dict[str, Any]]:
    # the fields asked for may be illegal beside the plan's other choices, so these give way where they must
    schedules = ((layout.schedule, layout.chunks), ("1f1b", 1), ("interleaved", 2))
    microbatches = (layout.microbatch, 1)
    for (schedule, chunks), size, sequence, stages in product(
        schedules, microbatches, (layout.sequence_parallel, False), (layout.stages, "even", "balanced")
    ):
        yield {
            "schedule": schedule,
            "chunks": chunks,
            "microbatch": size,
            "sequence_parallel": sequence,
            "stages": stages,
        }


def _probe(problem: Problem, layout: Layout, asked: Asked) -> Layout:
    """Return a layout with the fields asked for, and as many data ranks as the devices allow if data is not asked."""
    probe = replace(layout, **asked)
    others = probe.model_ranks
    data = len(problem.cluster.free_devices) // max(others, 1)
    return probe if "data" in asked else replace(probe, data=max(data, 1))
