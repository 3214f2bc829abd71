"""Variants of passes by hand: what makes the last gradients, what follows at once, and what begins them."""

from itertools import pairwise

import pytest

from meshwise.strategies.lowering.tasks.variants import (
    BACKWARD_PASS,
    FIRST_OFFSET,
    FORWARD_PASS,
    INPUTS,
    JOINED_OFFSET,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    find_first_gradients,
    find_joined,
    find_stage_ends,
    is_joined,
    kind_of,
    list_variants,
    variant_of,
)
from meshwise.strategies.schedules.orders import list_actions
from meshwise.strategies.schedules.schedule import SCHEDULES, ActionKind, build_schedule

F, B = FORWARD_PASS, BACKWARD_PASS


def test_on_the_last_rank_of_1f1b_every_backward_follows_its_forward() -> None:
    rows = list_actions("1f1b", 2, 3)
    # rank 0: F0 F1 B0 F2 B1 B2, where F1 B0 and F2 B1 follow; rank 1: F0 B0 F1 B1 F2 B2
    assert find_joined(rows).tolist() == [False, True, True, True, True, False] + [True] * 6
    assert list_variants(rows, find_joined(rows)).tolist() == [
        F, F + JOINED_OFFSET, B + JOINED_OFFSET, F + JOINED_OFFSET, B + JOINED_OFFSET, LAST_BACKWARD,
        F + JOINED_OFFSET, B + JOINED_OFFSET, F + JOINED_OFFSET, B + JOINED_OFFSET, F + JOINED_OFFSET,
        LAST_BACKWARD + JOINED_OFFSET,
    ]  # fmt: skip
    assert (
        find_first_gradients(rows).tolist() == [False, False, True, False, False, False] + [False, True] + [False] * 4
    )


def test_of_a_backward_in_two_the_weights_come_last() -> None:
    rows = list_actions("zb1p", 1, 2)  # F0 I0 W0 F1 I1 W1
    assert [each % JOINED_OFFSET for each in list_variants(rows, find_joined(rows)).tolist()] == [
        F,
        INPUTS,
        WEIGHTS,
        F,
        INPUTS,
        LAST_WEIGHTS,
    ]
    assert find_stage_ends(rows).tolist() == [True, False, False, False, False, True]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_has_one_last_variant_and_begins_once(name: str) -> None:
    chunks = 1 if SCHEDULES[name].chunks[1] == 1 else 2
    order = build_schedule(name, 2, 4, chunks)
    rows = list_actions(name, 2, 4, chunks)
    found = list_variants(rows, find_joined(rows)) % JOINED_OFFSET
    stages = len(set(rows.stage.tolist()))
    assert (
        sum(each in (LAST_BACKWARD, LAST_WEIGHTS) for each in found.tolist())
        == stages
        == find_first_gradients(rows).sum()
    )
    kinds = [action.kind for rank in order.orders for action in rank]
    assert [kind_of(each) for each in found.tolist()] == kinds
    every = [action for rank in order.orders for action in rank]
    last = [each in (LAST_BACKWARD, LAST_WEIGHTS) for each in found.tolist()]
    assert [variant_of(action, final) for action, final in zip(every, last, strict=True)] == found.tolist()


def test_what_is_added_to_a_variant_does_not_change_what_it_does() -> None:
    for variant in range(JOINED_OFFSET):
        assert not is_joined(variant) and is_joined(variant + JOINED_OFFSET) and not is_joined(variant + FIRST_OFFSET)
        assert kind_of(variant) == kind_of(variant + JOINED_OFFSET) == kind_of(variant + FIRST_OFFSET + JOINED_OFFSET)
    assert kind_of(WEIGHTS) is ActionKind.WEIGHT


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_follows_at_once_is_of_the_same_stage_and_no_pair_that_runs_as_one(name: str) -> None:
    chunks = 1 if SCHEDULES[name].chunks[1] == 1 else 2
    rows = list_actions(name, 2, 6, chunks)
    every = [action for rank in build_schedule(name, 2, 6, chunks).orders for action in rank]
    expected = [False] * len(every)
    for place, (one, other) in enumerate(pairwise(every)):
        goes_back = other.kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        if one.kind is ActionKind.FORWARD and goes_back and one.stage == other.stage and not rows.pairs_next[place]:
            expected[place] = expected[place + 1] = True
    assert find_joined(rows).tolist() == expected
