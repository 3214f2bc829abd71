"""No built-in schedule waits for ever: pipelines of up to 64 ranks, and up to 256 microbatches.

Orders are walked action by action, by a loop that these tests have of their own.
"""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given

from meshwise.simulator.engine.compiled import compile_loop, installed
from meshwise.strategies.schedules.orders import order_actions
from meshwise.strategies.schedules.rule import BACKWARD, FORWARD, WEIGHT, Order, Placement, ScheduleRule
from meshwise.strategies.schedules.schedule import KINDS, SCHEDULES, Schedule, build_rank_order

from ...examples import LONG, examples
from .test_schedule import custom_schedules

MOST_RANKS, MOST_MICROBATCHES = 64, 256
RANKS = [ranks for ranks in range(1, MOST_RANKS + 1) if LONG or ranks <= 16 or ranks % 8 in (0, 5)]
"""Where the run is not the long one, of larger numbers of ranks every eighth, and odd ones between them."""
FEW = {Placement.LOOP: 8, Placement.V: 4}
"""Ranks up to which every number of microbatches is walked: fewer where orders take longer to make."""
DRAWN = 2
"""Numbers of microbatches that are drawn for every number of ranks, besides those where orders change their form."""


def count_finished(rows: Order, paired: Order, start: Order, done: Order) -> int:
    """Return how many actions run until all ranks wait, or one comes for the second time.

    ``rows`` are (stage, kind, microbatch), rank after rank, each from ``start``; ``paired`` is 1 where an action runs
    as one with the next. ``done[stage, what, microbatch]`` becomes 1 for the forward, the gradients of inputs and those
    of weights.
    """
    at, last, found, before = start[:-1].copy(), len(done) - 1, 0, -1
    while found > before:
        before = found
        for rank in range(len(at)):
            while at[rank] < start[rank + 1]:
                first = at[rank]
                end, ready = first + 1 + paired[first], True
                for index in range(first, end):
                    stage, kind, number = rows[index]
                    if kind == FORWARD:
                        ready = ready and (stage == 0 or done[stage - 1, 0, number] == 1)
                    elif kind == WEIGHT:
                        ready = ready and done[stage, 1, number] == 1
                    else:
                        ready = ready and done[stage, 0, number] == 1
                        ready = ready and (stage == last or done[stage + 1, 1, number] == 1)
                if not ready:
                    break
                for index in range(first, end):
                    stage, kind, number = rows[index]
                    what = 0 if kind == FORWARD else 2 if kind == WEIGHT else 1
                    if done[stage, what, number]:
                        return found
                    done[stage, what, number] = 1
                    if kind == BACKWARD:
                        done[stage, 2, number] = 1
                at[rank] = end
                found += end - first
    return found


def finishes(orders: list[Order], pairs: list[tuple[int, ...]], stages: int, microbatches: int) -> bool:
    """Return whether every microbatch runs once through every stage and back."""
    start = np.cumsum([0, *map(len, orders)])
    paired = np.zeros(start[-1], np.int64)
    for begin, rows in zip(start, pairs, strict=False):
        paired[begin + np.array(rows, np.int64)] = 1
    done = np.zeros((stages, 3, microbatches), np.int64)
    loop = compile_loop(count_finished) if installed() else count_finished
    return loop(np.concatenate(orders), paired, start, done) == start[-1] and bool(done.all())


def sizes(rule: ScheduleRule) -> Iterator[tuple[int, int, int]]:
    """Yield (ranks, microbatches, chunks) for numbers of ranks; where there is no order, the nearest size."""
    random, few, (fewest, most) = Random(rule.name), FEW[rule.placement], rule.chunks
    for ranks in RANKS:
        edges = [turn + more for turn in (ranks, 2 * ranks) for more in (-1, 0, 1)]
        drawn = [random.randint(1, MOST_MICROBATCHES) for _ in range(DRAWN)]
        counts = range(1, MOST_MICROBATCHES + 1) if ranks <= few else [1, 2, *edges, 255, 256, *drawn]
        for chunks in range(fewest, (most or 2) + 1):
            near = (
                m if rule.explain_undefined(ranks, m, chunks) is None else rule.condition.find_nearest(ranks, m)
                for m in counts
            )
            yield from ((ranks, m, chunks) for m in sorted(set(near)) if m <= MOST_MICROBATCHES)


@pytest.mark.parametrize("rule", SCHEDULES.values(), ids=SCHEDULES)
def test_no_schedule_waits_for_ever(rule: ScheduleRule) -> None:
    found = list(sizes(rule))
    assert {ranks for ranks, _, _ in found} == set(RANKS)
    for ranks, microbatches, chunks in found:
        each = (ranks, microbatches, chunks)
        orders = [build_rank_order(rule.name, rank, *each) for rank in range(ranks)]
        pairs = [rule.pairs(rank, *each) for rank in range(ranks)]
        assert finishes(orders, pairs, ranks * chunks, microbatches), each


@given(custom_schedules())
@examples(1000)
def test_the_alarm_is_raised_where_orders_wait_for_ever_and_nowhere_else(value: Schedule) -> None:
    orders = [np.array([(stage, KINDS.index(kind), m) for stage, kind, m in order]) for order in value.orders]
    firsts = {forward for forward, _ in value.overlapped_pairs}
    pairs = [tuple(row for row, action in enumerate(order) if action in firsts) for order in value.orders]
    if finishes(orders, pairs, value.num_stages, value.num_microbatches):
        assert sum(map(len, order_actions(value))) == sum(map(len, orders))
    else:
        with pytest.raises(ValueError, match="cannot finish: rank"):
            list(order_actions(value))
