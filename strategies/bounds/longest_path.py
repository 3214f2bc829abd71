"""When the passes of a schedule start and end, and when steps end, for many steps of one schedule side by side.

A pass starts when the previous one on its pipeline rank has ended and its input has arrived; its output is sent when
the rank's previous transfer in that direction has arrived. Steps end after reductions, sums of replicated and tied
gradients, optimizer and gather. All times are sums and maxima of ticks, and so exact.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.engine.compiled import compiled, pays
from meshwise.simulator.engine.longest_path import Ints
from meshwise.simulator.program import IntArray
from meshwise.strategies.schedules.orders import Orders, in_order, orders
from meshwise.strategies.schedules.schedule import schedule

Column = NDArray[np.int32]

BLOCK = 8
"""Steps in one vector of a compiled loop."""
LANES = 5 * BLOCK
"""Most steps that a compiled loop walks side by side: their clocks then stay in a core's first caches."""


class Arrangement(NamedTuple):
    """The actions of a schedule, each after all that it waits for.

    Parameters
    ----------
    code
        ``4 * stage``, 2 more for a backward and 1 more for that of the last microbatch.
    receive_boxes, send_boxes
        The box in which an action finds its input, and the box for its output; 0 for none.
    num_boxes
        Number of boxes.
    last_stages
        The stages of every rank, in the order in which the last microbatch's backwards run.
    """

    code: Column
    arrives: Column
    leaves: Column
    boxes: int
    last: IntArray

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.last)


class Walked(NamedTuple):
    """For every step, when each rank ends its passes, and when each stage starts the last microbatch's backward."""

    ends: IntArray
    starts: IntArray


