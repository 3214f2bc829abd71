"""Zipf's law: harmonic numbers against plain sums, hit rates and distinct rows against samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.tables.popularity import compute_harmonic, compute_hit_rate, expect_distinct

exponents = st.floats(0, 3)


@given(st.integers(1, 200_000), exponents)
def test_harmonic_numbers_are_sums_of_all_their_terms(count: int, exponent: float) -> None:
    terms = np.arange(count, 0, -1, dtype=np.float64) ** -exponent
    assert compute_harmonic(count, exponent) == pytest.approx(float(terms.sum()), rel=1e-12)


def test_the_harmonic_number_of_a_billion_is_a_logarithm() -> None:
    # H(n, 1) = ln n + 0.57721566490153286 + 1 / 2n - ...
    assert compute_harmonic(10**9, 1.0) == pytest.approx(np.log(1e9) + 0.57721566490153286 + 0.5e-9, rel=1e-14)


@given(st.integers(1, 10**6), exponents, st.data())
def test_hit_rates_rise_from_nothing_to_all(num_rows: int, exponent: float, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=2)))
    rates = [compute_hit_rate(num_rows, exponent, cached) for cached in (0, first, second, num_rows)]
    assert rates == sorted(rates)
    assert rates[0] == 0 and rates[-1] == 1


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.4])
def test_samples_hit_and_differ_as_often_as_told(exponent: float) -> None:
    num_rows, num_cached, num_lookups, num_trials = 20_000, 1500, 5000, 40
    chances = np.arange(1, num_rows + 1) ** -exponent
    draws = np.random.default_rng(7).choice(num_rows, (num_trials, num_lookups), p=chances / chances.sum())
    hits = (draws < num_cached).mean()
    # 200,000 look-ups: a rate's standard error is at most 0.5 / sqrt(200,000) = 0.0012
    assert hits == pytest.approx(compute_hit_rate(num_rows, exponent, num_cached), abs=0.005)
    for skipped in (0, num_cached):
        distinct = np.mean([np.count_nonzero(np.unique(row) >= skipped) for row in draws])
        assert distinct == pytest.approx(expect_distinct(num_rows, exponent, num_lookups, skipped), rel=0.01)


@given(st.integers(1, 300_000), st.floats(0, 2), st.integers(0, 10**7), st.data())
def test_distinct_rows_are_a_sum_over_rows(
    num_rows: int, exponent: float, num_lookups: int, data: st.DataObject
) -> None:
    skipped = data.draw(st.integers(0, num_rows))
    chances = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    chances /= chances.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        found = -np.expm1(num_lookups * np.log1p(-np.minimum(chances, 1.0)))[skipped:].sum() if num_lookups else 0.0
    assert expect_distinct(num_rows, exponent, num_lookups, skipped) == pytest.approx(found, rel=1e-6, abs=1e-6)
