"""Kendall's tau by hand: pairs in the same order less those in the other, over all pairs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.rank_correlation import kendall_tau

NUMBERS = st.integers(-5, 5)


def test_a_tie_counts_for_neither_order() -> None:
    # of six pairs (1, 2) is tied in the second number; (3, 4) is in the other order; four are in the same one; tau-b
    # divides by the geometric mean of the pairs that are not tied in either number: 6 and 5
    assert kendall_tau([(1, 1), (2, 1), (3, 3), (4, 2)]) == pytest.approx((4 - 1) / (6 * 5) ** 0.5)
    assert kendall_tau([]) == kendall_tau([(1, 2)]) == 0


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8))
def test_the_other_order_has_the_other_sign(pairs: list[tuple[int, int]]) -> None:
    assert kendall_tau([(a, -b) for a, b in pairs]) == -kendall_tau(pairs)
    assert kendall_tau([(b, a) for a, b in pairs]) == kendall_tau(pairs)
