"""Variants of passes by hand: what makes the last gradients, what follows at once, and what begins them."""

from itertools import pairwise

import pytest

from meshwise.strategies.lowering.tasks.variants import (
    BACKWARD_PASS,
    FIRST,
    FORWARD_PASS,
    INPUTS,
    JOINED,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    begin,
    first_and_last,
    joined,
    joins,
    kind_of,
    variant_of,
    variants,
)
from meshwise.strategies.schedules.orders import actions
from meshwise.strategies.schedules.schedule import SCHEDULES, ActionKind, schedule

F, B = FORWARD_PASS, BACKWARD_PASS


def test_on_the_last_rank_of_1f1b_every_backward_follows_its_forward() -> None:
    rows = actions("1f1b", 2, 3)
    # rank 0: F0 F1 B0 F2 B1 B2, where F1 B0 and F2 B1 follow; rank 1: F0 B0 F1 B1 F2 B2
    assert joined(rows).tolist() == [False, True, True, True, True, False] + [True] * 6
    assert variants(rows, joined(rows)).tolist() == [
        F, F + JOINED, B + JOINED, F + JOINED, B + JOINED, LAST_BACKWARD,
        F + JOINED, B + JOINED, F + JOINED, B + JOINED, F + JOINED, LAST_BACKWARD + JOINED,
    ]  # fmt: skip
    assert begin(rows).tolist() == [False, False, True, False, False, False] + [False, True] + [False] * 4


def test_of_a_backward_in_two_the_weights_come_last() -> None:
    rows = actions("zb1p", 1, 2)  # F0 I0 W0 F1 I1 W1
    assert [each % JOINED for each in variants(rows, joined(rows)).tolist()] == [
        F,
        INPUTS,
        WEIGHTS,
        F,
        INPUTS,
        LAST_WEIGHTS,
    ]
    assert first_and_last(rows).tolist() == [True, False, False, False, False, True]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_has_one_last_variant_and_begins_once(name: str) -> None:
    chunks = 1 if SCHEDULES[name].chunks[1] == 1 else 2
    order = schedule(name, 2, 4, chunks)
    rows = actions(name, 2, 4, chunks)
    found = variants(rows, joined(rows)) % JOINED
    stages = len(set(rows.stage.tolist()))
    assert sum(each in (LAST_BACKWARD, LAST_WEIGHTS) for each in found.tolist()) == stages == begin(rows).sum()
    kinds = [action.kind for rank in order.orders for action in rank]
    assert [kind_of(each) for each in found.tolist()] == kinds
    every = [action for rank in order.orders for action in rank]
    last = [each in (LAST_BACKWARD, LAST_WEIGHTS) for each in found.tolist()]
    assert [variant_of(action, final) for action, final in zip(every, last, strict=True)] == found.tolist()


def test_what_is_added_to_a_variant_does_not_change_what_it_does() -> None:
    for variant in range(JOINED):
        assert not joins(variant) and joins(variant + JOINED) and not joins(variant + FIRST)
        assert kind_of(variant) == kind_of(variant + JOINED) == kind_of(variant + FIRST + JOINED)
    assert kind_of(WEIGHTS) is ActionKind.WEIGHT


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_follows_at_once_is_of_the_same_stage_and_no_pair_that_runs_as_one(name: str) -> None:
    chunks = 1 if SCHEDULES[name].chunks[1] == 1 else 2
    rows = actions(name, 2, 6, chunks)
    every = [action for rank in schedule(name, 2, 6, chunks).orders for action in rank]
    expected = [False] * len(every)
    for place, (one, other) in enumerate(pairwise(every)):
        goes_back = other.kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        if one.kind is ActionKind.FORWARD and goes_back and one.stage == other.stage and not rows.together[place]:
            expected[place] = expected[place + 1] = True
    assert joined(rows).tolist() == expected
