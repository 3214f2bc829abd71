"""What each decision of a plan is worth: the fastest plan that decides it otherwise."""

from collections.abc import Iterator
from dataclasses import dataclass

from strategies.evaluation import Trial
from strategies.explanation.ranking import Candidate, Ranking, fits
from strategies.layout import Layout

DECISIONS: dict[str, tuple[str, ...]] = {
    "mesh degrees": ("data", "tensor", "tensor_rows", "pipeline", "context", "expert"),
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
