"""Schedules: published orders, text round trip, in-flight microbatches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.lowering.pipeline import in_order
from strategies.schedule import Action, ActionKind, Schedule, gpipe, interleaved, one_f_one_b, schedule

RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    ranks, microbatches = draw(RANKS), draw(MICROBATCHES)
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    if name == "interleaved":
        return interleaved(ranks, microbatches * ranks, draw(st.integers(1, 3)))
    return schedule(name, ranks, microbatches)


@given(schedules())
def test_text_round_trip(value: Schedule) -> None:
    assert Schedule.parse(str(value), value.name) == value


@given(schedules())
def test_every_schedule_can_finish(value: Schedule) -> None:
    assert len(list(in_order(value))) == sum(map(len, value.orders))


@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 64), st.integers(1, 256), st.integers(2, 3))
@settings(max_examples=100, deadline=None)
def test_no_schedule_is_taken_for_a_deadlock(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    looped = name == "interleaved"
    rounded = -(-microbatches // ranks) * ranks if looped else microbatches
    value = schedule(name, ranks, rounded, chunks if looped else 1)
    assert len(list(in_order(value))) == sum(map(len, value.orders))


@given(RANKS, MICROBATCHES)
def test_in_flight_microbatches(ranks: int, microbatches: int) -> None:
    for rank in range(ranks):
        assert gpipe(ranks, microbatches).in_flight(rank) == microbatches
        assert one_f_one_b(ranks, microbatches).in_flight(rank) == min(ranks - rank, microbatches)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_holds_what_its_paper_says(ranks: int, chunks: int, rounds: int) -> None:
    # Narayanan et al. 2021: (chunks - 1) * ranks + 2 * (ranks - rank - 1) warm-up forwards, and one more
    value = interleaved(ranks, ranks * rounds, chunks)
    for rank in range(ranks):
        warmup = (chunks - 1) * ranks + 2 * (ranks - rank - 1)
        assert value.in_flight(rank) == min(warmup + 1, ranks * rounds * chunks)


def test_the_published_interleaved_order_of_two_ranks() -> None:
    assert str(interleaved(2, 2, 2)) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_an_order_that_cannot_finish_is_named() -> None:
    crossed = Schedule("crossed", ((Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.FORWARD, 0)),), 1, 1)
    with pytest.raises(ValueError, match="rank 0 at 0B0 waits for 0F0"):
        list(in_order(crossed))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("dualpipe", 2, 2), "schedule is one of gpipe, 1f1b, interleaved, met dualpipe"),
        (lambda: interleaved(4, 6, 2), r"multiple of pipeline\(4\), met 6"),
        (lambda: gpipe(2, 2, 2), "chunks is 1, met 2"),
        (lambda: Action.parse("F0"), "met 'F0'"),
        (lambda: Schedule.parse("0F0 0F0"), "every action once"),
        (lambda: Schedule.parse("1F0 1B0\n0F0 0B0"), "not on pipeline rank 0"),
    ],
)
def test_nonsense_is_rejected(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
