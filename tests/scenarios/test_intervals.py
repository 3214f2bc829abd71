import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.intervals import Residual, half_width, half_widths, left_out

SIZES = st.lists(st.floats(0, 10), min_size=1, max_size=30)


def of(group: str, sizes: list[float], category: str = "all") -> list[Residual]:
    return [Residual(size, category, group) for size in sizes]


@given(SIZES, st.floats(0.05, 1.0))
def test_the_half_width_holds_what_it_says_and_no_smaller_one_does(sizes: list[float], coverage: float) -> None:
    width = half_widths(of("a", sizes), coverage)["all"]
    assert width in sizes
    assert fmean(size <= width for size in sizes) >= coverage - 1e-9
    assert fmean(size < width for size in sizes) < coverage


def test_weights_of_two_groups_by_hand() -> None:
    errors = of("few", [0.4]) + of("many", [0.1, 0.2, 0.3, 0.5])
    # by size: 0.1 (1/8), 0.2 (2/8), 0.3 (3/8), 0.4 (3/8 + 1/2 = 7/8), 0.5 (1)
    assert [half_widths(errors, share)["all"] for share in (0.25, 0.375, 0.4, 0.875, 0.9)] == [0.2, 0.3, 0.4, 0.4, 0.5]


@given(SIZES, SIZES, st.integers(2, 5))
def test_a_group_counts_the_same_however_many_runs_it_has(a: list[float], b: list[float], times: int) -> None:
    assert half_widths(of("a", a * times) + of("b", b), 0.9) == half_widths(of("a", a) + of("b", b), 0.9)


def test_categories_are_apart_and_an_unknown_one_is_the_widest() -> None:
    widths = half_widths(of("a", [0.1], "near") + of("a", [0.7], "far"), 0.9)
    assert widths == {"near": 0.1, "far": 0.7}
    assert half_width(widths, "near") == 0.1
    assert half_width(widths, "nowhere") == 0.7


@given(SIZES, SIZES, st.floats(1, 100))
def test_errors_that_are_left_out_do_not_change_their_own_interval(a: list[float], b: list[float], by: float) -> None:
    groups = ["a"] * len(a) + ["b"] * len(b)
    own = dict(left_out(groups, of("a", a) + of("b", b), 0.9))
    worse = dict(left_out(groups, of("a", [by * size for size in a]) + of("b", b), 0.9))
    assert own.keys() == worse.keys() == set(range(len(groups)))
    assert all(own[place] == worse[place] for place in range(len(a)))


def test_groups_of_one_kind_are_held_as_often_as_promised() -> None:
    """Groups differ in scale by up to 3; of 40, at least 0.9 * 39 / 40 = 0.88 of the runs of a left out one is held."""
    source = random.Random(0)
    errors = []
    for group in range(40):
        scale = source.uniform(0.05, 0.15)
        errors += of(str(group), [abs(source.gauss(0, scale)) for _ in range(source.choice((3, 30, 60)))])
    held = [errors[place].size <= width for place, width in left_out([each.group for each in errors], errors, 0.9)]
    assert 0.85 < fmean(held) < 0.95


def test_one_group_alone_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="needs two, met a alone"):
        list(left_out(["a", "a"], of("a", [0.1, 0.2]), 0.9))
