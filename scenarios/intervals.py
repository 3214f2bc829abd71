"""How far a prediction may be off: 90 % intervals from the errors on published runs, and the memory margin.

The ends of intervals and the half widths of risks are in ``prediction_intervals.json``, which
`tests.studies.interval_calibration` fits and writes; the methods are told there and in `tests.studies.interval_ends`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from math import exp
from typing import Any

from meshwise.simulator.catalog import list_timed_products
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.factors import RunCalibration
from meshwise.simulator.units import format_count
from meshwise.strategies.allocation.planned import plans_memory
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.plan.framework import ENTRIES, UNKNOWN
from meshwise.strategies.plan.problem import Problem, Training


def find_half_width(widths: Mapping[str, float], category: str) -> float:
    """Return the half width of a category; the largest of all for a category without errors."""
    return widths.get(category, max(widths.values()))


FIGURES = "prediction_intervals.json"
FIRST_THAT_FITS = "of what is not stated the first that fits"
"""How an assumption ends that chooses a part of the plan."""
NOT_UNDERSTOOD = "is not understood"
"""What an assumption says of a word of a published run that no vocabulary has."""
NOT_KNOWN = "not known"
"""Words of the assumption about a framework that the table has not."""
GUESSED = "a guess, for no field tells"
"""How an assumption ends that takes what is common for a figure that a step depends on."""

PRICED_AS_UNKNOWN = "priced as unknown"
"""Part of an assumption that takes a framework for one that is not known."""

Interval = tuple[float, float]


class Category(StrEnum):
    """What is known of a run before it is measured."""

    STATED = "plan stated"
    """The products of its accelerator, or of the nearest relative, were fitted to published timings."""
    OPEN = "plan open"
    """The same, and recompute or microbatch is the first that fits, for the row states none."""
    UNKNOWN = "framework not known"
    """Nobody knows what runs the step: the ends are those of all runs together."""
    UNTIMED = "kernels not timed"
    """No kernel of the accelerator was timed: its products come from data sheets."""
    UNREAD = "words not understood"
    """The run may not be the one that is simulated: words are not known, or a figure is guessed."""


def find_category(cluster: Cluster, assumptions: Sequence[str]) -> Category:
    """Return the category of runs on ``cluster`` that rest on ``assumptions``."""
    if any(mark in line for line in assumptions for mark in (NOT_UNDERSTOOD, GUESSED)):
        return Category.UNREAD
    if any(device.matmul not in list_timed_products() for device in cluster.accelerators):
        return Category.UNTIMED
    if any(PRICED_AS_UNKNOWN in line for line in assumptions):
        return Category.UNKNOWN
    return Category.OPEN if any(FIRST_THAT_FITS in line for line in assumptions) else Category.STATED


def step_time_interval(step_time: float, run_category: Category, calibration: RunCalibration | None = None) -> Interval:
    """Return the interval, in seconds around a predicted step time, that contains 90 % of the runs of a category.

    It holds for publishers that had no part in the fit, and its ends lie apart unevenly, as errors do: predictions are
    too fast more often than too slow. On a machine that was fitted to measured steps of its own it is as wide as that
    ``calibration`` says.
    """
    if calibration is not None:
        return build_interval(step_time, calibration.find_half_width(load_figures()["coverage"]))
    is_known = run_category not in (Category.UNKNOWN, Category.UNREAD)
    return _apply_ends(step_time, load_figures()["step_time_ends"]["known" if is_known else "unknown"])


def find_step_interval(problem: Problem, step_time: float, assumptions: Sequence[str] = ()) -> Interval:
    """Return the interval of a step of a problem, under the assumptions of its scenario."""
    return step_time_interval(step_time, _find_problem_category(problem, assumptions), problem.cluster.calibration)


def _find_problem_category(problem: Problem, assumptions: Sequence[str]) -> Category:
    is_unknown = problem.training.framework == UNKNOWN.name
    return Category.UNKNOWN if is_unknown else find_category(problem.cluster, assumptions)


def peak_memory_interval(peak: float, framework: str = UNKNOWN.name) -> Interval:
    """Return the interval, in bytes around a predicted peak, that contains 90 % of the peaks measured of a framework.

    ``peak`` and the measured peak are of one kind: allocated, reserved or of the device.
    """
    return _apply_ends(peak, _find_peak_ends(framework))


def _find_peak_ends(framework: str) -> dict[str, Any]:
    ends: dict[str, dict[str, Any]] = load_figures()["peak_memory_ends"]
    return ends.get(ENTRIES[framework].family, ends["all"])


def _apply_ends(value: float, ends: Mapping[str, Any]) -> Interval:
    return value * exp(ends["low"]), value * exp(ends["high"])


def describe_peak_runs(framework: str = UNKNOWN.name) -> str:
    """Return in words how many runs, of how many publishers, `peak_memory_interval` is fitted to."""
    ends = _find_peak_ends(framework)
    return f"{format_count(ends['rows'], 'run')} of {format_count(len(ends['publishers']), 'publisher')}"


RISK = 0.05
"""The probability of lacking memory up to which a plan is said to fit."""


@lru_cache(maxsize=8)
def memory_margin(risk: float, *, is_caching: bool, is_known: bool = True) -> float:
    """Return the factor on a predicted peak at which a device lacks memory with probability ``risk``.

    It is larger with a caching allocator, which reserves more bytes than tensors have because it keeps blocks of sizes
    that do not return; and where the framework's conventions are not known, because errors of peaks are larger.
    """
    return build_uncertainty(Category.STATED, is_caching=is_caching, is_known=is_known).memory_margin(risk)


def caches_blocks(training: Training, cluster: Cluster) -> bool:
    """Return whether the allocator caches blocks: not with planned memory, expandable segments or on a CPU."""
    return not (plans_memory(training, cluster) or training.expandable_segments)


UNCHECKED_FAMILY = "autograd"
"""Family of frameworks of which no more is known than what autograd does: no peaks were compared with measured ones."""


def _describe_memory(problem: Problem) -> dict[str, bool]:
    """Return whether the allocator of a problem caches blocks, and whether conventions beyond autograd's are known."""
    is_caching = caches_blocks(problem.training, problem.cluster)
    return {"is_caching": is_caching, "is_known": ENTRIES[problem.training.framework].family != UNCHECKED_FAMILY}


