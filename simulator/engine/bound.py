"""A lower bound of a step: for each stream its work, and paths to its first task and from its last one."""

from typing import NamedTuple

import numpy as np

from meshwise.simulator.engine.step_graph import solo_durations, stream_rows
from meshwise.simulator.program import IntArray, Program

MAX_HOPS = 3
"""Predecessors that are followed back, one after another, from the first task of a stream."""


def step_bound(program: Program) -> int:
    """Return a lower bound of the longest path, and so of the step, in ticks.

    A stream needs the time until its first task can start, the time of all its tasks, and the time from the end of its
    last task to the end of the step. The first and the last are lengths of paths along streams and over predecessors,
    found by relaxation (Bellman 1958).

    >>> from meshwise.simulator.program import RankClass, Stream, StreamKind, Task, TaskKind, program_of
    >>> streams = [Stream(0, StreamKind.COMPUTE), Stream(0, StreamKind.DATA)]
    >>> tasks = [((0,), 3, ()), ((1,), 5, (0,)), ((1,), 5, ()), ((0,), 2, (2,))]
    >>> tasks = [Task(TaskKind.FORWARD, *task) for task in tasks]
    >>> step_bound(program_of([RankClass("all", (0,), (0,))], streams, tasks))  # 3 + (5 + 5) + 2
    15
    """
    durations = solo_durations(program)
    if not len(program.stream_of):
        return int(durations.max(initial=0))
    count, num_streams = program.num_tasks, len(program.streams)
    stream, task = stream_rows(program)
    blocker, waiter = program.predecessor_of, np.repeat(np.arange(count), np.diff(program.predecessor_start))
    work = np.zeros(num_streams, np.int64)
    np.add.at(work, stream, durations[task])
    head = _head_times(_Waits(stream, task, blocker, waiter), durations, num_streams)
    # The way from the last task to the end is the way to the first task in the program read backwards.
    mirror = _Waits(num_streams - 1 - stream[::-1], count - 1 - task[::-1], count - 1 - waiter, count - 1 - blocker)
    tail = _head_times(mirror, durations[::-1], num_streams)[::-1]
    return int(max((head + work + tail).max(), durations.max()))


class _Waits(NamedTuple):
    """The tasks of every stream in order, and pairs of tasks in which ``waiter`` waits for ``blocker``."""

    stream: IntArray
    task: IntArray
    blocker: IntArray
    waiter: IntArray


def _head_times(waits: _Waits, durations: IntArray, num_streams: int) -> IntArray:
    """Return for every stream the ticks before which its first task cannot start."""
    stream, task, blocker, waiter = waits
    is_first = np.append(True, stream[1:] != stream[:-1])
    first_task = np.full(num_streams, -1)
    first_task[stream[is_first]] = task[is_first]
    # One running sum over all streams, from which its value at the start of each is subtracted.
    elapsed_ticks = np.cumsum(durations[task]) - durations[task]
    elapsed_ticks -= elapsed_ticks[is_first][np.cumsum(is_first) - 1]
    is_near = np.zeros(len(durations), dtype=bool)
    is_near[task[is_first]] = True
    for _ in range(MAX_HOPS):
        is_near[blocker[is_near[waiter]]] = True
    rows, pairs = np.flatnonzero(is_near[task]), np.flatnonzero(is_near[waiter] & is_near[blocker])
    # An arc along a stream leads from its first task and has the work in between.
    source = np.append(first_task[stream[rows]], blocker[pairs])
    target = np.append(task[rows], waiter[pairs])
    ticks = np.append(elapsed_ticks[rows], durations[blocker[pairs]])
    starts = _relax_paths(len(durations), source, target, ticks, num_streams + MAX_HOPS)
    return np.where(first_task >= 0, starts[first_task], 0)


def _relax_paths(count: int, source: IntArray, target: IntArray, ticks: IntArray, rounds: int) -> IntArray:
    """Return the longest paths over arcs that ``rounds`` of relaxation find; fewer rounds give lower bounds."""
    starts = np.zeros(count, np.int64)
    for _ in range(rounds):
        previous_starts = starts[target]
        np.maximum.at(starts, target, starts[source] + ticks)
        if np.array_equal(previous_starts, starts[target]):
            break
    return starts
