"""Schedules as CSV read back, and are what torch's own runtime reads."""

import csv
import io

import pytest

from meshwise.strategies.schedules.schedule import SCHEDULES, OrderError, Schedule, from_csv, schedule, to_csv

EVERY = [
    schedule(name, 4, 12, 2 if name in ("interleaved", "looped_bfs", "zbv", "dualpipev") else 1)
    for name in SCHEDULES
    if not name.startswith("pipedream") and "interleaved_" not in name
]


@pytest.mark.parametrize("order", EVERY, ids=lambda order: order.name)
def test_every_schedule_reads_back(order: Schedule) -> None:
    found = from_csv(to_csv(order))
    assert (found.orders, found.stage_ranks, found.overlapped) == (order.orders, order.stage_ranks, order.overlapped)


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
