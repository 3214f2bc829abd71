"""Robust nonlinear least squares within bounds, by `scipy.optimize`.

Only fits import this module: `scipy.optimize` takes longer to load than a plan takes to simulate.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import approx_fprime
from scipy.optimize import least_squares as solve

from meshwise.simulator.calibration.parameters import Parameter

OUTLIER = 0.1
"""Log errors above this count linearly, not squared (Huber 1964): publishers' outliers do not move the fit."""

_DIFFERENCE_STEP = 1e-4
"""Step of finite differences: simulated times are rounded to a relative 1e-6, which a smaller step would see."""

Vector = NDArray[np.float64]
Residuals = Callable[[Vector], Vector]


def least_squares(
    residuals: Residuals,
    start: Vector,
    bounds: tuple[Vector, Vector],
    weights: Vector,
    *,
    outlier: float | Vector = OUTLIER,
    max_evaluations: int | None = None,
) -> tuple[Vector, float]:
    """Return the values of the least weighted cost within ``bounds``, shape [parameters], and that cost.

    The cost of a residual is half its square, and grows as a straight line beyond ``outlier`` [1]_. The solver is
    Powell's dogleg in a rectangular trust region [2]_, which ends exactly on a bound where the least cost is beyond.

    Parameters
    ----------
    weights
        Weights of the residuals, shape [residuals].
    outlier
        One value for all residuals, or shape [residuals]; infinite for a purely quadratic cost.
    max_evaluations
        Most evaluations of ``residuals``, not counting those for derivatives.

    References
    ----------
    .. [1] Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35(1), 1964.
    .. [2] Voglis and Lagaris, "A rectangular trust region dogleg approach for unconstrained and bound constrained
       nonlinear optimization", WSEAS Conf. on Applied Mathematics, 2004.
    """
    low, high = bounds
    # scipy has no weights: the root of a weight multiplies its residual, and the size from which the loss is linear
    root = np.sqrt(weights)
    outlier_limits = root * outlier

    def weighted(values: Vector) -> Vector:
        return root * residuals(values)

    def slopes(values: Vector) -> Vector:
        steps = np.where(values + _DIFFERENCE_STEP > high, -_DIFFERENCE_STEP, _DIFFERENCE_STEP)
        jacobian: Vector = approx_fprime(values, weighted, steps)
        return jacobian

    solution = solve(
        weighted,
        np.clip(start, low, high),
        jac=slopes,
        bounds=bounds,
        method="dogbox",
        loss=lambda squares: _huber(squares, outlier_limits),
        x_scale="jac",
        max_nfev=max_evaluations,
    )
    return solution.x, float(solution.cost)


def _huber(squares: Vector, limits: Vector) -> Vector:
    """Return Huber's loss of squared residuals and its derivatives as the solver takes them, shape [3, residuals].

    >>> _huber(np.array([4.0, 16.0]), np.array([2.0, 2.0])).tolist()  # |r| = 4 counts 2 * 2 * 4 - 2**2
    [[4.0, 12.0], [1.0, 0.5], [0.0, 0.0]]
    """
    is_outlier = squares > limits**2
    # ones replace entries that the outer `where` discards: no division by 0, no product with an infinite limit
    size, limits = np.sqrt(np.where(is_outlier, squares, 1.0)), np.where(is_outlier, limits, 1.0)
    loss = np.where(is_outlier, 2 * limits * size - limits**2, squares)
    # 0 is not the true second derivative, with which a linear part has no curvature and a start where all residuals
    # are outliers makes no step; with 0 a step is one of iteratively reweighted least squares
    return np.array([loss, np.where(is_outlier, limits / size, 1.0), np.zeros_like(squares)])


def fit_parameters(parameters: Sequence[Parameter], residuals: Residuals, weights: Vector) -> Vector:
    """Return the values of ``parameters`` that minimise ``residuals`` within bounds, shape [parameters].

    Parameters
    ----------
    residuals
        Returns the log of predicted over measured time, shape [rows], for values of ``parameters``.
    weights
        Weights of the rows, shape [rows]. A parameter one ``spread`` from its guess costs as much as a row that is
        off by 10 %.

    Notes
    -----
    One descent, from the guess: six more, from all over the bounds, ended at the same values on every accelerator
    of the catalogue, and at no lower loss.
    """
    low = np.array([parameter.low for parameter in parameters])
    span = np.array([parameter.high for parameter in parameters]) - low
    guess = (np.array([parameter.guess for parameter in parameters]) - low) / span
    prior = (OUTLIER / np.array([parameter.spread for parameter in parameters])) ** 2
    outlier = np.concatenate([np.full(len(weights), OUTLIER), np.full(len(guess), inf)])

    def with_prior(fractions: Vector) -> Vector:
        return np.concatenate([residuals(low + fractions * span), fractions - guess])

    bounds = np.zeros(len(guess)), np.ones(len(guess))
    fractions, _ = least_squares(with_prior, guess, bounds, np.concatenate([weights, prior]), outlier=outlier)
    values: Vector = low + fractions * span
    return values
