"""Factors of a machine from a few measured steps: a Gaussian prior over machines, and the posterior.

With ``x`` the logarithms of the factors, the fit minimises

``sum of huber((ln measured - ln predicted(x)) / residual) + (x - means)' precision (x - means) / 2``

by iteratively reweighted Gauss-Newton steps, and takes the inverse of the Hessian of the weighted squares there as the
covariance (the Laplace approximation [1]_). Huber's weights [2]_ let a run that is far off push with the force of one
that is `OUTLIER` residuals off. Runs of one plan are one run, their median: repeats differ by less than a percent,
while the error of the prediction, which the residual stands for, is the same for all.

References
----------
.. [1] MacKay, "Information theory, inference, and learning algorithms", 2003, chapter 27.
.. [2] Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35(1), 1964.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from math import log, sqrt
from statistics import median
from typing import Any

import numpy as np

from meshwise.scenarios.machine_fit.shares import MeasuredStep, StepTable, Vector, build_table
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.factors import FACTORS, MAX_FACTOR, Factors

PRIOR = "factor_priors.json"
"""Figures of the prior, which `tests.studies.factor_priors` fits to publishers and writes."""

OUTLIER = 1.345
"""Residuals beyond which errors count linearly: 95 % efficient where errors are normal after all (Huber 1964)."""

FREEDOM = 4.0
"""Number of runs that the prior's residual weighs as much as, against the scatter of a machine's own runs."""

_STEPS, _HALVINGS, _TOLERANCE = 50, 30, 1e-10


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of the factors of a machine before it is measured: independent normal logarithms.

    Parameters
    ----------
    means, deviations
        Of the logarithms of factors, in the order of `FACTORS`.
    residual
        Standard deviation of ln(measured / predicted) about a prediction with the right factors.
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    residual: float

    def __post_init__(self) -> None:
        if not len(self.means) == len(self.deviations) == len(FACTORS):
            raise ValueError(f"a prior has {len(FACTORS)} means and deviations, met {self}")
        if min(*self.deviations, self.residual) <= 0:
            raise ValueError(f"deviations and residual of a prior are positive, met {self}")

    @property
    def factors(self) -> Factors:
        """The most likely factors."""
        return Factors.from_logarithms(np.array(self.means))

    def know_factors(self, known: Mapping[str, tuple[float, float]]) -> "Prior":
        """Return the prior with what is known of some factors from elsewhere.

        A table of collectives, for example, tells the factors of links better than steps do. ``known`` has, by name,
        the factor and the standard deviation of its logarithm.

        >>> prior = Prior((0.0,) * 8, (0.2,) * 8, 0.1).know_factors({"inter_rate": (1.0, 0.05)})
        >>> prior.deviations[FACTORS.index("inter_rate")]
        0.05
        """
        means = [log(known[name][0]) if name in known else mean for name, mean in zip(FACTORS, self.means, strict=True)]
        deviations = [
            known[name][1] if name in known else deviation
            for name, deviation in zip(FACTORS, self.deviations, strict=True)
        ]
        return replace(self, means=tuple(means), deviations=tuple(deviations))


@lru_cache(maxsize=1)
def load_prior() -> Prior:
    """Return the prior fitted to all publishers."""
    figures: dict[str, Any] = json.loads(files(__package__).joinpath(PRIOR).read_text("utf-8"))
    pairs = [figures["factors"][name] for name in FACTORS]
    return Prior(tuple(pair["mean"] for pair in pairs), tuple(pair["deviation"] for pair in pairs), figures["residual"])


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is known of the factors of a machine after some of its steps were measured.

    Parameters
    ----------
    means
        Of the logarithms of factors, shape [factors].
    covariance
        Shape [factors, factors].
    residual
        As in `Prior`; the scatter of the machine's own runs counts.
    weights
        Huber's weight of every run by its plan, below 1 for outliers.
    """

    means: Vector
    covariance: Vector
    residual: float
    weights: tuple[tuple[object, float], ...]

    __repr__ = brief_repr("means", "residual")

    @property
    def factors(self) -> Factors:
        """The most likely factors."""
        return Factors.from_logarithms(self.means)

    @property
    def deviations(self) -> Vector:
        """Standard deviations of the logarithms of factors, shape [factors]."""
        result: Vector = np.sqrt(np.diag(self.covariance))
        return result

    def find_spreads(self, steps: Sequence[MeasuredStep]) -> Vector:
        """Return the standard deviations of the logarithms of predicted steps from unknown factors, shape [steps]."""
        slopes = build_table(steps).extrapolate(self.means)[1]
        result: Vector = np.sqrt(np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes))
        return result


