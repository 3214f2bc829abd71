"""Factors on times: their logarithms and limits, and the interval of what runs told about them."""

import numpy as np
import pytest

from meshwise.simulator.machine.factors import FACTORS, MAX_FACTOR, Factors, RunCalibration


def test_logarithms_and_factors_are_each_others_inverse() -> None:
    factors = Factors(compute=1.25, inter_latency=0.5, other=2.0)
    assert factors.logarithms[FACTORS.index("other")] == pytest.approx(np.log(2))
    assert Factors.from_logarithms(factors.logarithms).logarithms == pytest.approx(factors.logarithms)
    assert Factors.from_logarithms(np.zeros(len(FACTORS))) == Factors()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 2 * MAX_FACTOR])
def test_a_factor_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"memory lies in \[1/16, 16\]"):
        Factors(memory=value)


def test_an_interval_is_wider_for_either_doubt() -> None:
    def width(residual: float, spread: float) -> float:
        return RunCalibration("2026-11-28", 3, residual, spread, (), ()).find_half_width(0.9)

    assert width(0.0, 0.0) == 0.0
    assert max(width(0.1, 0.0), width(0.0, 0.2)) < width(0.1, 0.2) < width(0.1, 0.0) + width(0.0, 0.2)


@pytest.mark.parametrize("figures", [(0, 0.1, 0.1), (1, -0.1, 0.1), (1, 0.1, -0.1)])
def test_figures_that_cannot_be_are_refused(figures: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="a calibration has"):
        RunCalibration("2026-11-28", *figures, (), ())
