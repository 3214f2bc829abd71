"""Robust least squares inside bounds: Levenberg-Marquardt on numpy alone."""

from collections.abc import Callable

import numpy as np

from simulator.interconnect.routes import FloatArray

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
