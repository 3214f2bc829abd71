"""The step as a longest path: exact if transfers share no link and nothing is slowed, else a lower bound."""

from typing import NamedTuple

import numpy as np

from meshwise.simulator.engine.compiled import Ints, installed, pays, run_loop
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, find_deadlock
from meshwise.simulator.program import IntArray, Program, expand_rows

MIN_WAVE_STREAMS = 256
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
    if len(program.streams) >= MIN_WAVE_STREAMS and not installed():
        starts, ends = walk_waves(graph)
    else:
        starts, ends, _ = walk_graph(graph)
    if len(ends) and ends.min() < 0:
        raise find_deadlock(program, graph, ends >= 0)
    return starts, ends


def walk_graph(graph: StepGraph, *, is_compiled: bool | None = None) -> Walk:
    """Return the walk over a graph, compiled or not; by default whichever is faster."""
    count = graph.num_tasks
    columns = (
        graph.num_waits.copy(),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
    )
    inputs = (graph.successor_start, graph.successors, graph.durations)
    num_done, (_, starts, ends, order) = run_loop(
        _fill_walk, inputs, columns, pays(count) if is_compiled is None else is_compiled
    )
    return Walk(starts, ends, order[:num_done])


def _fill_walk(
    successor_start: Ints, successors: Ints, durations: Ints, num_waits: Ints, starts: Ints, ends: Ints, order: Ints
) -> int:
    """Fill starts, ends and a topological order (Kahn 1962), and return the number of tasks that can finish.

    Tasks that are ready are a stack at the far end of ``order``, which never meets the tasks at its front. So the walk
    is depth first and keeps to a stream.
    """
    num_done, top = 0, len(durations)
    for task in range(len(durations) - 1, -1, -1):
        if num_waits[task] == 0:
            top -= 1
            order[top] = task
    while top < len(durations):
        task = order[top]
        top += 1
        order[num_done] = task
        num_done += 1
        end = starts[task] + durations[task]
        ends[task] = end
        for index in range(successor_start[task], successor_start[task + 1]):
            successor = successors[index]
            if end > starts[successor]:
                starts[successor] = end
            num_waits[successor] -= 1
            if num_waits[successor] == 0:
                top -= 1
                order[top] = successor
    return num_done


def walk_waves(graph: StepGraph) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks by NumPy: in each wave, all tasks that wait for nothing more."""
    starts, ends = np.zeros(graph.num_tasks, np.int64), np.full(graph.num_tasks, -1, np.int64)
    num_waits = graph.num_waits.copy()
    wave = np.flatnonzero(num_waits == 0)
    while len(wave):
        ends[wave] = starts[wave] + graph.durations[wave]
        place, index = expand_rows(graph.successor_start, wave)
        targets = graph.successors[index]
        np.maximum.at(starts, targets, ends[wave][place])
        np.subtract.at(num_waits, targets, 1)
        wave = np.unique(targets[num_waits[targets] == 0])
    return starts, ends
