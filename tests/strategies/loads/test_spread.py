"""Distributions: quantiles rise, draws have the quantiles of their distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.loads.spread import LogNormal, Measured, draw_spread

SHARES = st.floats(0.001, 0.999)


@given(SHARES, SHARES, st.floats(1, 3), st.floats(1, 3))
def test_quantiles_rise(first: float, second: float, median: float, factor: float) -> None:
    low, high = sorted((first, second))
    for spread in (LogNormal(median, median * factor), Measured((median, median * factor, 1.0))):
        assert spread.find_quantile(low) <= spread.find_quantile(high)


def test_draws_have_the_quantiles_of_the_distribution() -> None:
    values = np.sort(draw_spread(LogNormal(1.2, 1.8), np.random.default_rng(0), 20))
    # the middle of the last of 20 equal shares is the quantile 0.975: 1.2 * (1.8 / 1.2) ** (1.959964 / 1.644854)
    assert values[-1] == pytest.approx(1.2 * 1.5 ** (1.959964 / 1.644854), rel=1e-5)
    assert values[9] < 1.2 < values[10]
    assert sorted(draw_spread(Measured((2.0, 1.0)), np.random.default_rng(0), 4)) == [1.0, 1.0, 2.0, 2.0]


def test_a_quantile_below_the_median_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p95 is at least median\(2\), met 1; nearest: 2"):
        LogNormal(2.0, 1.0)
