"""Sums over a timeline, on one whose numbers a hand can check."""

import pytest

from simulator.program import RankClass, StreamKind, TaskKind
from simulator.timeline import Span, Timeline


def span(rank: int, kind: TaskKind, start: float, end: float, microbatch: int = 0) -> Span:
    stream = StreamKind.DATA if kind.communicates else StreamKind.COMPUTE
    return Span(rank, stream, kind, rank, microbatch, "", start, end)


CLASSES = (RankClass("stage 0", (0,), (0, 1, 2)), RankClass("stage 1", (1,), (3,)))
TIMELINE = Timeline(
    "simulated",
    CLASSES,
    (
        span(0, TaskKind.FORWARD, 0, 4),
        span(0, TaskKind.DATA_COMMUNICATION, 3, 6),
        span(0, TaskKind.BACKWARD, 5, 8),
        span(1, TaskKind.FORWARD, 4, 8),
    ),
    (),
    10.0,
    "discrete_event",
)


def test_busy_counts_overlapping_spans_once() -> None:
    assert TIMELINE.busy(0) == 8.0
    assert TIMELINE.busy(0, [TaskKind.FORWARD]) == 4.0


def test_bubble_is_weighted_by_ranks() -> None:
    # three ranks work 7 of 10 s, one works 4: idle is 1 - (3 * 7 + 4) / 40
    assert TIMELINE.bubble == pytest.approx(1 - 25 / 40)


def test_exposed_communication_is_what_no_compute_covers() -> None:
    # on three of four ranks [4, 5] is uncovered
    assert TIMELINE.exposed_communication()[TaskKind.DATA_COMMUNICATION] == pytest.approx(0.75)


def test_order_and_table() -> None:
    assert TIMELINE.order(0) == ((TaskKind.FORWARD, 0, 0), (TaskKind.BACKWARD, 0, 0))
    assert list(TIMELINE.to_pandas()["end"]) == [4, 6, 8, 8]
