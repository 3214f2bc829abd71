"""The network on a clock: ends of transfers against hand, exact fluid, and SimGrid; and its laws."""

import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import network
from meshwise.simulator.engine.flows import Bundle
from meshwise.simulator.engine.network import Network

from .fluid import (
    LINKS,
    TICKS,
    HeapClock,
    Transfer,
    build_bundle,
    capacities,
    ends_of,
    equal_split,
    exact,
    fluid_ends,
    max_min,
    max_min_rates,
    network_ends,
    transfers,
    usages,
)

SIMGRID = json.loads(Path(__file__).with_name("fixtures").joinpath("max_min_leaf_spine.json").read_text("utf-8"))
few = pytest.mark.parametrize("few", [0, 32], ids=["look for what a change reaches", "solve whole components"])


def seconds(ends: Sequence[int]) -> list[float]:
    return [end / TICKS for end in ends]


def test_a_late_flow_slows_the_first_down() -> None:
    # 10 byte/s: at 5 s the first has 50 of 100 left; at 5 byte/s each it ends at 15 s, where
    # the second has 50 left, which alone take 5 s
    moved = [Transfer(0, ((0, 100.0),)), Transfer(5000, ((0, 100.0),))]
    assert network_ends([10.0], moved, 1000) == [15000, 20000]


def test_a_flow_held_up_elsewhere_leaves_its_share() -> None:
    # link 1 lets the first run at 2 of 10 byte/s, the second gets 8: 40 bytes in 5 s
    moved = [Transfer(0, ((0, 20.0), (1, 20.0))), Transfer(0, ((0, 40.0),))]
    assert network_ends([10.0, 2.0], moved, 1000) == [10000, 5000]


def test_a_flow_as_fast_as_its_own_limit_gives_way_again() -> None:
    # to 3 s all four run at 2, three on link 1 of 6 byte/s and two on link 0 of 4: the last two end. Then the
    # first two run at 3, which link 1 and, of the first, link 2 allow; from 4 s on three share link 1 at 2 each
    moved = [Transfer(0, ((0, 15.0), (1, 15.0), (2, 15.0))), Transfer(0, ((1, 15.0),))]
    moved += [Transfer(0, ((0, 6.0),)), Transfer(0, ((1, 6.0),)), Transfer(4000, ((1, 6.0),))]
    assert network_ends([4.0, 6.0, 3.0], moved, 1000) == [7000, 7000, 3000, 3000, 7000]


def test_equal_machines_side_by_side_take_the_times_of_one() -> None:
    # link 0 of 1 byte/s, link 1 of 2: to 2 s the first two run at 1/2 and the third at 1; the second ends. To 3 s
    # two run at 1; to 6 s three at 2/3; the fourth ends. Then at 1 each, and the third alone at 2, with 9 left at 12 s
    one = [Transfer(0, ((0, 10.0), (1, 10.0))), Transfer(0, ((0, 1.0), (1, 1.0))), Transfer(0, ((1, 20.0),))]
    one.append(Transfer(3000, ((1, 2.0),)))
    other = [Transfer(start, tuple((link + 2, size) for link, size in usage)) for start, usage in one]
    assert network_ends([1.0, 2.0], one, 1000) == [12000, 2000, 16500, 6000]
    assert network_ends([1.0, 2.0] * 2, one + other, 1000) == [12000, 2000, 16500, 6000] * 2


def test_the_payload_comes_back_and_may_start_the_next() -> None:
    clock, log = HeapClock(), list[tuple[int, int]]()
    links = Network([10.0], clock)
    shape = build_bundle([(0, 100.0)], [10.0], 1000)

    def done(payload: int) -> None:
        log.append((payload, clock.now))
        if payload:
            links.start_flow(shape, done, payload - 1)

    links.start_flow(shape, done, 2)
    clock.run()
    assert log == [(2, 10000), (1, 20000), (0, 30000)]


