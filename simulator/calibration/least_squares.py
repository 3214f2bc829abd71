"""Robust least squares inside bounds, on numpy alone.

`least_squares` is Levenberg-Marquardt; `fit` works in log time: damped Gauss-Newton with differences, for a handful
of parameters, which it keeps near their guesses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.calibration.parameters import Parameter
from meshwise.simulator.interconnect.routes import FloatArray

_STEP = 1e-4


def least_squares(
    residuals: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    bounds: tuple[FloatArray, FloatArray],
    weight: FloatArray,
    *,
    rounds: int = 60,
    outlier: float = 0.1,
) -> tuple[FloatArray, float]:
    """Return the parameters of the least weighted cost, and that cost.

    The cost of a residual is its square half, and grows as a straight line beyond ``outlier`` [1]_. A step
    solves the normal equations with a damped diagonal [2]_, weighted anew, and is cut off at the bounds.

    References
    ----------
    .. [1] Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35(1), 1964.
    .. [2] Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11(2), 1963.
    """
    low, high = bounds
    found = np.clip(start, low, high)
    value = residuals(found)
    cost, damping = _cost(value, weight, outlier), 1e-2
    for _ in range(rounds):
        slope = _slopes(residuals, found, value, high)
        scaled = weight * np.minimum(1.0, outlier / np.maximum(np.abs(value), 1e-12))
        normal, gradient = slope.T @ (scaled[:, None] * slope), slope.T @ (scaled * value)
        for _ in range(8):
            damped = normal + np.diag(damping * np.diag(normal) + 1e-9)
            tried = np.clip(found - np.linalg.solve(damped, gradient), low, high)
            now = residuals(tried)
            better = _cost(now, weight, outlier)
            if better < cost:
                break
            damping *= 4
        else:
            return found, cost
        enough = cost - better < 1e-7 * cost
        found, value, cost, damping = tried, now, better, max(damping / 5, 1e-7)
        if enough:
            break
    return found, cost


def _cost(value: FloatArray, weight: FloatArray, outlier: float) -> float:
    size = np.abs(value)
    return float(np.sum(weight * np.where(size < outlier, size**2 / 2, outlier * (size - outlier / 2))))


def _slopes(
    residuals: Callable[[FloatArray], FloatArray], at: FloatArray, value: FloatArray, high: FloatArray
) -> FloatArray:
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += _STEP if at[index] + _STEP <= high[index] else -_STEP
        columns.append((residuals(moved) - value) / (moved[index] - at[index]))
    return np.stack(columns, axis=1)


TOLERATED = 0.1
"""Log errors above this count linearly, not squared (Huber 1964): publishers' outliers do not move the fit."""

ROUNDS = 40
TRIES = 8

Vector = NDArray[np.float64]
Residuals = Callable[[Vector], Vector]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is made least, over values as parts of their bounds' distance.

    Parameters
    ----------
    stiff
        How much each parameter's distance from its guess weighs, shape [parameters].
    """

    errors: Residuals
    weights: Vector
    guess: Vector
    stiff: Vector

    def loss(self, error: Vector, unit: Vector) -> float:
        """Return what is made least: squares of small errors, sizes of large ones, and distance from the guess."""
        size = np.abs(error)
        huber = np.where(size < TOLERATED, size**2, TOLERATED * (2 * size - TOLERATED))
        return float(self.weights @ huber + self.stiff @ (unit - self.guess) ** 2)


def fit(parameters: Sequence[Parameter], residuals: Residuals, weights: Vector) -> Vector:
    """Return the values that make ``residuals`` least, within bounds, shape [parameters].

    Parameters
    ----------
    residuals
        Log of predicted over measured time, shape [rows], of the values of ``parameters``.
    weights
        Of the rows, shape [rows]. A parameter a ``spread`` from its guess weighs as one row that is off by 10 %.

    Notes
    -----
    One descent, from the guess: six more, from all over the bounds, ended at the same values on every accelerator
    of the catalogue, and at no lower loss.
    """
    low = np.array([each.low for each in parameters])
    span = np.array([each.high for each in parameters]) - low
    guess = (np.array([each.guess for each in parameters]) - low) / span
    stiff = (TOLERATED / np.array([each.spread for each in parameters])) ** 2
    problem = Problem(lambda unit: residuals(low + unit * span), weights, guess, stiff)
    values: Vector = low + _descent(problem) * span
    return values


def _descent(problem: Problem) -> Vector:
    """Return where the loss is least downhill from the guess."""
    unit, damping = problem.guess, 1e-2
    error = problem.errors(unit)
    best = problem.loss(error, unit)
    for _ in range(ROUNDS):
        before = best
        slope = _slope(problem.errors, unit, error)
        influence = problem.weights * np.minimum(1.0, TOLERATED / np.maximum(np.abs(error), 1e-12))
        normal = slope.T @ (influence[:, None] * slope) + np.diag(problem.stiff)
        downhill = slope.T @ (influence * error) + problem.stiff * (unit - problem.guess)
        for _ in range(TRIES):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), downhill)
            tried = np.clip(unit - step, 0.0, 1.0)
            found = problem.errors(tried)
            value = problem.loss(found, tried)
            if value < best:
                unit, error, best, damping = tried, found, value, damping / 4
                break
            damping *= 5
        if before - best < 1e-4 * before:
            break
    return unit


def _slope(errors: Residuals, unit: Vector, error: Vector) -> Vector:
    """Return the derivatives of ``errors``, shape [rows, parameters], by steps that stay within bounds."""
    columns = []
    for index in range(len(unit)):
        step = -1e-3 if unit[index] > 0.5 else 1e-3
        moved = unit.copy()
        moved[index] += step
        columns.append((errors(moved) - error) / step)
    return np.array(columns).T
