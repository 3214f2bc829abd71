"""Rates of 32 bits: the ticks of a transfer by exact fractions, one by one and as arrays."""

from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.flows import pace, ticks_at, ticks_at_each, units

moves, rates = st.floats(2.0**-10, 2.0**80), st.floats(2.0**-20, 2.0**60)


@settings(max_examples=1000, deadline=None)
@given(moves, rates)
def test_ticks_are_those_of_fractions(moved: float, rate: float) -> None:
    assert ticks_at(moved, rate) == ceil(Fraction(moved) / Fraction(pace(rate), 2**64))


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.tuples(moves, rates), min_size=1, max_size=8))
def test_an_array_has_the_ticks_of_each(pairs: list[tuple[float, float]]) -> None:
    assume(all(moved / rate < 2.0**60 for moved, rate in pairs))
    moved, rate = np.array(pairs).T
    assert ticks_at_each(moved, rate).tolist() == [ticks_at(*pair) for pair in pairs]


@given(rates)
def test_a_rate_is_rounded_to_32_bits(rate: float) -> None:
    assert abs(Fraction(pace(rate), 2**64) / Fraction(rate) - 1) <= Fraction(1, 2**32)


def test_what_moves_nothing_takes_no_time() -> None:
    assert (units(0.0), ticks_at_each(np.array([0.0]), np.array([1.0])).tolist()) == (0, [0])
