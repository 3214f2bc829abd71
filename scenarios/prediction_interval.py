"""How far a prediction may be off: 90 % intervals from the errors on published runs, and the margin of memory.

The half widths are in ``prediction_intervals.json``, which `scenarios.interval_calibration` writes.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from math import exp
from typing import Any

from scenarios.conformal import half_width
from scenarios.rows.row import FIRST_THAT_FITS
from simulator.catalog import timed_products
from simulator.cluster import Cluster
from strategies.explanation.uncertainty import Uncertainty

FIGURES = "prediction_intervals.json"

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
    """Return the bytes between which 90 % of peaks lie, as the framework's allocator counts what it gave to tensors."""
    return around(peak, _figures()["peak_memory"]["half_width"])


def with_margin(peak: float, reserved: float) -> float:
    """Return the bytes that a device with a predicted peak needs at the most.

    A caching allocator reserves more than it gives to tensors, for it keeps blocks of sizes that do not return. The
    margin is the largest ratio of the two among measured runs; ``reserved`` bytes, which the framework takes before
    the first tensor, are not part of it.
    """
    return float(reserved + (peak - reserved) * _figures()["reserved_over_allocated"]["largest"])


def uncertainty(of: Category) -> Uncertainty:
    """Return how far predictions of a category of runs may be off."""
    figures = _figures()
    widths = {name: fit["half_width"] for name, fit in figures["step_time"].items()}
    ratios = figures["reserved_over_allocated"]
    return Uncertainty(
        coverage=figures["coverage"],
        step_time=half_width(widths, of),
        peak_memory=figures["peak_memory"]["half_width"],
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
