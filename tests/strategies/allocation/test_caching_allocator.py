"""The allocator's model: hand-counted segments, and laws of any series of allocations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import compiled
from meshwise.strategies.allocation import caching_allocator
from meshwise.strategies.allocation.caching_allocator import MIB, Events, Reservation, replay
from meshwise.strategies.allocation.rank_events import repeat_events

KIB = 1024


def make(*rows: tuple[int, int] | tuple[int, int, int]) -> Events:
    """Return events of rows of a slot, bytes and a stream."""
    return Events(*(np.array(column, np.int64) for column in zip(*((*row, 0)[:3] for row in rows), strict=True)))


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_a_request_gets_the_segment_of_its_size(size: int, segment: int) -> None:
    assert replay(make((0, size))) == Reservation(segment, size, True)


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    # 2 MiB hold four blocks of 512 KiB; the fifth needs another segment
    rows = [(slot, 512 * KIB) for slot in range(5)]
    assert [replay(make(*rows[:count])).reserved // MIB for count in (4, 5)] == [2, 4]


def test_a_large_block_is_split_only_where_more_than_a_mebibyte_is_left() -> None:
    # of 20 MiB, 19 leave 1 MiB, which stays part of the block; 18 leave 2, which the next request gets
    assert replay(make((0, 19 * MIB), (0, 0), (1, 9 * MIB))).reserved // MIB == 20
    whole = make((0, 20 * MIB), (0, 0), (1, 19 * MIB), (2, MIB + 1))
    split = make((0, 20 * MIB), (0, 0), (1, 18 * MIB), (2, MIB + 1))
    assert (replay(whole).reserved // MIB, replay(split).reserved // MIB) == (20 + 20, 20)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    # free are 30 and 12 MiB: 12 goes to the second, so that 30 still fits the first
    rows = [(0, 30 * MIB), (1, 12 * MIB), (0, 0), (1, 0), (2, 12 * MIB), (3, 30 * MIB)]
    assert replay(make(*rows)).reserved // MIB == 42


def test_neighbours_join_when_they_are_released() -> None:
    # 40 MiB are split in 20 + 20; only joined do they serve 40 again
    rows = [(0, 40 * MIB), (0, 0), (1, 20 * MIB), (2, 20 * MIB), (1, 0), (2, 0), (3, 40 * MIB)]
    assert replay(make(*rows)).reserved // MIB == 40


def test_streams_have_pools_of_their_own() -> None:
    rows = [(0, 40 * MIB, 0), (0, 0, 0), (1, 40 * MIB, 1)]
    assert replay(make(*rows)).reserved // MIB == 80


def test_free_segments_are_given_back_before_a_request_fails() -> None:
    # 40 free MiB do not serve 60; of 70 MiB they are given back, of 50 the request fails
    rows = make((0, 40 * MIB), (0, 0), (1, 60 * MIB))
    assert replay(rows) == Reservation(100 * MIB, 60 * MIB, True)
    assert replay(rows, 70 * MIB) == Reservation(60 * MIB, 60 * MIB, True)
    assert not replay(rows, 50 * MIB).fits
    assert replay(rows, releases_first=True).reserved == 60 * MIB


def test_expandable_segments_grow_where_blocks_would_not_serve() -> None:
    # the range has 40 free MiB at its end and grows by 20 to serve 60
    assert replay(make((0, 40 * MIB), (0, 0), (1, 60 * MIB)), is_expandable=True).reserved == 60 * MIB


ROWS = st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB), st.integers(0, 2), st.integers(0, 99)), max_size=60)


def build(rows: list[tuple[bool, int, int, int]]) -> Events:
    """Return events: each allocates, or releases one of the live slots."""
    live: list[int] = []
    events: list[tuple[int, int, int]] = []
    count = 0
    for allocates, size, stream, choice in rows:
        if allocates or not live:
            events.append((count, size, stream))
            live.append(count)
            count += 1
        else:
            events.append((live.pop(choice % len(live)), 0, 0))
    return make(*events) if events else make((0, 1))


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans())
def test_no_less_is_reserved_than_requested(rows: list[tuple[bool, int, int, int]], is_expandable: bool) -> None:
    events = build(rows)
    plain = replay(events, is_expandable=is_expandable)
    live: dict[int, int] = {}
    peak = 0
    for slot, size, _ in zip(*(column.tolist() for column in events), strict=True):
        live[slot] = size
        peak = max(peak, sum(live.values()))
    assert plain.requested == peak <= plain.reserved
    assert replay(events, peak // 2, is_expandable=is_expandable).fits == (peak <= peak // 2)
    tight = replay(events, releases_first=True)
    assert peak <= tight.reserved


@settings(max_examples=20, deadline=None)
@given(ROWS, st.booleans(), st.sampled_from([2**60, 100 * MIB]))
def test_python_and_machine_code_agree(rows: list[tuple[bool, int, int, int]], is_expandable: bool, limit: int) -> None:
    if not compiled.installed():
        pytest.skip("numba is not installed")
    events = build(rows)
    results = []
    for is_compiled in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caching_allocator, "pays", lambda _, is_compiled=is_compiled: is_compiled)
            results.append(replay(events, limit, is_expandable=is_expandable))
    assert results[0] == results[1]


def test_a_repeated_step_reuses_what_the_first_has_left() -> None:
    """A step takes 40 MiB beside 10 that stay; 12 MiB of the optimizer split them, so that the second needs 40 more."""
    step = make((0, 10 * MIB), (1, 40 * MIB), (1, 0))
    assert replay(repeat_events(step, 1, 3, [])).reserved // MIB == 50
    assert replay(repeat_events(step, 1, 3, [12 * MIB])).reserved // MIB == 90
