"""Why not another plan: the rule that it breaks, the memory that it lacks, or the time that it takes more."""

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
"""What a plan is to have, by field of a layout."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The answer for all plans that have what was asked for.

    Parameters
    ----------
    broken
        The rules that they break; empty where legal ones exist.
    lacking
        Where none of them fits: what the one that needs least memory lacks.
    trial
        The fastest of those that fit, or the one that needs least memory; ``None`` where none is legal.
    margin
        What it takes more than the plan in question, as a fraction; ``None`` where it does not fit.
    more
        The seconds that it takes more, by kind; they add up to the difference of the step times.
    nearest
        The plan that works and has most of what was asked for, the fastest of those; ``None`` where nothing fits.
    outside
        Whether there are such plans, but the limits of the space allow none of them.
    whole
        Whether ``legal`` are all such plans, not only those that people know and those near the best of them.
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
    """Return why the plan of ``layout`` is preferred to all that have what is ``asked`` for.

    What is left open is completed by search, within the limits of ``space`` on it.
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
    """Return the plan that fits and differs in as few of the fields asked for, and by as little, as can be."""
    distances = [_distance(each.layout, asked) if each.fits else (inf, inf) for each in ranked.candidates]
    least = min(distances, default=(inf, inf))
    if least[0] == inf:
        return None
    return ranked.fastest(lambda each: each.fits and _distance(each.layout, asked) == least)


def _unsimulated(plan: Plan, least: Candidate) -> Trial:
    return Trial(plan, Evaluation(inf, least.peak, False), 0.0)


def _distance(layout: Layout, asked: Asked) -> tuple[float, float]:
    """Return in how many fields a layout differs from what is asked for, and the factors between numbers."""
    count, factors = 0, 0.0
    for name, wanted in asked.items():
        has = getattr(layout, name)
        if has != wanted:
            count += 1
            if type(has) is int and type(wanted) is int:
                factors += abs(log2(max(has, 1) / max(wanted, 1)))
    return count, round(factors, 9)


def _ranked(of: Ranking, layout: Layout, asked: Asked, space: Space) -> tuple[Ranking, bool]:
    """Return the ranking of legal layouts that have what is asked for, and are of a space in all else.

    And whether they are all. What a space cannot be limited to is put in afterwards.
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
    """Return the rules that are broken by the layout which has what is asked for and breaks fewest.

    Of fields that were asked for, where those break any.
    """
    probes = (_probe(problem, replace(layout, **choice), asked) for choice in _choices(layout))
    found = min((tuple(violations(problem, probe)) for probe in probes), key=len)
    return tuple(each for each in found if each.field.split(".")[0] in asked) or found


def _choices(layout: Layout) -> Iterator[dict[str, Any]]:
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
    """Return a layout with what is asked for, and with as many data ranks as that leaves, where they are not asked."""
    probe = replace(layout, **asked)
    others = probe.model_ranks
    data = len(problem.cluster.free_devices) // max(others, 1)
    return probe if "data" in asked else replace(probe, data=max(data, 1))