def test_starts_and_ends_of_one_instant_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # at 0 s two start, at 20 s two end and two start, at 40 s two end
    solved, solve = list[int](), Network._solve
    monkeypatch.setattr(Network, "_solve", lambda links, now: [solved.append(now), solve(links, now)])
    moved = [Transfer(start, ((0, 100.0),)) for start in (0, 0, 20000, 20000)]
    assert network_ends([10.0], moved, 1000) == [20000, 20000, 40000, 40000]
    assert solved == [0, 20000, 40000]


def test_widening_a_link_can_make_the_last_flow_later() -> None:
    # 1 byte over links 0 and 2, 3 bytes over links 0 and 1. With 2 byte/s on link 2 they run at
    # 2 and 6: both end at 0.5 s. With 4 on link 2 they run at 4 and 4 to 0.25 s; then 2 bytes at 6.
    moved = [Transfer(0, ((0, 1.0), (2, 1.0))), Transfer(0, ((0, 3.0), (1, 3.0)))]
    assert max(network_ends([8.0, 6.0, 2.0], moved, 12000)) == 6000
    assert max(network_ends([8.0, 6.0, 4.0], moved, 12000)) == 7000


@settings(max_examples=1000, deadline=None)
@given(st.floats(1e-3, 1e12), st.floats(1.0, 1e12), st.permutations([0, 1, 2]))
def test_flows_one_after_the_other_take_their_solo_ticks(size: float, rate: float, turns: list[int]) -> None:
    # whether one starts before or after the last has gone, within one instant
    shape = build_bundle([(0, size)], [rate], 1000)
    ticks = shape.solo_ticks
    assert ends_of([rate], [(turn * ticks, shape) for turn in turns]) == [(turn + 1) * ticks for turn in turns]


@given(st.integers(1, 500), st.integers(1, 1000), st.integers(2, 10**10), st.integers(0, 40))
def test_rate_changes_do_not_add_up_to_a_tick(changes: int, gap: int, ticks: int, log_rate: int) -> None:
    # each short flow takes half the link for 2 * ticks, in which the long one moves ticks of its own
    period, rate = 2 * ticks + gap, 2.0**log_rate
    short, long = (Bundle(((0, 1.0),), rate, rate * own, own) for own in (ticks, changes * (ticks + gap)))
    *ends, last = ends_of([rate], [*((index * period, short) for index in range(changes)), (0, long)])
    assert last == changes * period
    assert ends == [index * period + 2 * ticks for index in range(changes)]


