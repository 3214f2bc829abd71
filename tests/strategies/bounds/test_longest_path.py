"""Walks over a schedule, and the ends of steps, compiled or not."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.compiled import installed
from meshwise.strategies.bounds.longest_path import (
    BLOCK,
    ENDING_COLUMNS,
    LANES,
    Endings,
    PassTimes,
    StepRows,
    arrange_schedule,
    finish_steps,
    walk_schedule,
)
from meshwise.strategies.schedules.orders import find_requirement
from meshwise.strategies.schedules.rule import ScheduleRule
from meshwise.strategies.schedules.schedule import SCHEDULES, Action, ActionKind, Schedule, build_schedule

from ..schedules.test_schedule import schedules

WAYS = pytest.mark.parametrize(
    "numba", [False, pytest.param(True, marks=pytest.mark.skipif(not installed(), reason="numba is not installed"))]
)


def by_definition(value: Schedule, ticks: list[int], sends: list[int]) -> tuple[list[int], list[int]]:
    """Return the end of every rank and the start of every stage's last backward, each from what it waits for."""
    before = {b: a for order in value.orders for a, b in pairwise(order)}
    sent: dict[tuple[int, ActionKind], list[Action]] = {}
    for rank, order in enumerate(value.orders):
        for action in order:
            edge = value.num_stages - 1 if action.kind is ActionKind.FORWARD else 0
            if action.stage != edge:
                sent.setdefault((rank, action.kind), []).append(action)

    def column(action: Action) -> int:
        return 2 * action.stage + (action.kind is ActionKind.BACKWARD)

    @cache
    def start(action: Action) -> int:
        needed = find_requirement(value, action)
        own = end(before[action]) if action in before else 0
        if needed is None or value.num_ranks == 1 or value.find_rank(needed.stage) == value.find_rank(action.stage):
            return max(own, end(needed) if needed else 0)
        return max(own, arrival(needed))

    @cache
    def end(action: Action) -> int:
        return start(action) + ticks[column(action)]

    @cache
    def arrival(action: Action) -> int:
        line = sent[value.find_rank(action.stage), action.kind]
        index = line.index(action)
        return max(end(action), arrival(line[index - 1]) if index else 0) + sends[column(action)]

    last = [Action(stage, ActionKind.BACKWARD, value.num_microbatches - 1) for stage in range(value.num_stages)]
    return [end(order[-1]) for order in value.orders], list(map(start, last))


