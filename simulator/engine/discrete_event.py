"""The reference engine: SimPy in callback form, one event a task.

A task's event is scheduled when the last task it waits for ends. Communications over
ports that others use too hand their bytes to the max-min fair `Network` when their
latency has passed.
"""

import gc
from collections.abc import Callable

import simpy

from simulator.engine.deadlock import deadlock
from simulator.engine.step_graph import StepGraph, compile_program
from simulator.network import Network
from simulator.program import Program

_NORMAL, _LAST = 1, 2
"""Priorities of SimPy events within one instant; 0 is SimPy's own URGENT."""


class _Event:
    """The least that SimPy's queue runs: callbacks, and that it did not fail."""

    __slots__ = ("callbacks", "payload")
    _ok = True

    def __init__(self, callbacks: tuple[Callable[["_Event"], None], ...], payload: object) -> None:
        self.callbacks, self.payload = callbacks, payload


class _Clock:
    """SimPy's environment as the network sees it."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment

    @property
    def now(self) -> int:
        return int(self._environment.now)

    def call(self, delay: int, action: Callable[[], None], *, last: bool = False) -> None:
        event = _Event((_call,), action)
        self._environment.schedule(event, _LAST if last else _NORMAL, delay)  # type: ignore[arg-type]


def _call(event: _Event) -> None:
    event.payload()  # type: ignore[operator]


def finish_times(program: Program) -> tuple[list[int], list[int]]:
    """Return start and end of every task in ticks.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    graph = compile_program(program)
    starts, ends = _run(graph)
    if -1 in ends:
        raise deadlock(program, [end >= 0 for end in ends])
    return starts, ends


def _run(graph: StepGraph) -> tuple[list[int], list[int]]:
    environment = simpy.Environment(initial_time=0)
    network = Network(graph.capacity, _Clock(environment))
    waiting, count = list(graph.waiting), len(graph.waiting)
    starts, ends = [-1] * count, [-1] * count
    successors, latencies, bundles, schedule = graph.successors, graph.latencies, graph.bundles, environment.schedule

    def complete(task: int) -> None:
        ends[task] = environment.now  # type: ignore[assignment]
        for successor in successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                begin(successor)

    def fire(event: _Event) -> None:
        task: int = event.payload  # type: ignore[assignment]
        shape = bundles[task]
        if shape is None:
            complete(task)
        else:
            network.start(shape, lambda: complete(task))

    callbacks = (fire,)

    def begin(task: int) -> None:
        starts[task] = environment.now  # type: ignore[assignment]
        schedule(_Event(callbacks, task), _NORMAL, latencies[task])  # type: ignore[arg-type]

    for task in range(count):
        if not graph.waiting[task]:
            begin(task)
    collecting = gc.isenabled()
    gc.disable()  # events are freed by reference counts; the cyclic collector costs a third of a large run
    try:
        environment.run()
    finally:
        if collecting:
            gc.enable()
    return starts, ends
