"""Least squares: what made the numbers is found, outliers pull no more than a straight line does, bounds hold."""

import numpy as np
import pytest

from meshwise.simulator.calibration.least_squares import fit_parameters, least_squares
from meshwise.simulator.calibration.parameters import Parameter
from meshwise.simulator.interconnect.routes import FloatArray

X = np.arange(9.0)
FREE = (np.array([-10.0, -10.0]), np.array([10.0, 10.0]))


def line(values: FloatArray) -> FloatArray:
    return values[0] + values[1] * X


def test_the_line_that_made_the_points_is_found() -> None:
    points = 2.0 - 0.5 * X
    found, cost = least_squares(lambda v: line(v) - points, np.zeros(2), FREE, np.ones(9))
    assert found == pytest.approx([2.0, -0.5], abs=1e-5)
    assert cost < 1e-9


def test_one_point_far_away_pulls_no_more_than_one_that_is_near() -> None:
    found = []
    for off in (1.0, 100.0):
        points = 2.0 - 0.5 * X
        points[4] += off
        found.append(least_squares(lambda v, points=points: line(v) - points, np.zeros(2), FREE, np.ones(9))[0])
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    # plain least squares would lift the line by the mean of what is off: 100 / 9
    assert found[1] == pytest.approx([2.0, -0.5], abs=0.05)


def test_a_constant_is_the_weighted_mean_within_its_bounds() -> None:
    points, weight = np.array([0.0, 0.05]), np.array([1.0, 3.0])
    low, high = np.array([-1.0]), np.array([1.0])
    found, _ = least_squares(lambda v: v[0] - points, np.zeros(1), (low, high), weight)
    assert found[0] == pytest.approx(0.05 * 3 / 4, abs=1e-6)
    found, _ = least_squares(lambda v: v[0] - points, np.zeros(1), (low, np.array([0.01])), weight)
    assert found[0] == pytest.approx(0.01)


def test_a_parameter_is_its_guess_unless_rows_say_otherwise() -> None:
    parameter = Parameter("p", 0.0, 1.0, 0.3, 0.1)
    assert fit_parameters([parameter], lambda v: 0.0 * v[:1], np.ones(1)) == pytest.approx([0.3])
    # one row asks for 0.4 and the guess, a spread of 0.1 away, for 0.3; both weigh the same: half way
    [value] = fit_parameters([parameter], lambda v: v - 0.4, np.ones(1))
    assert value == pytest.approx(0.35, abs=1e-3)
