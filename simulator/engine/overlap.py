"""Computing that is slowed while a data communication of its rank class moves bytes.

Work is counted in whole parts of a tick, so that times are exact: a slowdown of ``p / q``
does ``p`` parts a tick of free computing and ``q`` of slowed.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simulator.engine.step_graph import StepGraph
from simulator.network import Clock, Network
from simulator.program import IntArray, Program, TaskKind
from simulator.ragged import expand

Done = Callable[[int], None]


class _Computing:
    """A task that computes: parts left at ``since``, and how often its end was timed."""

    __slots__ = ("done", "left", "rank_class", "since", "task", "version")

    def __init__(self, task: int, rank_class: int, left: int, done: Done) -> None:
        self.task, self.rank_class, self.left, self.done = task, rank_class, left, done
        self.since = self.version = 0


class Overlap:
    """Tasks that slow others, and tasks that are slowed, on a clock.

    Parameters
    ----------
    special
        Whether a task is begun by ``launch``.
    latencies
        Ticks before that.
    """

    def __init__(self, program: Program, graph: StepGraph, network: Network, clock: Clock) -> None:
        self._graph, self._network, self._clock = graph, network, clock
        self._full, self._slow = Fraction(program.slowdown).as_integer_ratio()
        self._class_of, self._slowing = _slowed_class(program), _slowing_classes(program)
        self._durations = graph.durations.tolist()
        self._moving = [0] * len(program.rank_classes)
        self._computing: list[dict[int, _Computing]] = [{} for _ in program.rank_classes]
        chosen = np.array(self._class_of, np.int64) >= 0
        chosen[list(self._slowing)] = True
        self.special: NDArray[np.bool_] = chosen | (graph.flow >= 0)
        self.latencies: IntArray = np.where(chosen & (graph.flow < 0), 0, graph.latencies)

    def launch(self, done: Done, task: int) -> None:
        """Begin what a task does after its latency; ``done`` is called with it when that has ended."""
        if self._class_of[task] >= 0:
            self._compute(task, done)
        elif task in self._slowing:
            self._slow_down(self._slowing[task], 1)
            self._move(task, partial(self._moved, done))
        else:
            self._move(task, done)

    def _move(self, task: int, done: Done) -> None:
        flow = int(self._graph.flow[task])
        if flow >= 0:
            self._network.start(self._graph.bundles[flow], done, task)
        else:
            self._clock.call(self._durations[task], done, task)

    def _moved(self, done: Done, task: int) -> None:
        self._slow_down(self._slowing[task], -1)
        done(task)

    def _slow_down(self, rank_classes: tuple[int, ...], change: int) -> None:
        """Count a communication that begins or ends, and time the computing of its classes anew."""
        for rank_class in rank_classes:
            before = self._rate(rank_class)
            self._moving[rank_class] += change
            if self._rate(rank_class) != before:
                for item in self._computing[rank_class].values():
                    item.left -= before * (self._clock.now - item.since)
                    self._time(item)

    def _rate(self, rank_class: int) -> int:
        return self._slow if self._moving[rank_class] else self._full

    def _compute(self, task: int, done: Done) -> None:
        rank_class = self._class_of[task]
        item = _Computing(task, rank_class, self._durations[task] * self._full, done)
        self._computing[rank_class][task] = item
        self._time(item)

    def _time(self, item: _Computing) -> None:
        """Call when a task will have ended at the present rate."""
        item.since = self._clock.now
        item.version += 1
        ticks = max(-(-item.left // self._rate(item.rank_class)), 0)
        self._clock.call(ticks, self._end, (item, item.version))

    def _end(self, timed: tuple[_Computing, int]) -> None:
        item, version = timed
        if version == item.version:  # else its rate has changed since, and another call is under way
            del self._computing[item.rank_class][item.task]
            item.done(item.task)


def _slowed_class(program: Program) -> list[int]:
    """Return for every task that can be slowed its rank class, -1 for all others."""
    slow = np.array([item.kind.computes and len(item.pieces) == 1 for item in program.work], dtype=bool)
    class_of_stream = np.array([stream.rank_class for stream in program.streams], np.int64)
    tasks = np.flatnonzero(slow[program.work_of] & (np.diff(program.stream_start) > 0))
    place, index = expand(program.stream_start, tasks)
    classes = class_of_stream[program.stream_of[index]]
    first = class_of_stream[program.stream_of[program.stream_start[tasks]]]
    several = np.bincount(place, classes != first[place], len(tasks)) > 0
    result = np.full(program.num_tasks, -1, np.int64)
    result[tasks] = np.where(several, -1, first)
    return result.tolist()


def _slowing_classes(program: Program) -> dict[int, tuple[int, ...]]:
    """Return the rank classes of every data communication."""
    data = np.array([item.kind is TaskKind.DATA_COMMUNICATION for item in program.work], dtype=bool)
    return {
        task: tuple(sorted({program.streams[stream].rank_class for stream in program.streams_of(task)}))
        for task in np.flatnonzero(data[program.work_of]).tolist()
    }
