from math import exp, inf
from statistics import NormalDist

import pytest

from meshwise.strategies.explanation.uncertainty import Uncertainty

GIB = 2.0**30
DOUBT = Uncertainty(coverage=0.9, step_time_width=0.2, peak_memory_width=1e-9, reserved_ratios=(1.0, 1.1, 1.3))


def test_the_interval_holds_what_it_claims() -> None:
    # 90 % lie between the 5 % and the 95 % quantile, which are exp(-0.2) and exp(0.2) of the prediction
    assert DOUBT.step_time_quantile(10.0, 0.95) == pytest.approx(10 * exp(0.2))
    assert DOUBT.step_time_quantile(10.0, 0.05) == pytest.approx(10 * exp(-0.2))
    assert DOUBT.step_time_quantile(10.0, 0.5) == pytest.approx(10.0)
    assert DOUBT.step_time_quantile(10.0, 1.0) == inf


@pytest.mark.parametrize(
    ("peak", "lacks"),
    [
        (60.0, 0.0),  # 78 of 80 at the most
        (80 / 1.2, 0.25),  # 1.2 is half way from the median 1.1, 50 %, to the largest 1.3, 100 %
        (80 / 1.1, 0.5),
        (80 / 1.05, 0.75),  # half way from the least to the median
        (80.1, 1.0),
    ],
)
def test_memory_lacks_where_the_allocator_keeps_too_much(peak: float, lacks: float) -> None:
    assert DOUBT.estimate_memory_risk(peak * GIB, 80 * GIB) == pytest.approx(lacks, abs=1e-6)


def test_what_the_framework_takes_is_exact() -> None:
    # 10 of 80 GiB are the framework's: the other 70 hold 56 GiB 1.25 times, above 1.1 by 0.15 of 0.2
    assert DOUBT.estimate_memory_risk(66 * GIB, 80 * GIB, 10 * GIB) == pytest.approx(0.5 - 0.5 * 0.75, abs=1e-6)


def test_errors_of_predicted_memory_count_too() -> None:
    # nothing is kept beside tensors: the peak must be 10 % too low, 1.6449 / 2 standard deviations
    loose = Uncertainty(coverage=0.9, step_time_width=0.1, peak_memory_width=0.2, reserved_ratios=(1.0, 1.0, 1.0))
    lacks = loose.estimate_memory_risk(exp(-0.1) * GIB, GIB)
    assert lacks == pytest.approx(1 - NormalDist().cdf(1.6448536 / 2), abs=0.005)