@WAYS
def test_a_walk_is_what_the_definition_says(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.strategies.bounds.longest_path.pays", lambda tasks: numba)
    arrange_schedule.cache_clear()

    @settings(max_examples=120, deadline=None)
    @given(schedules(), st.integers(0, 2**32), st.sampled_from([1, 2, BLOCK, BLOCK + 1, LANES + 3]))
    def law(value: Schedule, seed: int, steps: int) -> None:
        chunks = value.num_stages // value.num_ranks
        arranged = arrange_schedule(value.name, value.num_ranks, value.num_microbatches, chunks)
        ticks, sends = np.random.default_rng(seed).integers(0, 9, (2, steps, 2 * value.num_stages))
        walked = walk_schedule(arranged, ticks, sends)
        for step in {0, steps - 1}:
            ends, starts = by_definition(value, ticks[step].tolist(), sends[step].tolist())
            assert (walked.ends[step].tolist(), walked.stage_starts[step].tolist()) == (ends, starts)

    law()
    arrange_schedule.cache_clear()


@given(schedules())
def test_an_arrangement_runs_every_action_once_and_fills_no_box_twice(value: Schedule) -> None:
    chunks = value.num_stages // value.num_ranks
    arranged = arrange_schedule(value.name, value.num_ranks, value.num_microbatches, chunks)
    counts = np.bincount(arranged.code // 2, minlength=2 * value.num_stages)
    assert counts.tolist() == [value.num_microbatches] * 2 * value.num_stages
    full: set[int] = set()
    for arrives, leaves in zip(arranged.receive_boxes.tolist(), arranged.send_boxes.tolist(), strict=True):
        if arrives:
            full.remove(arrives)
        if leaves:
            assert leaves not in full
            full.add(leaves)
    assert not full
    assert arranged.num_boxes == 1 + max(arranged.send_boxes.max(), 0)


@WAYS
def test_orders_that_wait_for_ever_are_named(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(rank: int, ranks: int, microbatches: int, chunks: int) -> np.ndarray:
        return np.array([[rank, 1 - rank, 0], [rank, rank, 0]])  # rank 0 runs its backward first

    monkeypatch.setattr("meshwise.strategies.bounds.longest_path.pays", lambda tasks: numba)
    monkeypatch.setitem(SCHEDULES, "hopeless", ScheduleRule("hopeless", backwards, "none"))
    named = r"schedule hopeless cannot finish: rank 0 at 0B0 .* waits for 1B0 of rank 1; rank 1"
    with pytest.raises(ValueError, match=named):
        arrange_schedule("hopeless", 2, 1)
    build_schedule.cache_clear()


def test_four_microbatches_on_two_ranks_by_hand() -> None:
    # GPipe, forward 3, backward 5, a transfer 1: rank 1 begins at 3 + 1 = 4 and is busy until 4 + 4 * (3 + 5) = 36,
    # the last backward from 31; its gradient arrives at 37, so that rank 0 ends at 37 + 5 = 42.
    walked = walk_schedule(arrange_schedule("gpipe", 2, 4), np.array([[3, 5, 3, 5]]), np.array([[1, 0, 0, 1]]))
    assert walked.ends.tolist() == [[42, 36]]
    assert walked.stage_starts.tolist() == [[37, 31]]


def rows(*values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def build_endings(**columns: np.ndarray) -> Endings:
    """Return the endings of steps, with the ticks of the end of a step by the name of their column."""
    buckets = columns.pop("first_buckets"), columns.pop("bucket_reductions")
    return Endings(*buckets, tuple(columns[name] for name in ENDING_COLUMNS))


def test_two_positions_by_hand() -> None:
    # Position 0 ends its passes at 50. Its bucket 0 is full at 40 + 3 and reduced in 10: 53; bucket 1 at
    # 40 + 9 = 49, but the first is under way until 53, so until 53 + 20 = 73.
    # Position 1 ends at 45; its bucket is full at 30 + 6 and done at 36 + 4 = 40: it waits for its passes, 45.
    # Tied gradients: both wait for 73 and add 5: 78. Optimizer 2 and gather 7, or 1 and 9: 78 + 10 = 88.
    # Gradients of replicated parameters: 73 + 1, or 45 + 40 = 85, so both wait for 85: 85 + 5 + 10 = 100.
    walked = PassTimes(rows([50, 45]), rows([40, 30]))
    columns = {
        "first_buckets": rows([0, 2, 3]),
        "bucket_reductions": rows([10, 20, 4]),
        "late_reductions": rows([0, 0]),
        "replicated_sums": rows([0, 0]),
        "optimizer": rows([2, 1]),
        "gather": rows([7, 9]),
        "squares": rows([0, 0]),
        "norm": rows([]),
        "tied_sums": rows([5]),
    }
    endings = build_endings(**columns)
    steps = StepRows(np.array([0]), np.array([0]))
    for pair in ([0, 1], [1, 0]):
        assert finish_steps(steps, walked, rows([3, 9, 6]), endings, rows([0], [1]), rows(pair)).tolist() == [88]
        summed = build_endings(**columns | {"replicated_sums": rows([1, 40])})
        assert finish_steps(steps, walked, rows([3, 9, 6]), summed, rows([0], [1]), rows(pair)).tolist() == [100]
    # clipped: position 0 reads until 78 + 3, position 1 until 78 + 6; the norm takes 4 more, until 88; then as before
    clipped = build_endings(**columns | {"squares": rows([3, 6]), "norm": rows([4])})
    assert finish_steps(steps, walked, rows([3, 9, 6]), clipped, rows([0], [1]), rows([0, 1])).tolist() == [98]
    late_columns = {
        "first_buckets": rows([0, 0, 0]),
        "late_reductions": rows([11, 30]),
        "tied_sums": rows([]),
        "gather": rows([0, 0]),
    }
    late = build_endings(**columns | late_columns)
    # after the passes: 50 + 11 + 2 = 63, and 45 + 30 + 1 = 76
    assert finish_steps(steps, walked, rows([]), late, rows([0], [1]), rows().reshape(0, 2)).tolist() == [76]


@pytest.mark.skipif(not installed(), reason="numba is not installed")
def test_compiled_or_not_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32))
    def law(ranks: int, chunks: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        stages, ways, steps = ranks * chunks, 3, 7
        first = np.concatenate([np.zeros((ways, 1), np.int64), draw.integers(0, 3, (ways, stages)).cumsum(1)], axis=1)
        sizes = {"norm": draw.integers(0, 2), "tied_sums": 2}
        columns = tuple(draw.integers(0, 50, (ways, sizes.get(name, ranks))) for name in ENDING_COLUMNS)
        endings = Endings(first, draw.integers(0, 50, (ways, first.max())), columns)
        walked = PassTimes(draw.integers(0, 50, (ways, ranks)), draw.integers(0, 50, (ways, stages)))
        last = np.arange(stages).reshape(chunks, ranks).T[:, ::-1].copy()
        chosen = StepRows(*draw.integers(0, ways, (2, steps)))
        pairs = draw.integers(0, ranks, (2, 2))
        filled = draw.integers(0, 50, (ways, first.max()))
        found = []
        for numba in (False, True):
            monkeypatch.setattr("meshwise.strategies.bounds.longest_path.pays", lambda tasks, numba=numba: numba)
            found.append(finish_steps(chosen, walked, filled, endings, last, pairs).tolist())
        assert found[0] == found[1]

    law()
