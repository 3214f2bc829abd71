"""Bubbles and activations of zero-bubble schedules are what their papers say, counted action by action."""

from collections.abc import Callable

import pytest

from meshwise.strategies.schedules.schedule import build_schedule

from .closed_forms import (
    PassSeconds,
    interleaved_zb_bubble,
    interleaved_zb_in_flight,
    zb1p_bubble,
    zb1p_in_flight,
    zb2p_bubble,
    zb2p_in_flight,
    zbv_bubble,
    zbv_in_flight,
)
from .unit_time import ONE, RANKS, SHORT_WEIGHTS, Form, check_flat, check_looped, counts, held, walk

FLAT: list[tuple[str, Form, Form, tuple[PassSeconds, ...], Callable[[int], int]]] = [
    ("zb1p", zb1p_bubble, zb1p_in_flight, SHORT_WEIGHTS, lambda p: p),
    ("zb2p", zb2p_bubble, zb2p_in_flight, SHORT_WEIGHTS, lambda p: 2 * p - 1),
]
"""Schedules with one stage a rank: closed forms, times and fewest microbatches for which they hold."""

LOOPED: list[tuple[str, Form, Form, tuple[PassSeconds, ...], Callable[[int], int]]] = [
    ("interleaved_zero_bubble", interleaved_zb_bubble, interleaved_zb_in_flight, (ONE,), lambda p: p),
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "bubble", "in_flight", "times", "fewest"), FLAT, ids=[row[0] for row in FLAT])
def test_one_stage_a_rank(
    name: str,
    bubble: Form,
    in_flight: Form,
    times: tuple[PassSeconds, ...],
    fewest: Callable[[int], int],
    ranks: int,
) -> None:
    check_flat(name, bubble, in_flight, times, fewest, ranks)


@pytest.mark.parametrize(("ranks", "chunks"), [(p, v) for p in RANKS for v in (1, 2, 3) if p * v <= 16])
@pytest.mark.parametrize(("name", "bubble", "in_flight", "times", "fewest"), LOOPED, ids=[row[0] for row in LOOPED])
def test_several_stages_a_rank(
    name: str,
    bubble: Form,
    in_flight: Form,
    times: tuple[PassSeconds, ...],
    fewest: Callable[[int], int],
    ranks: int,
    chunks: int,
) -> None:
    check_looped(name, bubble, in_flight, times, fewest, ranks, chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv_has_no_bubble_and_holds_what_1f1b_does(ranks: int) -> None:
    for microbatches in counts("zbv", ranks, 2, 2 * ranks - 1):
        value = build_schedule("zbv", ranks, microbatches, 2)
        assert walk(value, ONE).bubble == zbv_bubble(ranks, microbatches)
        assert held(value) == [zbv_in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        assert max(held(value)) == 2 * max(
            held(build_schedule("1f1b", ranks, microbatches))
        )  # halves of a rank's layers


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_schedules_keep_their_memory(ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 64):
        most = max(held(build_schedule("1f1b", ranks, microbatches)))
        assert max(held(build_schedule("zb1p", ranks, microbatches))) <= most
        assert max(held(build_schedule("zb2p", ranks, microbatches))) <= 2 * most


def test_four_microbatches_of_zb1p_on_two_ranks_by_hand() -> None:
    # rank 0 warms up with 2 forwards and delays nothing; rank 1 with 1, and delays weights by 1 microbatch
    assert str(build_schedule("zb1p", 2, 4)) == (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    )
    # rank 0: F0 F1 end at 2; I0 waits for 1I0, which ends at 3: idle 1 = (2 - 1) (1 + 1 - 1); 12 actions: 13
    assert walk(build_schedule("zb1p", 2, 4), ONE).ends == [13, 13]
