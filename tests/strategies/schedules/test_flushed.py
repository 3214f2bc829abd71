"""Bubbles and activations of every schedule are what its paper says, counted action by action."""

from collections.abc import Callable

import pytest

from meshwise.strategies.schedules.dualpipev import dualpipev_bubble, dualpipev_in_flight
from meshwise.strategies.schedules.flushed import (
    gpipe_bubble,
    gpipe_in_flight,
    interleaved_bubble,
    interleaved_in_flight,
    looped_bfs_bubble,
    looped_bfs_in_flight,
    naive_bubble,
    naive_in_flight,
    one_f_one_b_bubble,
    one_f_one_b_in_flight,
)
from meshwise.strategies.schedules.pipedream import pipedream_bubble, pipedream_in_flight, weight_versions
from meshwise.strategies.schedules.rule import PassTimes
from meshwise.strategies.schedules.schedule import SCHEDULES, Schedule, schedule
from meshwise.strategies.schedules.zero_bubble import (
    interleaved_zb_bubble,
    interleaved_zb_in_flight,
    zb1p_bubble,
    zb1p_in_flight,
    zb2p_bubble,
    zb2p_in_flight,
    zbv_bubble,
    zbv_in_flight,
)

from .unit_time import walk

ONE = PassTimes(1, 1, 1)
UNEVEN = (ONE, PassTimes(3, 4, 2), PassTimes(5, 3, 7))
SHORT_WEIGHTS = (ONE, PassTimes(3, 4, 2), PassTimes(5, 3, 3))
RANKS = (2, 3, 4, 5, 8, 16)
Form = Callable[..., float]

FLAT: list[tuple[str, Form, Form, tuple[PassTimes, ...], Callable[[int], int]]] = [
    ("naive", naive_bubble, naive_in_flight, UNEVEN, lambda p: 1),
    ("gpipe", gpipe_bubble, gpipe_in_flight, UNEVEN, lambda p: 1),
    ("1f1b", one_f_one_b_bubble, one_f_one_b_in_flight, UNEVEN, lambda p: 1),
    ("zb1p", zb1p_bubble, zb1p_in_flight, SHORT_WEIGHTS, lambda p: p),
    ("zb2p", zb2p_bubble, zb2p_in_flight, SHORT_WEIGHTS, lambda p: 2 * p - 1),
]
"""Schedules with one stage a rank: closed forms, times and fewest microbatches for which they hold."""

LOOPED: list[tuple[str, Form, Form, tuple[PassTimes, ...], Callable[[int], int]]] = [
    ("interleaved", interleaved_bubble, interleaved_in_flight, UNEVEN, lambda p: p),
    ("looped_bfs", looped_bfs_bubble, looped_bfs_in_flight, UNEVEN, lambda p: p),
    ("interleaved_zero_bubble", interleaved_zb_bubble, interleaved_zb_in_flight, (ONE,), lambda p: p),
]


def counts(name: str, ranks: int, chunks: int, fewest: int) -> list[int]:
    """Microbatches from 2 to 64, at least ``fewest``, for which there is such an order."""
    wanted = {2, 3, 5, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks, 64}
    return sorted(m for m in wanted if fewest <= m <= 64 and SCHEDULES[name].undefined(ranks, m, chunks) is None)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "bubble", "in_flight", "times", "fewest"), FLAT, ids=[row[0] for row in FLAT])
