"""Which further plans would tell most about a machine: those whose steps depend on what is known least.

Candidates are the plans that are one move away from the measured ones on the same machine: a factor of two moved
between data, tensor and pipeline ranks, half or twice the microbatch, and full recomputation or none. A measured step
with slopes ``j`` by the factors takes ``S j j' S / (r^2 + j' S j)`` from their covariance ``S``, with ``r`` the
residual. Plans are chosen one after the other, each for the least mean variance of all candidates' predictions that is
left (a greedy V-optimal design [1]_).

References
----------
.. [1] Atkinson, Donev and Tobias, "Optimum experimental designs, with SAS", 2007, section 10.6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from meshwise.scenarios.inputs.plan_table import list_rule_violations
from meshwise.scenarios.machine_fit.posterior import Posterior
from meshwise.scenarios.machine_fit.shares import MeasuredStep, Vector, build_table, measure_shares
from meshwise.scenarios.published.estimates import fits
from meshwise.scenarios.published.runs import Run
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute

MAX_CANDIDATES = 24
"""Most plans that are looked at: each is simulated eight times."""

_DEGREES = ("data", "tensor", "pipeline")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A plan to measure next.

    Parameters
    ----------
    plan
        The plan as a scenario file has it.
    step_time
        Predicted seconds.
    width
        Standard deviation of the logarithm of predictions for plans like these after it and those before it are
        measured, as a fraction of that of today.
    """

    plan: dict[str, Any]
    step_time: float
    width: float

    __repr__ = brief_repr()


def suggest_plans(runs: Sequence[Run], posterior: Posterior, count: int) -> tuple[Suggestion, ...]:
    """Return up to ``count`` plans near those of ``runs`` that would tell most, the best first.

    They fit in memory, and no run has them.
    """
    candidates = [
        (layout, _measure_candidate(problem, layout, posterior)) for problem, layout in _list_candidates(runs)
    ]
    if not candidates:
        return ()
    slopes = build_table([step for _, step in candidates]).extrapolate(posterior.means)[1]
    result: list[Suggestion] = []
    covariance, first_variance = posterior.covariance, _mean_variance(slopes, posterior.covariance, posterior.residual)
    remaining = list(range(len(candidates)))
    for _ in range(min(count, len(candidates))):
        updated = {place: _update(covariance, slopes[place], posterior.residual) for place in remaining}
        best = min(remaining, key=lambda place: _mean_variance(slopes, updated[place], posterior.residual))
        covariance = updated[best]
        remaining.remove(best)
        layout, step = candidates[best]
        width = (_mean_variance(slopes, covariance, posterior.residual) / first_variance) ** 0.5
        result.append(Suggestion(describe_layout(layout), step.predicted, width))
    return tuple(result)


def _update(covariance: Vector, slope: Vector, residual: float) -> Vector:
    """Return the covariance after a step is measured.

    Of two factors with variance 1 the step is the first one; with a residual of 1 half of its variance is left:

    >>> _update(np.eye(2), np.array([1.0, 0.0]), 1.0).tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """
    gain = covariance @ slope
    updated: Vector = covariance - np.outer(gain, gain) / (residual**2 + slope @ gain)
    return updated


def _mean_variance(slopes: Vector, covariance: Vector, residual: float) -> float:
    return residual**2 + float(np.einsum("ij,jk,ik->i", slopes, covariance, slopes).mean())


def _measure_candidate(problem: Problem, layout: Layout, posterior: Posterior) -> MeasuredStep:
    predicted, shares = measure_shares(problem, complete(problem, layout), posterior.factors)
    return MeasuredStep("candidate", layout, predicted, predicted, shares, tuple(posterior.factors.logarithms.tolist()))


def _list_candidates(runs: Sequence[Run]) -> list[tuple[Problem, Layout]]:
    """Return the legal plans near those of runs that fit and that no run has: of every run in turn the next one."""
    origins: dict[tuple[Problem, Layout], None] = {}
    for run in runs:
        if run.scenario is not None:
            problem = run.scenario.problem
            origins[problem, recover_layout(problem, run.scenario.choose_plan())] = None
    measured = {(problem, complete(problem, layout)) for problem, layout in origins}
    queues = [(problem, _list_moves(layout)) for problem, layout in origins]
    found: dict[tuple[Problem, Layout], None] = {}
    while queues and len(found) < MAX_CANDIDATES:
        problem, moves = queues.pop(0)
        candidate = next(
            (layout for layout in moves if (problem, layout) not in found and _is_usable(problem, layout)), None
        )
        if candidate is not None:
            queues.append((problem, moves))
            if (problem, complete(problem, candidate)) not in measured:
                found[problem, candidate] = None
    return list(found)


def _is_usable(problem: Problem, layout: Layout) -> bool:
    return not list_rule_violations(problem, layout) and fits(problem, complete(problem, layout))


def _list_moves(layout: Layout) -> Iterator[Layout]:
    """Yield the layouts that are one move away from a layout; those of other degrees have plain stages."""
    for source, target in permutations(_DEGREES, 2):
        if getattr(layout, source) % 2 == 0:
            degrees = {source: getattr(layout, source) // 2, target: getattr(layout, target) * 2}
            yield _plain(replace(layout, **degrees))
    if isinstance(layout.microbatch, int):
        sizes = [layout.microbatch * 2, *([layout.microbatch // 2] if layout.microbatch % 2 == 0 else [])]
        yield from (_plain(replace(layout, microbatch=size)) for size in sizes)
    recompute = Recompute.NONE if layout.recompute is Recompute.FULL else Recompute.FULL
    yield _plain(replace(layout, recompute=recompute))


def _plain(layout: Layout) -> Layout:
    """Return a layout whose stages, expert degree and sequence parallelism suit its other degrees."""
    schedule = layout.schedule if layout.pipeline > 1 and layout.chunks == 1 else DECISIONS["schedule"].default
    return replace(
        layout,
        stages=DECISIONS["stages"].default,
        chunks=1,
        schedule=schedule,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        overlap_tensor=layout.overlap_tensor and layout.tensor > 1,
        scatter_gather=layout.scatter_gather and layout.tensor > 1 and layout.pipeline > 1,
    )


_ALWAYS = (*_DEGREES, "microbatch", "recompute")


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as the ``plan`` of a scenario file: degrees, microbatch, recompute, and what is not the default.

    >>> describe_layout(Layout(data=4, tensor=2, zero=1))
    {'data': 4, 'tensor': 2, 'pipeline': 1, 'microbatch': 1, 'zero': 1, 'recompute': 'none'}
    """
    values = {name: getattr(layout, name) for name in DECISIONS}
    stated = {name: value for name, value in values.items() if name in _ALWAYS or value != DECISIONS[name].default}
    return {name: _describe(value) for name, value in stated.items()}


def _describe(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int | bool) else getattr(value, "document", str(value))
