"""What a rank holds is told apart by where and when it was taken and given back."""

import pytest

pytest.importorskip("torch")

from meshwise.executor.recording.profiled import categorise_allocations, find_turning_points
from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.trace import Allocation, TraceEvent
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category, TaskKind

RECORDS = (
    Record(TaskKind.FORWARD, 0, 0, "", 100, 200),
    Record(TaskKind.BACKWARD, 0, 0, "", 200, 300),
    Record(TaskKind.RECOMPUTE, 0, 0, "", 210, 240),
    Record(TaskKind.OPTIMIZER, -1, -1, "", 300, 400),
)


def category(address: int, *changes: Allocation, gradients: tuple[int, ...] = (), gather: bool = False) -> Category:
    events = [TraceEvent("FSDP::all_gather (layers.0)", 100, 120, 0)] if gather else []
    found = {each for _, each, _ in categorise_allocations(changes, RECORDS, events, gradients)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("taken", "given", "expected"),
    [
        (150, 250, Category.ACTIVATIONS),  # a forward leaves it to the backward
        (150, 180, Category.BUFFERS),  # of one pass
        (220, 280, Category.ACTIVATIONS),  # a recomputation leaves it to the rest of the backward
        (250, 350, Category.BUFFERS),
        (320, None, Category.OPTIMIZER),  # a first step makes states
        (320, 330, Category.BUFFERS),
        (250, None, Category.GRADIENTS),  # lies where a gradient lies at the end
        (110, 250, Category.PARAMETERS),  # gathered
        (110, 115, Category.BUFFERS),
    ],
)
def test_a_category_follows_from_a_life(taken: int, given: int | None, expected: Category) -> None:
    changes = [Allocation(taken, 7, 64)] + ([Allocation(given, 7, -64)] if given is not None else [])
    gradients = (7,) if expected is Category.GRADIENTS else ()
    assert category(7, *changes, gradients=gradients, gather=taken < 120) is expected


def test_an_address_is_used_again() -> None:
    changes = [Allocation(150, 7, 64), Allocation(250, 7, -64), Allocation(260, 7, 32)]
    assert categorise_allocations(changes, RECORDS, (), {7}) == [
        (150, Category.ACTIVATIONS, 64),
        (250, Category.ACTIVATIONS, -64),
        (260, Category.GRADIENTS, 32),
    ]


def test_what_was_taken_before_the_step_is_given_back() -> None:
    assert categorise_allocations([Allocation(150, 3, -8)], RECORDS, (), ()) == [(150, Category.BUFFERS, -8)]


def test_levels_are_kept_where_the_total_turns_and_add_up() -> None:
    sizes = [(10, Category.BUFFERS, 1000), (20, Category.ACTIVATIONS, 5), (30, Category.GRADIENTS, 7)]
    sizes += [(40, Category.ACTIVATIONS, -3), (50, Category.ACTIVATIONS, -2), (60, Category.BUFFERS, 10)]
    found = find_turning_points(sizes, 15)
    assert [(instant, sum(level)) for instant, level in found] == [(15, 0), (30, 12), (50, 7), (60, 17)]
    assert dict(zip(CATEGORIES, found[-1][1], strict=True)) == {
        Category.PARAMETERS: 0,
        Category.GRADIENTS: 7,
        Category.OPTIMIZER: 0,
        Category.ACTIVATIONS: 0,
        Category.BUFFERS: 10,
    }