def test_one_stage_a_rank(
    name: str,
    bubble: Form,
    in_flight: Form,
    times: tuple[PassTimes, ...],
    fewest: Callable[[int], int],
    ranks: int,
) -> None:
    for microbatches in counts(name, ranks, 1, fewest(ranks)):
        value = schedule(name, ranks, microbatches)
        assert held(value) == [in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        for each in times:
            assert walk(value, each).bubble == bubble(ranks, microbatches, each)


@pytest.mark.parametrize(("ranks", "chunks"), [(p, v) for p in RANKS for v in (1, 2, 3) if p * v <= 16])
@pytest.mark.parametrize(("name", "bubble", "in_flight", "times", "fewest"), LOOPED, ids=[row[0] for row in LOOPED])
def test_several_stages_a_rank(
    name: str,
    bubble: Form,
    in_flight: Form,
    times: tuple[PassTimes, ...],
    fewest: Callable[[int], int],
    ranks: int,
    chunks: int,
) -> None:
    for microbatches in counts(name, ranks, chunks, fewest(ranks)):
        value = schedule(name, ranks, microbatches, chunks)
        assert held(value) == [in_flight(rank, ranks, microbatches, chunks) for rank in range(ranks)]
        for each in times:
            assert walk(value, each).bubble == bubble(ranks, microbatches, chunks, each)


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv_has_no_bubble_and_holds_what_1f1b_does(ranks: int) -> None:
    for microbatches in counts("zbv", ranks, 2, 2 * ranks - 1):
        value = schedule("zbv", ranks, microbatches, 2)
        assert walk(value, ONE).bubble == zbv_bubble(ranks, microbatches, ONE) == 0
        assert held(value) == [zbv_in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        assert max(held(value)) == 2 * max(held(schedule("1f1b", ranks, microbatches)))  # halves of a rank's layers
    with pytest.raises(ValueError, match="forward = input = weight, met"):
        zbv_bubble(ranks, 64, PassTimes(1, 2, 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipev_is_as_its_source_says(ranks: int) -> None:
    for microbatches in counts("dualpipev", ranks, 2, 2 * ranks):
        value = schedule("dualpipev", ranks, microbatches, 2)
        assert held(value) == [dualpipev_in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        assert walk(value, ONE).bubble == dualpipev_bubble(ranks, microbatches, ONE, together=3)
        for times, together in ((ONE, 2), (PassTimes(3, 4, 2), 9), (PassTimes(3, 4, 2), 7)):
            assert walk(value, times, together).bubble <= dualpipev_bubble(ranks, microbatches, times, together)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_step_without_flush_adds_its_work_alone(name: str, ranks: int) -> None:
    # n steps are one run of n m microbatches; in the steady state one more step takes m (F + B)
    for times in UNEVEN:
        microbatches = 2 * ranks
        two, three = (walk(schedule(name, ranks, steps * microbatches), times).step for steps in (2, 3))
        assert three - two == microbatches * times.total + pipedream_bubble(ranks, microbatches, times)
    value = schedule(name, ranks, 4 * ranks)
    assert held(value) == [pipedream_in_flight(rank, ranks, 4 * ranks) for rank in range(ranks)]


def test_pipedream_keeps_the_weights_of_every_microbatch_in_flight() -> None:
    value = schedule("pipedream", 4, 16)
    assert [weight_versions(rank, 4) for rank in range(4)] == [4, 3, 2, 1] == held(value)
    assert [SCHEDULES["pipedream"].weight_versions(rank, 4) for rank in range(4)] == [4, 3, 2, 1]
    assert [SCHEDULES["pipedream_2bw"].weight_versions(rank, 4) for rank in range(4)] == [2, 2, 2, 2]
    assert [SCHEDULES["1f1b"].weight_versions(rank, 4) for rank in range(4)] == [1, 1, 1, 1]


def test_two_versions_suffice_where_weights_change_once_a_step() -> None:
    # 2BW: with m >= p microbatches a step, those in flight belong to at most two steps
    for ranks in (2, 4, 8):
        for microbatches in (ranks, ranks + 1, 3 * ranks):
            for order in schedule("pipedream_2bw", ranks, 4 * microbatches).orders:
                flying: set[int] = set()
                for action in order:
                    flying = flying | {action.microbatch} if action.kind == "F" else flying - {action.microbatch}
                    assert len({number // microbatches for number in flying}) <= 2


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_schedules_keep_their_memory(ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 64):
        most = max(held(schedule("1f1b", ranks, microbatches)))
        assert max(held(schedule("zb1p", ranks, microbatches))) <= most
        assert max(held(schedule("zb2p", ranks, microbatches))) <= 2 * most


def test_four_microbatches_of_zb1p_on_two_ranks_by_hand() -> None:
    # rank 0 warms up with 2 forwards and delays nothing; rank 1 with 1, and delays weights by 1 microbatch
    assert str(schedule("zb1p", 2, 4)) == (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    )
    # rank 0: F0 F1 end at 2; I0 waits for 1I0, which ends at 3: idle 1 = (2 - 1) (1 + 1 - 1); 12 actions: 13
    assert walk(schedule("zb1p", 2, 4), ONE).ends == [13, 13]


def held(value: Schedule) -> list[int]:
    return [value.in_flight(rank) for rank in range(value.num_ranks)]