def fit_posterior(steps: Sequence[MeasuredStep], prior: Prior) -> Posterior:
    """Return the posterior of the factors after ``steps``, in any order; without any it is the prior."""
    plans = _merge_repeats(steps)
    table = build_table([step for _, step in plans])
    means, precision = np.array(prior.means), np.diag(np.array(prior.deviations) ** -2.0)
    logarithms, limit = means, log(MAX_FACTOR)
    for _ in range(_STEPS):
        errors, slopes, weights = _find_errors(table, logarithms, prior.residual)
        weighted = slopes.T * weights / prior.residual**2
        hessian = weighted @ slopes + precision
        step = np.linalg.solve(hessian, weighted @ errors - precision @ (logarithms - means))
        misfit = _find_misfit(table, prior, logarithms)
        # a whole step overshoots where shares change much on the way: it is halved until it fits no worse
        sizes = (0.5**halvings for halvings in range(_HALVINGS))
        tries = (np.clip(logarithms + size * step, -limit, limit) for size in sizes)
        moved = next((trial for trial in tries if _find_misfit(table, prior, trial) <= misfit), logarithms)
        largest = float(np.abs(moved - logarithms).max())
        logarithms = moved
        if largest < _TOLERANCE:
            break
    errors, slopes, weights = _find_errors(table, logarithms, prior.residual)
    precision = (slopes.T * weights) @ slopes / prior.residual**2 + precision
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    variances = errors**2 + np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
    residual = sqrt((FREEDOM * prior.residual**2 + float(weights @ variances)) / (FREEDOM + len(plans)))
    names = tuple((plan, float(weight)) for (plan, _), weight in zip(plans, weights, strict=True))
    return Posterior(logarithms, covariance, residual, names)


def _find_misfit(table: StepTable, prior: Prior, logarithms: Vector) -> float:
    """Return what the fit minimises: Huber's losses of the steps, and the squares of the prior."""
    errors = np.abs(table.ratios - table.extrapolate(logarithms)[0]) / prior.residual
    losses = np.where(errors <= OUTLIER, errors**2 / 2, OUTLIER * errors - OUTLIER**2 / 2)
    distances = (logarithms - np.array(prior.means)) / np.array(prior.deviations)
    return float(losses.sum() + (distances**2).sum() / 2)


def _find_errors(table: StepTable, logarithms: Vector, residual: float) -> tuple[Vector, Vector, Vector]:
    """Return ln(measured / predicted with factors), its derivatives but for the sign, and Huber's weights."""
    changes, slopes = table.extrapolate(logarithms)
    errors = table.ratios - changes
    weights: Vector = np.minimum(1.0, OUTLIER * residual / np.maximum(np.abs(errors), 1e-300))
    return errors, slopes, weights


def _merge_repeats(steps: Sequence[MeasuredStep]) -> list[tuple[object, MeasuredStep]]:
    """Return one step a plan, with the median measured time of its runs."""
    members: dict[object, list[MeasuredStep]] = {}
    for step in steps:
        members.setdefault(step.plan, []).append(step)
    return [
        (plan, replace(repeats[0], measured=median(step.measured for step in repeats)))
        for plan, repeats in members.items()
    ]
