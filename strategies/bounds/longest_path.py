"""When the passes of a schedule start and end, and when steps end, for many steps of one schedule side by side.

A pass starts when the previous one on its pipeline rank has ended and its input has arrived; its output is sent when
the rank's previous transfer in that direction has arrived. Steps end by the phases of
`meshwise.strategies.lowering.tasks.ending`. All times are sums and maxima of ticks, and so exact.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.engine.compiled import Ints, compile_loop, pays
from meshwise.simulator.program import IntArray
from meshwise.strategies.lowering.tasks.ending import ENDING, Scope
from meshwise.strategies.schedules.orders import Orders, list_orders, order_actions
from meshwise.strategies.schedules.schedule import build_schedule

Column = NDArray[np.int32]

BLOCK = 8
"""Steps in one vector of a compiled loop."""
LANES = 5 * BLOCK
"""Most steps that a compiled loop walks side by side: their clocks then stay in a core's first caches."""


class Arrangement(NamedTuple):
    """The actions of a schedule, each after all that it waits for.

    ``code`` is ``4 * stage``, 2 more for a backward and 1 more for that of the last microbatch. ``receive_boxes`` and
    ``send_boxes`` are the box in which an action finds its input, and the box for its output; 0 for none.
    ``last_stages`` are the stages of every rank, in the order in which the last microbatch's backwards run.
    """

    code: Column
    receive_boxes: Column
    send_boxes: Column
    num_boxes: int
    last_stages: IntArray

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.last_stages)


class PassTimes(NamedTuple):
    """For every step, when each rank ends its passes, and when each stage starts the last microbatch's backward."""

    ends: IntArray
    stage_starts: IntArray


@lru_cache(maxsize=512)
def arrange_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Arrangement:
    """Return the arrangement of a schedule by name; the same value for the same arguments.

    >>> arrange_schedule("1f1b", 2, 1).code.tolist()
    [0, 4, 7, 3]

    Raises
    ------
    ValueError
        Where the orders wait for each other for ever; the message names what each rank waits for.
    """
    rows, stages = list_orders(name, ranks, microbatches, chunks), ranks * chunks
    count = len(rows.passes)
    boxes = _Boxes(np.full(count, -1), np.arange(count, 0, -1), rows.start[:-1].copy())
    columns = tuple(np.zeros((3, count), np.int64))  # the first columns of the result, filled action by action
    if pays(count):
        num_boxes = compile_loop(_fill_arrangement)(stages, microbatches, rows, boxes, columns)
    else:
        columns = to_lists(columns)
        num_boxes = _fill_arrangement(stages, microbatches, to_lists(rows), to_lists(boxes), columns)
    if not num_boxes:
        list(order_actions(build_schedule(name, ranks, microbatches, chunks)))  # raises
    code, receive_boxes, send_boxes = (np.array(column, dtype=np.int32) for column in columns)
    last_stages = code[code % 2 == 1] // 4
    by_rank = last_stages[np.argsort(last_stages % ranks, kind="stable")]
    return Arrangement(code, receive_boxes, send_boxes, num_boxes, by_rank.reshape(ranks, chunks).astype(np.int64))


class _Boxes(NamedTuple):
    """Which boxes are full while actions are arranged.

    ``box_of`` is the box in which each action finds what was sent to it; -1 where nothing was sent yet. ``free`` is a
    stack of empty boxes, and ``next_action`` the next action of every rank.
    """

    box_of: IntArray
    free: IntArray
    next_action: IntArray


def to_lists(columns: Any) -> Any:
    """Return a tuple of arrays as the same of lists, which loops that are not compiled read faster."""
    return tuple(column.tolist() for column in columns)


def _fill_arrangement(
    stages: int, microbatches: int, rows: Orders, scratch: _Boxes, columns: tuple[IntArray, ...]
) -> int:
    """Fill the columns of an arrangement; return how many boxes it needs, 0 where orders wait for ever.

    Ranks run by turns, one action each, so that few boxes are full at a time.
    """
    passes, microbatch, start = rows
    box_of, free_boxes, next_actions = scratch
    code, receive_boxes, send_boxes = columns
    ranks, num_found, top, num_boxes = len(next_actions), 0, len(free_boxes), 1
    while num_found < len(passes):
        num_before = num_found
        for rank in range(ranks):
            index = next_actions[rank]
            if index == start[rank + 1]:
                continue
            pass_number, number = passes[index], microbatch[index]
            box = box_of[pass_number * microbatches + number] if pass_number else 0
            if box < 0:
                continue
            if box:
                free_boxes[top] = box
                top += 1
            is_turning = pass_number == 2 * stages - 2  # from the last forward to its backward nothing is sent
            target, send_box = pass_number + 1 if is_turning else pass_number + 2 - 4 * (pass_number % 2), 0
            if target >= 0:
                if ranks > 1 and not is_turning:
                    top -= 1
                    send_box = free_boxes[top]
                    num_boxes = max(num_boxes, send_box + 1)
                box_of[target * microbatches + number] = send_box
            code[num_found] = 2 * pass_number + (1 if pass_number % 2 and number == microbatches - 1 else 0)
            receive_boxes[num_found], send_boxes[num_found] = box, send_box
            next_actions[rank], num_found = index + 1, num_found + 1
        if num_found == num_before:
            return 0
    return num_boxes


