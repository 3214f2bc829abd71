"""A lower bound of a step: for each stream its work, and paths to its first task and from its last one."""

from typing import NamedTuple

import numpy as np

from meshwise.simulator.engine.step_graph import durations_of, stream_rows
from meshwise.simulator.program import IntArray, Program

HOPS = 3
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
    durations = durations_of(program)
    if not len(program.stream_of):
        return int(durations.max(initial=0))
    count, num_streams = program.num_tasks, len(program.streams)
    stream, task = stream_rows(program)
    before, after = program.predecessor_of, np.repeat(np.arange(count), np.diff(program.predecessor_start))
    work = np.zeros(num_streams, np.int64)
    np.add.at(work, stream, durations[task])
    head = _heads(_Waits(stream, task, before, after), durations, num_streams)
    # The way from the last task to the end is the way to the first task in the program read backwards.
    mirrored = _Waits(num_streams - 1 - stream[::-1], count - 1 - task[::-1], count - 1 - after, count - 1 - before)
    tail = _heads(mirrored, durations[::-1], num_streams)[::-1]
    return int(max((head + work + tail).max(), durations.max()))


class _Waits(NamedTuple):
    """The tasks of every stream in order, and pairs of tasks in which ``waiter`` waits for ``blocker``."""

    stream: IntArray
    task: IntArray
    before: IntArray
    after: IntArray


def _heads(waits: _Waits, durations: IntArray, num_streams: int) -> IntArray:
    """Return for every stream the ticks before which its first task cannot start."""
    stream, task, before, after = waits
    opening = np.append(True, stream[1:] != stream[:-1])
    first = np.full(num_streams, -1)
    first[stream[opening]] = task[opening]
    # One running sum over all streams, from which its value at the start of each is subtracted.
    done = np.cumsum(durations[task]) - durations[task]
    done -= done[opening][np.cumsum(opening) - 1]
    nearby = np.zeros(len(durations), dtype=bool)
    nearby[task[opening]] = True
    for _ in range(HOPS):
        nearby[before[nearby[after]]] = True
    rows, pairs = np.flatnonzero(nearby[task]), np.flatnonzero(nearby[after] & nearby[before])
    # An arc along a stream leads from its first task and has the work in between.
    source = np.append(first[stream[rows]], before[pairs])
    target = np.append(task[rows], after[pairs])
    ticks = np.append(done[rows], durations[before[pairs]])
    starts = _relaxed(len(durations), source, target, ticks, num_streams + HOPS)
    return np.where(first >= 0, starts[first], 0)


def _relaxed(count: int, source: IntArray, target: IntArray, ticks: IntArray, rounds: int) -> IntArray:
    """Return the longest paths over arcs that ``rounds`` of relaxation find; fewer rounds give lower bounds."""
    starts = np.zeros(count, np.int64)
    for _ in range(rounds):
        before = starts[target]
        np.maximum.at(starts, target, starts[source] + ticks)
        if np.array_equal(before, starts[target]):
            break
    return starts
