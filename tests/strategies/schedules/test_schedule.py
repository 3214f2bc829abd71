"""Schedules as data: text and CSV round trips, what they must keep, and what a rank holds."""

import csv
import io
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.schedules.orders import order_actions
from meshwise.strategies.schedules.schedule import (
    KINDS,
    SCHEDULES,
    Action,
    ActionKind,
    OrderError,
    Schedule,
    build_rank_order,
    build_schedule,
    from_csv,
    to_csv,
)

from .unit_time import held

RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)
FORWARD, BACKWARD, INPUT, WEIGHT = KINDS


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule of unsplit backwards and looped stages."""
    ranks, microbatches = draw(RANKS), draw(MICROBATCHES)
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    if name == "interleaved":
        return build_schedule(name, ranks, microbatches * ranks, draw(st.integers(1, 3)))
    return build_schedule(name, ranks, microbatches)


@st.composite
def custom_schedules(draw: st.DrawFn) -> Schedule:
    """Draw orders of no published schedule: any placement, any order that the rules of a rank allow."""
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    holders = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))]))
    orders = []
    for rank in range(ranks):
        actions: list[Action] = []
        for stage in (stage for stage, holder in enumerate(holders) if holder == rank):
            for microbatch in range(microbatches):
                kinds = draw(st.sampled_from([(FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHT)]))
                actions += [Action(stage, kind, microbatch) for kind in kinds]
        shuffled = draw(st.permutations(actions))
        kept = {
            (a.stage, a.microbatch): iter([b for b in actions if (b.stage, b.microbatch) == (a.stage, a.microbatch)])
            for a in actions
        }
        orders.append(tuple(next(kept[a.stage, a.microbatch]) for a in shuffled))
    neighbours = [pair for order in orders for pair in pairwise(order)]
    pairs = [
        (a, b)
        for a, b in neighbours
        if a.kind is FORWARD and b.kind in (BACKWARD, INPUT) and a.microbatch != b.microbatch
    ]
    overlapped = tuple(pair for pair in pairs if draw(st.booleans()))
    return Schedule("custom", tuple(orders), tuple(holders), microbatches, overlapped)


@given(schedules() | custom_schedules())
def test_text_round_trip(value: Schedule) -> None:
    assert Schedule.parse(str(value), value.name) == value


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_published_schedule_is_its_text(name: str) -> None:
    value = build_schedule(name, 3, 6, SCHEDULES[name].chunks[0])
    assert Schedule.parse(str(value), name) == value


def test_the_published_interleaved_order_of_two_ranks() -> None:
    expected = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert str(build_schedule("interleaved", 2, 2, 2)) == expected


def test_a_pair_prints_as_torch_reads_it() -> None:
    value = Schedule.parse("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1I1 0B1 1W1")
    assert value.overlapped_pairs == ((Action(0, FORWARD, 1), Action(1, BACKWARD, 0)),)
    assert value.orders[0][2:4] == value.overlapped_pairs[0]
    assert str(value) == "0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1I1 0B1 1W1"


def test_activations_are_given_back_by_the_backward_or_by_its_last_half() -> None:
    # 0F0 +1, 0F1 +1 = 2, 0I0 0, 0F2 +1 = 3, 0W0 -1 = 2, 0B1 -1 = 1, 0I2 0, 0W2 -1 = 0
    assert held(Schedule.parse("0F0 0F1 0I0 0F2 0W0 0B1 0I2 0W2")) == [3]
    assert held(Schedule.parse("0F0 0F1 0B0 0F2 0B1 0I2 0W2")) == [2]


def test_stages_are_where_their_actions_are() -> None:
    value = Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert value.stage_ranks == (0, 1, 1, 0)
    assert (value.num_stages, value.num_ranks, value.num_microbatches) == (4, 2, 1)
    assert [value.list_stages(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert [value.find_rank(stage) for stage in range(4)] == [0, 1, 1, 0]


def test_rows_are_the_actions() -> None:
    for rank in range(3):
        rows = build_rank_order("zbv", rank, 3, 5, 2).tolist()
        assert build_schedule("zbv", 3, 5, 2).orders[rank] == tuple(Action(s, KINDS[k], m) for s, k, m in rows)


def test_an_order_that_cannot_finish_is_named() -> None:
    crossed = Schedule.parse("0B0 0F0", "crossed")
    with pytest.raises(ValueError, match=r"schedule crossed cannot finish: rank 0 at 0B0 .* waits for 0F0 of its own"):
        list(order_actions(crossed))


def parse(text: str) -> Callable[[], object]:
    return lambda: Schedule.parse(text)


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_schedule("dualpipe", 2, 2), "schedule is one of naive, gpipe, 1f1b, .*, met 'dualpipe'"),
        (
            lambda: build_schedule("interleaved", 4, 9, 2),
            r"microbatches\(9\) % \(9 // pipeline\(4\)\) = 0 does not hold; nearest: 8",
        ),
        (lambda: build_rank_order("gpipe", 0, 2, 2, 2), r"gpipe: chunks\(2\) = 1 does not hold; nearest: 1"),
        (lambda: Action.parse("F0"), "met 'F0'"),
        (lambda: Action.parse("0SEND_F0"), "met '0SEND_F0'"),
        (lambda: Action.parse("0F" + "9" * 5000), "met '0F9999"),
        (parse(""), "at least one action"),
        (parse("0F0 0F0 0B0"), "every action runs once, met 0F0 twice"),
        (parse("0B0"), "0F0 is missing"),
        (parse("0F0 0B0 0F2 0B2"), "0F1 is missing"),
        (parse("0F0 0F999999999 0B0 0B999999999"), "0F1 is missing"),
        (parse("0F0"), "a backward is 0B0, or 0I0 and 0W0; met none of them"),
        (parse("0F0 0I0"), "met 0I0"),
        (parse("0F0 0W0"), "met 0W0"),
        (parse("0F0 0B0 0W0"), "met 0B0 and 0W0"),
        (parse("0F0 0B0 0I0 0W0"), "met 0B0 and 0I0 and 0W0"),
        (parse("0F0 0W0 0I0"), "0W0 comes after 0I0, met it before"),
        (parse("1F0 1B0"), "stages are 0 to 1 without a gap, stage 0 has no action"),
        (parse("0F0\n0B0"), "stage 0 is on rank 0, met 0B0 on rank 1"),
        (parse("0F0 0B0\n\n1F0 1B0"), "every pipeline rank has a stage, rank 1 has none"),
        (parse("0F0 0F1 (0B0;0B1)OVERLAP_F_B"), "a forward and a backward of different microbatches overlap, met 0B0"),
        (parse("(0F0;0B0)OVERLAP_F_B"), "different microbatches"),
        (parse("(0F0;0B0)OVERLAP"), "an action is"),
        (lambda: Schedule("x", (actions("0F0 0B0"),), (0, 0), 1), "1F0 is missing"),
        (lambda: Schedule("x", (actions("1F0 1B0"),), (0,), 1), "stages are 0 to 0, met 1F0"),
        (lambda: Schedule("x", (actions("0F0 0B0 0F1 0B1"),), (0,), 1), "microbatches are 0 to 0, met 0F1"),
        (
            lambda: Schedule(
                "x", (actions("0F0 0F1 0B0 0B1"),), (0,), 2, ((Action(0, FORWARD, 0), Action(0, BACKWARD, 1)),)
            ),
            "a backward that overlaps a forward comes next to it, met 0F0 and 0B1",
        ),
    ],
)
def test_nonsense_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_kinds_are_numbered_as_rows_number_them() -> None:
    assert [ActionKind("F"), ActionKind("B"), ActionKind("I"), ActionKind("W")] == list(KINDS)


EVERY = [
    build_schedule(name, 4, 12, 2 if name in ("interleaved", "looped_bfs", "zbv", "dualpipev") else 1)
    for name in SCHEDULES
    if not name.startswith("pipedream") and "interleaved_" not in name
]


@pytest.mark.parametrize("order", EVERY, ids=lambda order: order.name)
def test_every_schedule_reads_back(order: Schedule) -> None:
    found = from_csv(to_csv(order))
    assert (found.orders, found.stage_ranks, found.overlapped_pairs) == (
        order.orders,
        order.stage_ranks,
        order.overlapped_pairs,
    )


@pytest.mark.parametrize("order", EVERY, ids=lambda order: order.name)
def test_torch_reads_the_same_actions(order: Schedule) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for row, actions in zip(csv.reader(io.StringIO(to_csv(order))), order.orders, strict=True):
        read = [schedules._Action.from_str(cell) for cell in row]
        flat = [action for each in read for action in (each.sub_actions or (each,))]
        assert [str(action) for action in flat] == [str(action) for action in actions]
        assert ",".join(map(str, read)) == ",".join(row)  # as torch writes them


def test_idle_steps_and_ends_of_lines_say_nothing() -> None:
    assert str(from_csv("0F0,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n\r\n")) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("text", "message", "row"),
    [
        ("0F0,0B0\n1F0,1SEND_F0,1B0\n", "an action is", 1),
        ("0F0,0B0\n\n2F0,2B0\n", "stages are 0 to", None),
        ("0F0 0B0\n", "a cell is one action", None),
        ("", "at least one action", None),
        ('"0F0\n', "a backward is", 0),
        ("0F0,0B0,0B0\n", "met 0B0 twice", 0),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str, row: int | None) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_csv(text)
    if row is not None:
        assert isinstance(error.value, OrderError) and error.value.rank == row
