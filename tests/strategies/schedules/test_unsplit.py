"""Bubbles and activations of schedules with a flush are what their papers say, counted action by action."""

from collections.abc import Callable

import pytest

from .closed_forms import (
    PassSeconds,
    flushed_bubble,
    gpipe_in_flight,
    interleaved_in_flight,
    looped_bfs_in_flight,
    looped_bubble,
    naive_bubble,
    naive_in_flight,
    one_f_one_b_in_flight,
)
from .unit_time import RANKS, UNEVEN, Form, check_flat, check_looped

FLAT: list[tuple[str, Form, Form, tuple[PassSeconds, ...], Callable[[int], int]]] = [
    ("naive", naive_bubble, naive_in_flight, UNEVEN, lambda p: 1),
    ("gpipe", flushed_bubble, gpipe_in_flight, UNEVEN, lambda p: 1),
    ("1f1b", flushed_bubble, one_f_one_b_in_flight, UNEVEN, lambda p: 1),
]
"""Schedules with one stage a rank: closed forms, times and fewest microbatches for which they hold."""

LOOPED: list[tuple[str, Form, Form, tuple[PassSeconds, ...], Callable[[int], int]]] = [
    ("interleaved", looped_bubble, interleaved_in_flight, UNEVEN, lambda p: p),
    ("looped_bfs", looped_bubble, looped_bfs_in_flight, UNEVEN, lambda p: p),
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
