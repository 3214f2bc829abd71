"""When the pieces of tasks run.

The engines know of a task its start and its end, and its pieces follow each other in between. Where a host launches
the kernels of a chain one by one, the engines let the chain begin so late that it need not stop for them. Its first
kernels run before that: of a chain that is reached at time r and whose launching begins at time h, a piece that is s
ticks after the first one runs at max(r + s, h + l), where h + l is when it would run had the chain been reached long
before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.program import IntArray, Piece, Program, TaskKind
from simulator.ragged import expand


class PieceTimes(NamedTuple):
    """For every piece that ran its task, its index in the program's list of all pieces, and when."""

    task: IntArray
    piece: IntArray
    start: IntArray
    end: IntArray


def piece_times(program: Program, starts: IntArray, ends: IntArray, tasks: IntArray) -> PieceTimes:
    """Return when the pieces of ``tasks`` ran; those that last as long as their task end with it."""
    piece_start = np.append(0, np.cumsum([len(item.pieces) for item in program.work], dtype=np.int64))
    told = [(p.start, p.end, p.end == item.duration) for item in program.work for p in item.pieces]
    begin, end, whole = np.array(told, np.int64).reshape(-1, 3).T
    place, piece = expand(piece_start, program.work_of[tasks])
    task = tasks[place]
    first = starts[task] + begin[piece]
    last = np.where(whole[piece] > 0, ends[task], starts[task] + end[piece])
    chains = np.array([len(item.pieces) > 1 and any(p.launched for p in item.pieces) for item in program.work], bool)
    rows = np.flatnonzero(chains[program.work_of[task]])
    if len(rows):
        launched = [launch_times(item.pieces) for item in program.work]
        reached, begun = _arrivals(program, starts, ends, chains[program.work_of])
        after = np.array([ticks for row in launched for ticks in row], np.int64)[piece[rows]]
        first[rows] = np.maximum(reached[task[rows]] + begin[piece[rows]], begun[task[rows]] + after)
        last[rows] = first[rows] + (end - begin)[piece[rows]]
    return PieceTimes(task, piece, first, last)


def launch_times(pieces: Sequence[Piece]) -> list[int]:
    """Return when pieces run that wait for their launches and for those before them alone: ticks from the first launch.

    >>> durations, launches = (5, 1, 1), (2, 4, 9)
    >>> ends = (5, 6, 7)
    >>> rows = zip(durations, launches, ends, strict=True)
    >>> launch_times([Piece(TaskKind.FORWARD, "", e - d, e, launched=n) for d, n, e in rows])
    [2, 7, 9]
    """
    times = list[int]()
    ready = ended = end = 0
    for piece in pieces:
        if piece.start >= end:  # else it is beside the one before it
            ready = ended
        times.append(max(ready, piece.launched))
        ended, end = max(ended, times[-1] + piece.end - piece.start), max(end, piece.end)
    return times


def _arrivals(
    program: Program, starts: IntArray, ends: IntArray, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[IntArray, IntArray]:
    """Return when everything but launches has ended that ``chosen`` tasks wait for, and when their launching began.

    Where several rank classes run a task, the latest time of all.
    """
    reached, begun = np.zeros_like(starts), np.zeros_like(starts)
    launches = np.array([item.kind is TaskKind.LAUNCH for item in program.work], bool)[program.work_of]
    tasks = np.flatnonzero(chosen)
    place, index = expand(program.predecessor_start, tasks)
    task, before = tasks[place], program.predecessor_of[index]
    first = launches[before]
    np.maximum.at(begun, task[first], starts[before[first]])
    np.maximum.at(reached, task[~first], ends[before[~first]])
    order = np.argsort(program.stream_of, kind="stable")
    holder = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))[order]
    follows = np.flatnonzero((np.diff(program.stream_of[order]) == 0) & chosen[holder[1:]])
    np.maximum.at(reached, holder[follows + 1], ends[holder[follows]])
    return reached, begun
