"""How far a prediction may be off: 90 % intervals from the errors on published runs, and the margin of memory.

The half widths are in ``prediction_intervals.json``, which `meshwise.scenarios.studies.interval_calibration` writes.

Prediction intervals from errors that were met before: split conformal prediction for correlated errors.

Errors of one publisher are alike, so that a hundred of its runs say little more of the next publisher than ten do.
Errors are therefore taken by groups, and every group counts alike (CDF pooling [1]_). How far predictions are off
differs with what is known of a run: each category has an interval of its own (Mondrian conformal prediction [2]_).

The half width of a category is the ``coverage`` quantile of its errors' sizes [3]_, where an error of a group of ``n``
weighs ``1 / n`` [4]_. Of a new group exchangeable with ``k`` known ones, the expected fraction inside is then at least
``coverage * k / (k + 1)``; a promise of ``coverage`` itself needs the quantile at ``coverage * (k + 1) / k`` [5]_,
which few groups do not have. What intervals hold is therefore measured, by leaving groups out one at a time.

References
----------
.. [1] Dunn, Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models", JASA
       (arXiv:1809.07441).
.. [2] Vovk, Gammerman and Shafer 2005, "Algorithmic learning in a random world", section 4.5.
.. [3] Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, "Distribution-free predictive inference for regression",
       JASA 113, section 2.2.
.. [4] Barber, Candes, Ramdas and Tibshirani 2023, "Conformal prediction beyond exchangeability", Annals of Statistics
       51, section 3.
.. [5] Lee, Barber and Willett 2023, "Distribution-free inference with hierarchical data" (arXiv:2306.06342).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from math import exp
from typing import Any, NamedTuple

from meshwise.simulator.catalog import timed_products
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.units import format_count
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.plan.framework import UNKNOWN
from meshwise.strategies.plan.problem import Problem, Training


class Residual(NamedTuple):
    """An error that was met: its size, the category of its run, and the group whose errors are alike."""

    size: float
    category: str
    group: str


def half_widths(residuals: Sequence[Residual], coverage: float) -> dict[str, float]:
    """Return for every category the half width of the interval that holds the fraction ``coverage`` of errors.

    Half of what follows is one group's three errors, half the other's one:

    >>> errors = [Residual(size, "all", "a") for size in (0.1, 0.2, 0.3)] + [Residual(0.4, "all", "b")]
    >>> half_widths(errors, 0.5), half_widths(errors, 0.6)
    ({'all': 0.3}, {'all': 0.4})
    """
    members: dict[str, list[Residual]] = defaultdict(list)
    for residual in residuals:
        members[residual.category].append(residual)
    return {name: _quantile(members[name], coverage) for name in sorted(members)}


def half_width(widths: Mapping[str, float], category: str) -> float:
    """Return the half width of a category; the widest there is for one of which no error was met."""
    return widths.get(category, max(widths.values()))


def left_out(groups: Iterable[str], residuals: Sequence[Residual], coverage: float) -> Iterator[tuple[int, float]]:
    """Yield the place of every error and the half width from those of the other ``groups``, one of them an error.

    Raises
    ------
    ValueError
        Where there is one group only.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    if len(places) == 1:
        raise ValueError(f"leaving a group out needs two, met {next(iter(places))} alone")
    for held_out in places.values():
        apart = set(held_out)
        widths = half_widths([each for place, each in enumerate(residuals) if place not in apart], coverage)
        yield from ((place, half_width(widths, residuals[place].category)) for place in held_out)


def _quantile(residuals: Sequence[Residual], fraction: float) -> float:
    """Return the smallest size that so much of the weight is not above; every group weighs the same."""
    members = Counter(residual.group for residual in residuals)
    ordered = sorted(residuals)
    reached = 0.0
    for residual in ordered:
        reached += 1 / (members[residual.group] * len(members))
        if reached >= fraction - 1e-9:
            return residual.size
    return ordered[-1].size


FIGURES = "prediction_intervals.json"
FIRST_THAT_FITS = "of what is not stated the first that fits"
"""How an assumption ends that chooses a part of the plan."""

Interval = tuple[float, float]


class Category(StrEnum):
    """What is known of a run before it is measured."""

    STATED = "plan stated"
    """The products of its accelerator, or of the nearest relative, were fitted to published timings."""
    OPEN = "plan open"
    """The same, and recompute or microbatch is the first that fits, for the row states none."""
    UNTIMED = "kernels not timed"
    """No kernel of the accelerator was timed: its products come from data sheets."""


def category(cluster: Cluster, assumptions: Sequence[str]) -> Category:
    """Return what is known of a run on ``cluster`` that rests on ``assumptions``."""
    if any(device.matmul not in timed_products() for device in cluster.accelerators):
        return Category.UNTIMED
    return Category.OPEN if any(FIRST_THAT_FITS in line for line in assumptions) else Category.STATED


