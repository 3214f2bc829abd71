"""Ends of intervals: quantiles by hand, and coverage of publishers that are left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .interval_ends import (
    LEVELS,
    Deviation,
    choose_level,
    drop_small,
    find_ends,
    find_quantile,
    leave_publishers_out,
)

DEVIATIONS = st.lists(st.builds(Deviation, st.floats(-2, 2), st.sampled_from("abc")), min_size=2, max_size=30).filter(
    lambda rows: len({row.publisher for row in rows}) > 1
)


def of(publisher: str, values: list[float]) -> list[Deviation]:
    return [Deviation(value, publisher) for value in values]


def test_publishers_weigh_alike_however_many_runs_they_have() -> None:
    # 100 runs at 0 weigh as much as one at 1: half of the weight lies at 0
    rows = of("a", [0.0] * 100) + of("b", [1.0])
    assert (find_quantile(rows, 0.5), find_quantile(rows, 0.51)) == (0.0, 1.0)
    # a tenth of the weight is left outside, half of it at either end
    assert find_ends(rows, 0.9) == (0.0, 1.0)


def test_errors_on_one_side_make_ends_of_one_side() -> None:
    rows = of("a", [0.1, 0.2]) + of("b", [0.3, 0.4])
    assert find_ends(rows, 1.0) == (0.1, 0.4)


def test_a_publisher_that_is_left_out_is_judged_by_the_others() -> None:
    rows = of("a", [0.0, 0.1, 0.2]) + of("b", [0.0, 0.2]) + of("c", [0.1, 0.9])
    # without a: ends 0.0 and 0.9; without b: 0.0 and 0.9; without c: 0.0 and 0.2, which hold one of two
    assert leave_publishers_out(rows, 1.0) == {"a": 1.0, "b": 1.0, "c": 0.5}
    with pytest.raises(ValueError, match="needs two, met a"):
        leave_publishers_out(of("a", [0.1]), 0.9)


@given(DEVIATIONS, st.sampled_from(LEVELS))
def test_a_higher_level_covers_no_less(rows: list[Deviation], level: float) -> None:
    low, high = find_ends(rows, level)
    lower, higher = find_ends(rows, max(LEVELS))
    assert lower <= low <= high <= higher
    assert LEVELS[0] <= choose_level(rows) <= LEVELS[-1]


def test_a_publisher_of_few_runs_has_no_voice_beside_large_ones() -> None:
    large, small = of("a", [0.0] * 10), of("b", [9.0])
    assert drop_small(large + small) == large
    assert drop_small(small) == small
