"""The reference engine: SimPy in callback form, one event a task.

A task's event is scheduled when the last task it waits for ends. When its latency has
passed, a communication over links that others use too hands its bytes to the max-min
fair `Network`; where computing can be slowed, that is the `Overlap`'s work.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL

from simulator.engine.clock import EventClock
from simulator.engine.compiled import pays
from simulator.engine.contraction import contract, expand
from simulator.engine.deadlock import deadlock
from simulator.engine.fast_forward import Head, fast_forward
from simulator.engine.longest_path import walk
from simulator.engine.overlap import Done, Overlap
from simulator.engine.step_graph import StepGraph, compile_program, start_times
from simulator.engine.tenant import Tenant, unfinished
from simulator.network import Network
from simulator.program import IntArray, Program


class _TaskEvent:
    """The least that SimPy's queue runs: callbacks, and that it did not fail."""

    __slots__ = ("callbacks", "task", "time")
    _ok = True
    callbacks: Any
    task: int
    time: int


def finish_times(program: Program, *, every_event: bool = False) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks.

    What is known without events is left out of the simulation, with the same result: chains that
    nothing can disturb become one task, and events begin where the first two transfers meet.
    ``every_event`` simulates all the same.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    graph = compile_program(program)
    path = walk(graph)
    if len(path.ends) and path.ends.min() < 0:
        raise deadlock(program, graph, path.ends >= 0)
    if program.slowdown > 1 or graph.tenants or every_event:
        ends = run(graph, program if program.slowdown > 1 else None)
        return start_times(graph, ends), ends
    small = contract(graph) if pays(3 * graph.num_tasks) else None
    if small is None:
        head = fast_forward(graph, path)
        ends = path.ends if head is None else run(graph, head=head)
        return start_times(graph, ends), ends
    inner = walk(small.graph)
    head = fast_forward(small.graph, inner)
    ends = inner.ends if head is None else run(small.graph, head=head)
    return expand(small, start_times(small.graph, ends), ends)


def run(graph: StepGraph, slowed: Program | None = None, head: Head | None = None) -> IntArray:
    """Return the end in ticks of every task, -1 where it never starts.

    ``slowed`` is the graph's program, where its computing can be slowed; ``head`` what is known
    to have happened before the simulation begins.
    """
    environment = simpy.Environment(initial_time=head.time if head else 0)
    clock = EventClock(environment)
    network = Network(graph.capacity, clock)
    if slowed is None:
        special, latencies, launch = graph.flow >= 0, graph.latencies, _transfers(graph, network)
    else:
        overlap = Overlap(slowed, graph, network, clock)
        special, latencies, launch = overlap.special, overlap.latencies, overlap.launch
    known = graph.latency_list if slowed is None else latencies.tolist()
    with _no_collection():
        ends = _begin(graph, head or _nothing(graph, latencies), environment, special.tolist(), known, launch)
        running = unfinished(ends, np.flatnonzero(np.diff(graph.successor_start) == 0).tolist())
        for shape, background in graph.tenants:
            Tenant(shape, background, network, clock, running)
        environment.run()
        return np.array(ends[: graph.num_tasks], np.int64)


def _transfers(graph: StepGraph, network: Network) -> Callable[[int, Done], None]:
    """Return what begins the transfer of a task."""
    bundles, flow = graph.bundles, graph.flow.tolist()
    return lambda task, done: network.start(bundles[flow[task]], done, task)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector out: it costs half a large run, and there are no cycles to find."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _nothing(graph: StepGraph, latencies: IntArray) -> Head:
    """Return the head of a step of which nothing has happened."""
    roots = np.flatnonzero(graph.waiting == 0)
    return Head(0, np.full(graph.num_tasks, -1), graph.waiting, roots, latencies[roots])


def _begin(
    graph: StepGraph,
    head: Head,
    environment: simpy.Environment,
    special: list[bool],
    latencies: list[int],
    launch: Callable[[int, Done], None],
) -> list[int]:
    """Schedule the tasks that are ready, and return where the ends of all will be written."""
    start, successors = graph.successor_lists
    waiting: list[int] = head.waiting.tolist()
    ends: list[int] = head.ends.tolist()
    schedule = environment.schedule

    def fire(event: _TaskEvent) -> None:
        task = event.task
        if special[task]:
            launch(task, arrive)
            return
        now = ends[task] = event.time
        spare: _TaskEvent | None = event  # it has fired: the first task to follow takes it
        for successor in successors[start[task] : start[task + 1]]:
            left = waiting[successor] - 1
            if left:
                waiting[successor] = left
            else:
                following: Any = spare or _TaskEvent()
                spare, delay = None, latencies[successor]
                following.callbacks, following.task, following.time = callbacks, successor, now + delay
                schedule(following, NORMAL, delay)

    def arrive(task: int) -> None:
        special[task] = False
        event = _TaskEvent()
        event.task, event.time = task, int(environment.now)
        fire(event)

    callbacks = (fire,)
    for task, due in zip(head.ready.tolist(), head.due.tolist(), strict=True):
        event: Any = _TaskEvent()
        event.callbacks, event.task, event.time = callbacks, task, due
        schedule(event, NORMAL, due - head.time)
    return ends
