"""Flows: max-min fair rates by hand and by the laws that define them, ticks by exact fractions, bundles that fit."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.flows import (
    MAX_TICKS,
    SELF_LIMIT,
    build_bundle_table,
    fair_groups,
    list_ticks_at,
    ticks_at,
    to_units,
    to_units_per_tick,
)

from .fluid import LINKS, Transfer, build_bundle, capacities, exact, max_min, max_min_rates, usages

Usage = tuple[tuple[int, float], ...]
many_usages = st.lists(usages, min_size=1, max_size=8)


def rates_of(uses: Sequence[Usage], capacity: Sequence[float]) -> list[float]:
    return max_min_rates([build_bundle(usage, capacity, 1) for usage in uses], capacity)


def loads(uses: Sequence[Usage], rates: Sequence[float]) -> list[float]:
    """Return byte/s on every link, where each rate is of the busiest link."""
    load = [0.0] * LINKS
    for usage, rate in zip(uses, rates, strict=True):
        for link, size in usage:
            load[link] += rate * size / max(size for _, size in usage)
    return load


def test_equal_flows_share_equally() -> None:
    assert rates_of([((0, 5.0),)] * 3, [12.0]) == [4.0, 4.0, 4.0]


def test_a_flow_held_up_elsewhere_leaves_its_share() -> None:
    # the second also uses a link of 1 byte/s, so it gets 1 and leaves 9
    assert rates_of([((0, 1.0),), ((0, 1.0), (1, 1.0))], [10.0, 1.0]) == [9.0, 1.0]


def test_weights_are_bytes_on_a_link_for_a_byte_on_the_busiest() -> None:
    # the second puts half its bytes on link 0: x + x / 2 = 12, so x = 8
    assert rates_of([((0, 1.0),), ((0, 1.0), (1, 2.0))], [12.0, 100.0]) == [8.0, 8.0]


def test_solo_ticks_are_set_by_the_slowest_link() -> None:
    # 8 bytes over link 0 at 4 byte/s are 2 s; 2 bytes over link 1 at 0.5 byte/s are 4 s
    shape = build_bundle([(0, 8.0), (1, 2.0)], [4.0, 0.5], 1000)
    assert (shape.solo_ticks, shape.solo_rate) == (4000, 2.0)


def test_usage_of_one_link_adds_up() -> None:
    assert build_bundle([(0, 1.0), (1, 2.0), (0, 3.0)], [1.0, 1.0], 1) == build_bundle(
        [(0, 4.0), (1, 2.0)], [1.0, 1.0], 1
    )


def test_no_bundles_have_no_rates() -> None:
    assert max_min_rates([], [1.0]) == []


def test_a_flow_stops_at_its_own_limit_and_leaves_the_rest() -> None:
    assert fair_groups([0], [{"a": 1.0, "b": 1.0}], [10.0], {"a": 2.0, "b": inf}, {}) == [
        (SELF_LIMIT, 2.0, ("a",)),
        (0, 8.0, ["b"]),
    ]


def test_flows_that_are_kept_leave_what_they_do_not_use() -> None:
    users = [{"a": 1.0, "b": 1.0, "c": 1.0}]
    assert fair_groups([0], users, [10.0], {"a": inf, "b": inf, "c": inf}, {"a": 1.0}) == [(0, 4.5, ["b", "c"])]


@settings(max_examples=1000, deadline=None)
@given(many_usages, capacities)
def test_no_link_carries_more_than_its_capacity(uses: list[Usage], capacity: list[int]) -> None:
    load = loads(uses, rates_of(uses, capacity))
    assert all(met <= most * (1 + 1e-9) for met, most in zip(load, capacity, strict=True))


@settings(max_examples=1000, deadline=None)
@given(many_usages, capacities)
def test_every_flow_has_a_full_link_on_which_none_is_faster(uses: list[Usage], capacity: list[int]) -> None:
    rates = rates_of(uses, capacity)
    load = loads(uses, rates)
    for usage, rate in zip(uses, rates, strict=True):
        full = [link for link, _ in usage if load[link] >= capacity[link] * (1 - 1e-9)]
        fastest = [max(r for other, r in zip(uses, rates, strict=True) if link in dict(other)) for link in full]
        assert fastest and min(fastest) <= rate * (1 + 1e-9)


@settings(max_examples=1000, deadline=None)
@given(many_usages, capacities)
def test_rates_are_those_of_exact_arithmetic(uses: list[Usage], capacity: list[int]) -> None:
    assert rates_of(uses, capacity) == pytest.approx(
        [float(rate) for rate in max_min([Transfer(0, usage) for usage in uses], exact(capacity))], rel=1e-12
    )


@settings(max_examples=1000, deadline=None)
@given(many_usages, capacities, st.permutations(range(LINKS)), st.randoms(use_true_random=False))
def test_names_of_flows_and_links_change_nothing(
    uses: list[Usage], capacity: list[int], links: list[int], random: st.DataObject
) -> None:
    order = list(range(len(uses)))
    random.shuffle(order)  # type: ignore[attr-defined]
    renamed = [tuple((links[link], size) for link, size in uses[index]) for index in order]
    moved = [0] * LINKS
    for link, name in enumerate(links):
        moved[name] = capacity[link]
    rates = rates_of(uses, capacity)
    assert rates_of(renamed, moved) == pytest.approx([rates[index] for index in order], rel=1e-12)


SECOND = 10**12


def test_a_flow_that_takes_longer_than_ticks_can_be_summed_is_refused() -> None:
    # 2**60 ticks of a picosecond are 1,152,921.5 s: 1.1 MB at 1 B/s pass, 1.2 MB do not
    assert build_bundle_table([[(0, 1.1e6)]], [0], [1.0], SECOND).solo_ticks.tolist() == [int(1.1e6) * SECOND]
    with pytest.raises(ValueError, match=rf"a flow takes at most {MAX_TICKS} ticks \(13 days\), met 1.2e\+06 s"):
        build_bundle_table([[(0, 1.2e6)]], [0], [1.0], SECOND)


moves, rates = st.floats(2.0**-10, 2.0**80), st.floats(2.0**-20, 2.0**60)


@settings(max_examples=1000, deadline=None)
@given(moves, rates)
def test_ticks_are_those_of_fractions(moved: float, rate: float) -> None:
    assert ticks_at(moved, rate) == ceil(Fraction(moved) / Fraction(to_units_per_tick(rate), 2**64))


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.tuples(moves, rates), min_size=1, max_size=8))
def test_an_array_has_the_ticks_of_each(pairs: list[tuple[float, float]]) -> None:
    assume(all(moved / rate < 2.0**60 for moved, rate in pairs))
    moved, rate = np.array(pairs).T
    assert list_ticks_at(moved, rate).tolist() == [ticks_at(*pair) for pair in pairs]


@given(rates)
def test_a_rate_is_rounded_to_32_bits(rate: float) -> None:
    assert abs(Fraction(to_units_per_tick(rate), 2**64) / Fraction(rate) - 1) <= Fraction(1, 2**32)


def test_what_moves_nothing_takes_no_time() -> None:
    assert (to_units(0.0), list_ticks_at(np.array([0.0]), np.array([1.0])).tolist()) == (0, [0])