@few
def test_ends_are_those_of_exact_fluid(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FEW", few)

    @settings(max_examples=1000, deadline=None)
    @given(transfers, capacities)
    def check(moved: list[Transfer], capacity: list[int]) -> None:
        ideal = [float(end) for end in fluid_ends(exact(capacity), moved, max_min)]
        assert seconds(network_ends(capacity, moved)) == pytest.approx(ideal, rel=1e-9)

    check()


@few
@pytest.mark.parametrize("case", SIMGRID["scenarios"])
def test_ends_are_those_of_simgrid(case: dict[str, Any], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FEW", few)
    assert seconds(network_ends(case["capacity"], simgrid_transfers(case))) == pytest.approx(case["ends"], rel=1e-9)


@pytest.mark.parametrize("case", SIMGRID["scenarios"][:3])
def test_simgrid_tells_fair_rates_from_an_equal_split(case: dict[str, Any]) -> None:
    capacity, moved = [float(rate) for rate in case["capacity"]], simgrid_transfers(case)
    assert fluid_ends(capacity, moved, max_min) == pytest.approx(case["ends"], rel=1e-9)
    split = fluid_ends(capacity, moved, equal_split)
    assert max(abs(met - end) / end for met, end in zip(split, case["ends"], strict=True)) > 0.1


def simgrid_transfers(case: dict[str, Any]) -> list[Transfer]:
    latency = round(case["latency"] * TICKS)
    return [
        Transfer(start * TICKS // 1000 + latency, tuple((link, float(size)) for link in route))
        for start, size, route in case["flows"]
    ]


@settings(max_examples=1000, deadline=None)
@given(transfers, capacities)
def test_bytes_are_conserved_on_every_link(moved: list[Transfer], capacity: list[int]) -> None:
    ends = network_ends(capacity, moved)
    shapes = [build_bundle(transfer.usage, capacity, TICKS) for transfer in moved]
    carried = [0.0] * LINKS
    for begin, end in pairwise(sorted({transfer.start for transfer in moved} | set(ends))):
        active = [i for i, transfer in enumerate(moved) if transfer.start <= begin and end <= ends[i]]
        rates = max_min_rates([shapes[i] for i in active], capacity)
        for i, rate in zip(active, rates, strict=True):
            for link, share in shapes[i].shares:
                carried[link] += share * rate * (end - begin) / TICKS
    sizes = [sum(dict(transfer.usage).get(link, 0) for transfer in moved) for link in range(LINKS)]
    assert carried == pytest.approx(sizes, rel=1e-9, abs=1e-9)


@settings(max_examples=1000, deadline=None)
@given(transfers, transfers, capacities)
def test_flows_that_share_no_link_do_not_touch_each_other(
    moved: list[Transfer], others: list[Transfer], capacity: list[int]
) -> None:
    apart = [Transfer(start, tuple((link + LINKS, size) for link, size in usage)) for start, usage in others]
    assert network_ends(capacity * 2, apart + moved)[len(apart) :] == network_ends(capacity, moved)


@settings(max_examples=1000, deadline=None)
@given(transfers, capacities, st.permutations(range(LINKS)), st.randoms(use_true_random=False))
def test_order_of_starts_and_names_of_links_change_nothing(
    moved: list[Transfer], capacity: list[int], links: list[int], random: Any
) -> None:
    order = list(range(len(moved)))
    random.shuffle(order)
    renamed = [Transfer(moved[i].start, tuple((links[link], size) for link, size in moved[i].usage)) for i in order]
    rates = [capacity[links.index(link)] for link in range(LINKS)]
    ends = network_ends(capacity, moved)
    assert seconds(network_ends(rates, renamed)) == pytest.approx(seconds([ends[i] for i in order]), rel=1e-9)


@settings(max_examples=1000, deadline=None)
@given(transfers, capacities)
def test_no_link_moves_its_bytes_faster_than_its_capacity(moved: list[Transfer], capacity: list[int]) -> None:
    last = max(network_ends(capacity, moved))
    first = min(transfer.start for transfer in moved)
    for link, rate in enumerate(capacity):
        assert last - first >= Fraction(sum(dict(t.usage).get(link, 0) for t in moved), rate) * TICKS * (1 - 1e-9)


@settings(max_examples=1000, deadline=None)
@given(st.lists(usages, min_size=1, max_size=8), capacities)
def test_twice_all_bandwidths_takes_half_the_time(
    uses: list[tuple[tuple[int, float], ...]], capacity: list[int]
) -> None:
    moved = [Transfer(0, usage) for usage in uses]
    fast = network_ends([2 * rate for rate in capacity], moved)
    assert seconds(network_ends(capacity, moved)) == pytest.approx([2 * end / TICKS for end in fast], rel=1e-9)


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 5), st.floats(1.0, 1e6)), min_size=1, max_size=6),
    st.floats(1e2, 1e9),
)
def test_a_bundle_of_equal_flows_ends_when_each_of_them_would(
    bundles: list[tuple[int, int, float]], rate: float
) -> None:
    apart = [(start, build_bundle([(0, size)], [rate], 1000)) for start, count, size in bundles for _ in range(count)]
    joined = [(start, build_bundle([(0, count * size)], [rate], 1000, size)) for start, count, size in bundles]
    one_by_one, places = ends_of([rate], apart), [count for _, count, _ in bundles]
    assert ends_of([rate], joined) == [one_by_one[sum(places[:index])] for index in range(len(places))]