def with_margin(problem: Problem, risk: float = RISK) -> Problem:
    """Return the problem with a memory margin: a plan fits if it lacks memory with probability ``risk`` at most."""
    margin = memory_margin(risk, **_describe_memory(problem))
    return replace(problem, memory_margin=max(1.0, margin))  # the predicted peak has to fit at any risk


def find_risk_limit(problem: Problem) -> float | None:
    """Return the largest probability of lacking memory at which a plan of a problem fits; None without such a limit."""
    return RISK if problem.memory_margin > 1 else None


def find_uncertainty(problem: Problem, assumptions: Sequence[str] = ()) -> Uncertainty:
    """Return how far predictions for a problem may be off, under the assumptions of its scenario."""
    uncertainty = build_uncertainty(_find_problem_category(problem, assumptions), **_describe_memory(problem))
    calibration = problem.cluster.calibration
    if calibration is None:
        return uncertainty
    return replace(uncertainty, step_time_width=calibration.find_half_width(uncertainty.coverage))


def build_uncertainty(run_category: Category, *, is_caching: bool = True, is_known: bool = True) -> Uncertainty:
    """Return how far predictions for a category of runs may be off.

    ``is_caching`` says whether the allocator caches blocks, ``is_known`` whether the framework's conventions are known.
    """
    figures = load_figures()
    widths = {name: fit["half_width"] for name, fit in figures["step_time"].items()}
    ratios = figures["reserved_over_allocated"] if is_caching else {"least": 1.0, "median": 1.0, "largest": 1.0}
    return Uncertainty(
        coverage=figures["coverage"],
        step_time_width=find_half_width(widths, run_category),
        peak_memory_width=figures["peak_memory" if is_known else "unknown_framework"]["half_width"],
        reserved_ratios=(ratios["least"], ratios["median"], ratios["largest"]),
        replay_width=figures["replay" if is_known else "replay_unknown_framework"]["half_width"],
    )


def build_interval(value: float, half_width: float) -> Interval:
    """Return the interval from ``value / exp(half_width)`` to ``value * exp(half_width)``.

    >>> build_interval(3.0, 0.0)
    (3.0, 3.0)
    """
    return value / exp(half_width), value * exp(half_width)


@lru_cache(maxsize=1)
def load_figures() -> dict[str, Any]:
    """Return the fitted figures of intervals and widths: the file as it is."""
    figures: dict[str, Any] = json.loads(files(__package__).joinpath(FIGURES).read_text("utf-8"))
    return figures