@lru_cache(maxsize=512)
def arrangement(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Arrangement:
    """Return the arrangement of a schedule by name; the same value for the same arguments.

    >>> arrangement("1f1b", 2, 1).code.tolist()
    [0, 4, 7, 3]

    Raises
    ------
    ValueError
        Where the orders wait for each other for ever; the message names what each rank waits for.
    """
    rows, stages = orders(name, ranks, microbatches, chunks), ranks * chunks
    columns, boxes = _arrange_columns(rows, stages, microbatches)
    if not boxes:
        list(in_order(schedule(name, ranks, microbatches, chunks)))  # raises
    code, arrives, leaves = (np.array(column, dtype=np.int32) for column in columns)
    last = code[code % 2 == 1] // 4
    by_rank = last[np.argsort(last % ranks, kind="stable")]
    return Arrangement(code, arrives, leaves, boxes, by_rank.reshape(ranks, chunks).astype(np.int64))


class _Columns(NamedTuple):
    """The columns of an `Arrangement`, which are filled action by action."""

    code: IntArray
    arrives: IntArray
    leaves: IntArray


class _Boxes(NamedTuple):
    """Which boxes are full while actions are arranged.

    Parameters
    ----------
    box_of
        The box in which each action finds what was sent to it; -1 where nothing was sent yet.
    free
        A stack of empty boxes.
    next_action
        The next action of every rank: first its first one.
    """

    box_of: IntArray
    free: IntArray
    next_action: IntArray


def to_lists(columns: Any) -> Any:
    """Return a tuple of arrays as the same of lists, which loops that are not compiled read faster."""
    return columns._make(column.tolist() for column in columns)


def _arrange_columns(rows: Orders, stages: int, microbatches: int) -> tuple[_Columns, int]:
    count = len(rows.passes)
    boxes = _Boxes(np.full(count, -1), np.arange(count, 0, -1), rows.start[:-1].copy())
    columns = _Columns(*np.zeros((3, count), np.int64))
    if pays(count):
        return columns, compiled(_arrange)(stages, microbatches, rows, boxes, columns)
    columns = to_lists(columns)
    return columns, _arrange(stages, microbatches, to_lists(rows), to_lists(boxes), columns)


def _arrange(stages: int, microbatches: int, rows: Orders, scratch: _Boxes, columns: _Columns) -> int:
    """Fill the columns of an arrangement; return how many boxes it needs, 0 where orders wait for ever.

    Ranks run by turns, one action each, so that few boxes are full at a time.
    """
    passes, microbatch, start = rows
    box_of, free, at = scratch
    code, arrives, leaves = columns
    ranks, found, top, boxes = len(at), 0, len(free), 1
    while found < len(passes):
        before = found
        for rank in range(ranks):
            index = at[rank]
            if index == start[rank + 1]:
                continue
            now, number = passes[index], microbatch[index]
            box = box_of[now * microbatches + number] if now else 0
            if box < 0:
                continue
            if box:
                free[top] = box
                top += 1
            turning = now == 2 * stages - 2  # from the last forward to its backward nothing is sent
            target, left = now + 1 if turning else now + 2 - 4 * (now % 2), 0
            if target >= 0:
                if ranks > 1 and not turning:
                    top -= 1
                    left = free[top]
                    boxes = max(boxes, left + 1)
                box_of[target * microbatches + number] = left
            code[found] = 2 * now + (1 if now % 2 and number == microbatches - 1 else 0)
            arrives[found], leaves[found] = box, left
            at[rank], found = index + 1, found + 1
        if found == before:
            return 0
    return boxes


def walk(arranged: Arrangement, ticks: IntArray, sends: IntArray) -> Walked:
    """Return starts and ends of many steps.

    Parameters
    ----------
    ticks, sends
        For every step a row of the ticks of every pass, and of sending its output: columns ``2 * stage``, and 1 more
        for a backward.
    """
    steps, columns = ticks.shape
    result = Walked(np.zeros((steps, arranged.ranks), np.int64), np.zeros((steps, columns // 2), np.int64))
    if pays(len(arranged.code) * steps):
        lanes = min(-(-steps // BLOCK) * BLOCK, LANES)
        compiled(_walk_lanes)(arranged, lanes, ticks, sends, result)
    else:
        _walk_columns(arranged, ticks.T.copy(), sends.T.copy(), result)
    return result


def _walk_lanes(arranged: Arrangement, lanes: int, ticks: IntArray, sends: IntArray, result: Walked) -> None:
    """Fill starts and ends, ``lanes`` steps at a time; inner loops of fixed length become vector code."""
    code, arrives, leaves, boxes, _ = arranged
    ends, starts = result
    columns, ranks = ticks.shape[1], ends.shape[1]
    duration, sending = np.zeros((columns, lanes), np.int64), np.zeros((columns, lanes), np.int64)
    clock, channel = np.zeros((ranks, lanes), np.int64), np.zeros((2 * ranks, lanes), np.int64)
    box, last = np.zeros((boxes, lanes), np.int64), np.zeros((columns // 2, lanes), np.int64)
    for first in range(0, len(ticks), lanes):
        width = min(lanes, len(ticks) - first)
        duration[:, :width], sending[:, :width] = ticks[first : first + width].T, sends[first : first + width].T
        clock[:], channel[:] = 0, 0
        for index in range(len(code)):
            # Unsigned indices spare the compiled loop a check for negative ones.
            now, came, left = np.uint32(code[index] >> 1), np.uint32(arrives[index]), np.uint32(leaves[index])
            rank = np.uint32((now >> 1) % ranks)
            busy = 2 * rank + (now & 1)
            if code[index] & 1:
                for lane in range(lanes):
                    last[now >> 1, lane] = max(clock[rank, lane], box[came, lane])
            for block in range(0, lanes, BLOCK):
                if left:
                    for lane in range(block, block + BLOCK):
                        end = max(clock[rank, lane], box[came, lane]) + duration[now, lane]
                        clock[rank, lane] = end
                        gone = max(end, channel[busy, lane]) + sending[now, lane]
                        channel[busy, lane] = gone
                        box[left, lane] = gone
                else:
                    for lane in range(block, block + BLOCK):
                        clock[rank, lane] = max(clock[rank, lane], box[came, lane]) + duration[now, lane]
        ends[first : first + width], starts[first : first + width] = clock[:, :width].T, last[:, :width].T


def _walk_columns(arranged: Arrangement, ticks: IntArray, sends: IntArray, result: Walked) -> None:
    """Fill starts and ends by NumPy, all steps at once: rows of ``ticks`` and ``sends`` are steps' columns."""
    ends, starts = result
    ranks, steps = arranged.ranks, ticks.shape[1]
    clock, channel = np.zeros((ranks, steps), np.int64), np.zeros((2 * ranks, steps), np.int64)
    box = np.zeros((arranged.boxes, steps), np.int64)
    columns = (column.tolist() for column in (arranged.code, arranged.arrives, arranged.leaves))
    for code, arrives, leaves in zip(*columns, strict=True):
        now = code >> 1
        rank = (now >> 1) % ranks
        end = clock[rank]
        np.maximum(end, box[arrives], out=end)
        if code & 1:
            starts[:, now >> 1] = end
        end += ticks[now]
        if leaves:
            busy = channel[2 * rank + (now & 1)]
            np.maximum(end, busy, out=busy)
            busy += sends[now]
            box[leaves] = busy
    ends[:] = clock.T


Rows = Sequence[Ints]


class Endings(NamedTuple):
    """The endings of steps of one schedule, a row of ticks each.

    Parameters
    ----------
    first_buckets
        The first bucket of every stage among all, and after the last stage their number.
    bucket_reductions
        The reduction of every bucket.
    late_reductions, replicated_sums, optimizer, gather, squares
        For every pipeline position, as in `meshwise.strategies.bounds.durations.EndingTicks`.
    norm
        The sum of the norm of gradients; empty without clipping.
    tied_sums
        The sum of every tied parameter's gradients.
    """

    first: IntArray
    leaving: IntArray
    late: IntArray
    replicated: IntArray
    optimizer: IntArray
    gather: IntArray
    squares: IntArray
    norm: IntArray
    tied: IntArray


class Steps(NamedTuple):
    """For every step the row of its passes in `PassTimes`, and the row of its ending in `Endings`."""

    lane: IntArray
    ending: IntArray


def finish(
    steps: Steps, walked: Walked, filled: IntArray, endings: Endings, last: IntArray, pairs: IntArray
) -> IntArray:
    """Return the ticks of every step.

    Parameters
    ----------
    bucket_ticks
        For every row of passes, the ticks from the start of a stage's last backward until each bucket leaves.
    last_stages
        The stages of every position, in the order in which their buckets leave.
    pairs
        The two positions that keep each tied parameter.
    """
    result = np.zeros(len(steps.lane), np.int64)
    if pays(len(steps.lane) * (filled.shape[1] + last.size)):
        compiled(_finish)(result, steps, walked, filled, endings, last, pairs)
        return result
    ticks = [0] * len(result)
    of_steps, of_passes, of_endings = to_lists(steps), to_lists(walked), to_lists(endings)
    _finish(ticks, of_steps, of_passes, filled.tolist(), of_endings, last.tolist(), pairs.tolist())
    return np.array(ticks, dtype=np.int64)


def _finish(
    result: Ints, steps: Steps, walked: Walked, filled: Rows, endings: Endings, last: Rows, pairs: Rows
) -> None:
    """Fill ``result``; buckets leave one after another, and the device goes on when all have arrived."""
    lane, ending = steps
    ends, starts = walked
    first, leaving, late, replicated, optimizer, gather, squares, norm, tied = endings
    for step in range(len(result)):
        row, how = lane[step], ending[step]
        done = [0] * len(last)
        for position in range(len(last)):
            free = 0
            for stage in last[position]:
                for bucket in range(first[how][stage], first[how][stage + 1]):
                    free = max(free, starts[row][stage] + filled[row][bucket]) + leaving[how][bucket]
            done[position] = max(free, ends[row][position] + late[how][position]) + replicated[how][position]
        for pair in range(len(pairs)):
            one, other = pairs[pair][0], pairs[pair][1]
            done[one] = done[other] = max(done[one], done[other]) + tied[how][pair]
        for index in range(len(norm[how])):
            together = 0
            for position in range(len(last)):
                together = max(together, done[position] + squares[how][position])
            for position in range(len(last)):
                done[position] = together + norm[how][index]
        for position in range(len(last)):
            result[step] = max(result[step], done[position] + optimizer[how][position] + gather[how][position])
