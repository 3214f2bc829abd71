"""The step as a longest path: exact if transfers share no link and nothing is slowed, else a lower bound."""

from collections.abc import MutableSequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.engine.compiled import compiled, installed, pays
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, deadlock
from meshwise.simulator.program import IntArray, Program, expand

Ints = MutableSequence[int]

WIDE = 256
"""Streams from which NumPy, one wave of tasks at a time, is faster than a loop in Python."""


class Walk(NamedTuple):
    """Start and end of every task in ticks, end -1 for tasks that never start, and tasks in topological order."""

    starts: IntArray
    ends: IntArray
    order: IntArray


def finish_times(program: Program) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks, as if no two transfers shared a link.

    Raises
    ------
    Deadlock
        If tasks wait for each other in a cycle, which the message names.
    """
    graph = compile_program(program)
    if len(program.streams) >= WIDE and not installed():
        starts, ends = by_waves(graph)
    else:
        starts, ends, _ = walk(graph)
    if len(ends) and ends.min() < 0:
        raise deadlock(program, graph, ends >= 0)
    return starts, ends


def longest_path(successor_start: IntArray, successors: IntArray, waiting: IntArray, durations: IntArray) -> IntArray:
    """Return the end of every task in ticks, -1 for tasks that never start.

    >>> columns = [np.array(column) for column in ([0, 1, 2, 2], [2, 2], [0, 0, 2], [3, 5, 4])]
    >>> longest_path(*columns).tolist()
    [3, 5, 9]
    """
    graph = StepGraph(successor_start, successors, waiting, durations, durations, np.full(len(durations), -1))
    return walk(graph).ends


def walk(graph: StepGraph) -> Walk:
    """Return the walk over a graph, compiled or not, whichever is faster."""
    return by_kernel(graph) if pays(graph.num_tasks) else by_loop(graph)


def by_kernel(graph: StepGraph) -> Walk:
    """Return the walk over a graph by compiled code."""
    count = graph.num_tasks
    starts, ends, order = np.zeros(count, np.int64), np.full(count, -1, np.int64), np.empty(count, np.int64)
    columns = (graph.successor_start, graph.successors, graph.waiting.copy(), graph.durations)
    done = compiled(_walk)(*columns, starts, ends, order)
    return Walk(starts, ends, order[:done])


def by_loop(graph: StepGraph) -> Walk:
    """Return the walk over a graph by a loop in Python."""
    count = graph.num_tasks
    starts, ends, order = [0] * count, [-1] * count, [0] * count
    start, successors = graph.successor_lists
    done = _walk(start, successors, graph.waiting.tolist(), graph.durations.tolist(), starts, ends, order)
    return Walk(*(np.array(column, dtype=np.int64) for column in (starts, ends, order[:done])))


def _walk(
    successor_start: Ints, successors: Ints, waiting: Ints, durations: Ints, starts: Ints, ends: Ints, order: Ints
) -> int:
    """Fill starts, ends and a topological order (Kahn 1962), and return the number of tasks that can finish.

    Tasks that are ready are a stack at the far end of ``order``, which never meets the tasks at its front. So the walk
    is depth first and keeps to a stream.
    """
    found, top = 0, len(durations)
    for task in range(len(durations) - 1, -1, -1):
        if waiting[task] == 0:
            top -= 1
            order[top] = task
    while top < len(durations):
        task = order[top]
        top += 1
        order[found] = task
        found += 1
        end = starts[task] + durations[task]
        ends[task] = end
        for index in range(successor_start[task], successor_start[task + 1]):
            successor = successors[index]
            if end > starts[successor]:
                starts[successor] = end
            waiting[successor] -= 1
            if waiting[successor] == 0:
                top -= 1
                order[top] = successor
    return found


def by_waves(graph: StepGraph) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks by NumPy: in each wave, all tasks that wait for nothing more."""
    starts, ends = np.zeros(graph.num_tasks, np.int64), np.full(graph.num_tasks, -1, np.int64)
    left = graph.waiting.copy()
    wave = np.flatnonzero(left == 0)
    while len(wave):
        ends[wave] = starts[wave] + graph.durations[wave]
        place, index = expand(graph.successor_start, wave)
        targets = graph.successors[index]
        np.maximum.at(starts, targets, ends[wave][place])
        np.subtract.at(left, targets, 1)
        wave = np.unique(targets[left[targets] == 0])
    return starts, ends