def walk_schedule(arrangement: Arrangement, ticks: IntArray, sends: IntArray) -> PassTimes:
    """Return starts and ends of many steps.

    ``ticks`` and ``sends`` have for every step a row of the ticks of every pass, and of sending its output: columns
    ``2 * stage``, and 1 more for a backward.
    """
    steps, columns = ticks.shape
    shapes = ((steps, arrangement.ranks), (steps, columns // 2))
    result = PassTimes(*(np.zeros(shape, np.int64) for shape in shapes))
    if pays(len(arrangement.code) * steps):
        lanes = min(-(-steps // BLOCK) * BLOCK, LANES)
        compile_loop(_walk_lanes)(arrangement, lanes, ticks, sends, result)
    else:
        _walk_columns(arrangement, ticks.T.copy(), sends.T.copy(), result)
    return result


def _walk_lanes(arrangement: Arrangement, lanes: int, ticks: IntArray, sends: IntArray, result: PassTimes) -> None:
    """Fill starts and ends, ``lanes`` steps at a time; inner loops of fixed length become vector code."""
    code, receive_boxes, send_boxes, num_boxes, _ = arrangement
    rank_ends, stage_starts = result
    columns, ranks = ticks.shape[1], rank_ends.shape[1]
    duration, send_duration = np.zeros((columns, lanes), np.int64), np.zeros((columns, lanes), np.int64)
    clock, channel = np.zeros((ranks, lanes), np.int64), np.zeros((2 * ranks, lanes), np.int64)
    box, last_starts = np.zeros((num_boxes, lanes), np.int64), np.zeros((columns // 2, lanes), np.int64)
    for first_step in range(0, len(ticks), lanes):
        width = min(lanes, len(ticks) - first_step)
        steps = slice(first_step, first_step + width)
        duration[:, :width], send_duration[:, :width] = ticks[steps].T, sends[steps].T
        clock[:], channel[:] = 0, 0
        for index in range(len(code)):
            # Unsigned indices spare the compiled loop a check for negative ones.
            pass_number = np.uint32(code[index] >> 1)
            receive_box, send_box = np.uint32(receive_boxes[index]), np.uint32(send_boxes[index])
            rank = np.uint32((pass_number >> 1) % ranks)
            channel_index = 2 * rank + (pass_number & 1)
            if code[index] & 1:
                for lane in range(lanes):
                    last_starts[pass_number >> 1, lane] = max(clock[rank, lane], box[receive_box, lane])
            for block in range(0, lanes, BLOCK):
                if send_box:
                    for lane in range(block, block + BLOCK):
                        end = max(clock[rank, lane], box[receive_box, lane]) + duration[pass_number, lane]
                        clock[rank, lane] = end
                        arrival = max(end, channel[channel_index, lane]) + send_duration[pass_number, lane]
                        channel[channel_index, lane] = arrival
                        box[send_box, lane] = arrival
                else:
                    for lane in range(block, block + BLOCK):
                        clock[rank, lane] = max(clock[rank, lane], box[receive_box, lane]) + duration[pass_number, lane]
        rank_ends[steps], stage_starts[steps] = clock[:, :width].T, last_starts[:, :width].T


def _walk_columns(arrangement: Arrangement, ticks: IntArray, sends: IntArray, result: PassTimes) -> None:
    """Fill starts and ends by NumPy, all steps at once: rows of ``ticks`` and ``sends`` are steps' columns."""
    rank_ends, stage_starts = result
    ranks, steps = arrangement.ranks, ticks.shape[1]
    clock, channel = np.zeros((ranks, steps), np.int64), np.zeros((2 * ranks, steps), np.int64)
    box = np.zeros((arrangement.num_boxes, steps), np.int64)
    columns = (column.tolist() for column in arrangement[:3])
    for code, receive_box, send_box in zip(*columns, strict=True):
        pass_number = code >> 1
        rank = (pass_number >> 1) % ranks
        end = clock[rank]
        np.maximum(end, box[receive_box], out=end)
        if code & 1:
            stage_starts[:, pass_number >> 1] = end
        end += ticks[pass_number]
        if send_box:
            channel_clock = channel[2 * rank + (pass_number & 1)]
            np.maximum(end, channel_clock, out=channel_clock)
            channel_clock += sends[pass_number]
            box[send_box] = channel_clock
    rank_ends[:] = clock.T


Rows = Sequence[Ints]


ENDING_COLUMNS = tuple(name for phase in ENDING for name in phase.columns)
"""The columns of ticks of the end of a step, in order."""

_SCOPES = tuple(list(Scope).index(phase.scope) for phase in ENDING for _ in phase.columns)
"""Which positions go on together after each of `ENDING_COLUMNS`, by number."""

_POSITION, _PAIR = (list(Scope).index(scope) for scope in (Scope.POSITION, Scope.PAIR))


class Endings(NamedTuple):
    """The endings of steps of one schedule, a row of ticks each.

    ``first_buckets`` has the first bucket of every stage among all, and after the last stage their number;
    ``bucket_reductions`` the reduction of every bucket. ``columns`` are the `ENDING_COLUMNS`: ticks by position, by
    pair of positions, or of all positions.
    """

    first_buckets: IntArray
    bucket_reductions: IntArray
    columns: tuple[IntArray, ...]


class StepRows(NamedTuple):
    """For every step the row of its passes in `PassTimes`, and the row of its ending in `Endings`."""

    pass_row: IntArray
    ending: IntArray


def finish_steps(
    steps: StepRows,
    pass_times: PassTimes,
    bucket_ticks: IntArray,
    endings: Endings,
    last_stages: IntArray,
    pairs: IntArray,
) -> IntArray:
    """Return the ticks of every step.

    ``bucket_ticks`` has for every row of passes the ticks from the start of a stage's last backward until each bucket
    leaves, ``last_stages`` the stages of every position in the order in which their buckets leave, and ``pairs`` the
    two positions that keep each tied parameter.
    """
    result = np.zeros(len(steps.pass_row), np.int64)
    if pays(len(steps.pass_row) * (bucket_ticks.shape[1] + last_stages.size)):
        compile_loop(_fill_finishes)(result, steps, pass_times, bucket_ticks, endings, last_stages, pairs)
        return result
    ticks = [0] * len(result)
    of_steps, of_passes = to_lists(steps), to_lists(pass_times)
    of_endings = endings._replace(
        first_buckets=endings.first_buckets.tolist(),
        bucket_reductions=endings.bucket_reductions.tolist(),
        columns=to_lists(endings.columns),
    )
    _fill_finishes(ticks, of_steps, of_passes, bucket_ticks.tolist(), of_endings, last_stages.tolist(), pairs.tolist())
    return np.array(ticks, dtype=np.int64)


def _fill_finishes(
    result: Ints,
    steps: StepRows,
    pass_times: PassTimes,
    bucket_ticks: Rows,
    endings: Endings,
    last_stages: Rows,
    pairs: Rows,
) -> None:
    """Fill ``result``; buckets leave one after another, and the device goes on when all have arrived."""
    pass_rows, ending_rows = steps
    rank_ends, stage_starts = pass_times
    first_buckets, bucket_reductions, columns = endings
    for step in range(len(result)):
        row, ending_row = pass_rows[step], ending_rows[step]
        ends = [0] * len(last_stages)
        reductions = [0] * len(last_stages)
        for position in range(len(last_stages)):
            ends[position] = rank_ends[row][position]
            for stage in last_stages[position]:
                for bucket in range(first_buckets[ending_row][stage], first_buckets[ending_row][stage + 1]):
                    reductions[position] = (
                        max(reductions[position], stage_starts[row][stage] + bucket_ticks[row][bucket])
                        + bucket_reductions[ending_row][bucket]
                    )
        for column in range(len(_SCOPES)):
            ticks = columns[column][ending_row]
            if _SCOPES[column] == _POSITION:
                for position in range(len(ends)):
                    ends[position] += ticks[position]
                    if column == 0:  # what buckets have reduced beneath passes is there too
                        ends[position] = max(ends[position], reductions[position])
            elif _SCOPES[column] == _PAIR:
                for pair in range(len(pairs)):
                    first_position, second_position = pairs[pair][0], pairs[pair][1]
                    ends[first_position] = ends[second_position] = (
                        max(ends[first_position], ends[second_position]) + ticks[pair]
                    )
            else:
                for index in range(len(ticks)):
                    end = max(ends) + ticks[index]
                    for position in range(len(ends)):
                        ends[position] = end
        result[step] = max(ends)