def step_time_interval(step_time: float, of: Category) -> Interval:
    """Return the seconds between which 90 % of runs of a category take, from the predicted ones."""
    widths = {name: fit["half_width"] for name, fit in _figures()["step_time"].items()}
    return around(step_time, half_width(widths, of))


def peak_memory_interval(peak: float) -> Interval:
    """Return the bytes between which 90 % of peaks lie, as the framework's allocator counts what it gave to tensors.

    That is so of runs like those of `describe_peak_runs`; peaks of other machines and trainers are further off.
    """
    return around(peak, _figures()["peak_memory"]["half_width"])


RUNS = {"simumax_b200": "on B200 with Megatron-LM"}
"""Machine and trainer of publishers whose peaks fit the interval of peaks."""


def describe_peak_runs() -> str:
    """Return how many runs, of which machine and trainer, `peak_memory_interval` is fitted to."""
    fit = _figures()["peak_memory"]
    return f"{format_count(fit['rows'], 'run')} {' and '.join(RUNS.get(name, f'of {name}') for name in fit['sources'])}"


RISK = 0.05
"""The probability of lacking memory up to which a plan is said to fit."""


@lru_cache(maxsize=8)
def memory_margin(risk: float, *, caching: bool, known: bool = True) -> float:
    """Return the bytes that a device needs for a predicted one, so that it lacks memory with probability ``risk``.

    Where a ``caching`` allocator keeps blocks of sizes that do not return, it reserves more than tensors have; where
    the framework's conventions are not ``known``, peaks are further off.
    """
    return uncertainty(Category.STATED, caching=caching, known=known).memory_margin(risk)


PLANNED = ("xla", "mindspore")
"""Frameworks that compile a step and plan its memory: XLA's buffer assignment, and in MindSpore's graph mode its "safe
optimized memory allocation solver", by which the operators of a graph share one static block."""


def caches_blocks(training: Training, cluster: Cluster) -> bool:
    """Return whether an allocator keeps blocks beside tensors: not planned memory, nor pages, nor a CPU."""
    blocks = training.framework not in PLANNED and not training.expandable_segments
    return blocks and not any(device.computes_collectives for device in cluster.accelerators)


def knows_conventions(training: Training) -> bool:
    """Return whether it is known what the framework keeps beside what autograd does."""
    return training.framework != UNKNOWN.name


def with_margin(problem: Problem, risk: float = RISK) -> Problem:
    """Return a problem in which a plan fits that lacks memory with probability ``risk`` at most."""
    caching, known = caches_blocks(problem.training, problem.cluster), knows_conventions(problem.training)
    margin = memory_margin(risk, caching=caching, known=known)
    return replace(problem, memory_margin=max(1.0, margin))  # what is predicted has to fit whatever the risk


def out_of_memory_of(problem: Problem, peak: float) -> float:
    """Return the probability that the smallest device of a problem lacks memory for a predicted peak in bytes."""
    return uncertainty_of(problem).lacks_memory(problem.cluster, peak)


def risk_limit(problem: Problem) -> float | None:
    """Return the probability of lacking memory up to which a plan of a problem is said to fit; None for any."""
    return RISK if problem.memory_margin > 1 else None


def uncertainty_of(problem: Problem, assumptions: Sequence[str] = ()) -> Uncertainty:
    """Return how far predictions of a problem may be off that rests on ``assumptions``."""
    of = category(problem.cluster, assumptions)
    caching, known = caches_blocks(problem.training, problem.cluster), knows_conventions(problem.training)
    return uncertainty(of, caching=caching, known=known)


def uncertainty(of: Category, *, caching: bool = True, known: bool = True) -> Uncertainty:
    """Return how far predictions of a category of runs may be off, with a ``caching`` allocator or without.

    ``known`` says whether the framework's conventions are.
    """
    figures = _figures()
    widths = {name: fit["half_width"] for name, fit in figures["step_time"].items()}
    ratios = figures["reserved_over_allocated"] if caching else {"least": 1.0, "median": 1.0, "largest": 1.0}
    return Uncertainty(
        coverage=figures["coverage"],
        step_time=half_width(widths, of),
        peak_memory=figures["peak_memory" if known else "unknown_framework"]["half_width"],
        reserved=(ratios["least"], ratios["median"], ratios["largest"]),
    )


def around(value: float, half_width: float) -> Interval:
    """Return the interval of ``half_width`` in natural logarithms to both sides of a value.

    >>> around(3.0, 0.0)
    (3.0, 3.0)
    """
    return value / exp(half_width), value * exp(half_width)


@lru_cache(maxsize=1)
def _figures() -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(files(__package__).joinpath(FIGURES).read_text("utf-8"))
    return figures
