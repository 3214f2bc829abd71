"""The reference engine: SimPy in callback form, one event a task.

A task's event is scheduled when the last task it waits for ends. When its latency has
passed, a communication over links that others use too hands its bytes to the max-min
fair `Network`; where computing can be slowed, that is the `Overlap`'s work.
"""

from functools import partial
from heapq import heappush
from typing import Protocol

import numpy as np
from simpy.events import NORMAL

from simulator.collection import no_collection
from simulator.engine.compiled import pays
from simulator.engine.contraction import contract, expand_times
from simulator.engine.deadlock import deadlock
from simulator.engine.environment import Environment
from simulator.engine.fast_forward import Head, fast_forward
from simulator.engine.longest_path import walk
from simulator.engine.overlap import Done, Overlap
from simulator.engine.step_graph import StepGraph, compile_program, start_times
from simulator.engine.tenant import Tenant, unfinished
from simulator.network import Network
from simulator.program import IntArray, Program


class Launch(Protocol):
    """Begins what a task does after its latency; ``done`` is called with it when that has ended."""

    def __call__(self, done: Done, task: int) -> None:  # noqa: D102
        ...


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
    head = fast_forward(graph, path)
    if head is None:
        return path.starts, path.ends
    small = contract(graph, path) if pays(3 * graph.num_tasks) else None
    if small is None:
        ends = run(graph, head=head)
        return start_times(graph, ends), ends
    ends = run(small.graph, head=fast_forward(small.graph, walk(small.graph)))
    return expand_times(small, start_times(small.graph, ends), ends)


@no_collection()
def run(graph: StepGraph, slowed: Program | None = None, head: Head | None = None) -> IntArray:
    """Return the end in ticks of every task, -1 where it never starts.

    ``slowed`` is the graph's program, where its computing can be slowed; ``head`` what is known
    to have happened before the simulation begins.
    """
    environment = Environment(initial_time=head.time if head else 0)
    network = Network(graph.capacity, environment)
    if slowed is None:
        special, latencies, launch = graph.flow >= 0, graph.latencies, _transfers(graph, network)
    else:
        overlap = Overlap(slowed, graph, network, environment)
        special, latencies, launch = overlap.special, overlap.latencies, overlap.launch
    known = graph.latency_list if slowed is None else latencies.tolist()
    actions: list[Done] = []
    ends = _begin(graph, head or _nothing(graph, latencies), environment, special.tolist(), known, launch, actions)
    running = unfinished(ends, np.flatnonzero(np.diff(graph.successor_start) == 0).tolist())
    for shape, background in graph.tenants:
        Tenant(shape, background, network, environment, running)
    environment.run()
    actions.clear()  # what ends a task begins others: the two hold each other, and with them the whole graph
    return np.array(ends, np.int64)


def _transfers(graph: StepGraph, network: Network) -> Launch:
    """Return what begins the transfer of a task."""
    bundles, flow, start = graph.bundles, graph.flow.tolist(), network.start

    def launch(done: Done, task: int) -> None:
        start(bundles[flow[task]], done, task)

    return launch


def _nothing(graph: StepGraph, latencies: IntArray) -> Head:
    """Return the head of a step of which nothing has happened."""
    roots = np.flatnonzero(graph.waiting == 0)
    return Head(0, np.full(graph.num_tasks, -1), graph.waiting, roots, latencies[roots])


def _begin(
    graph: StepGraph,
    head: Head,
    environment: Environment,
    special: list[bool],
    latencies: list[int],
    launch: Launch,
    actions: list[Done],
) -> list[int]:
    """Schedule the tasks that are ready, and return where the ends of all will be written.

    ``actions`` is filled with what each task's event calls.
    """
    successors = graph.successor_rows
    waiting: list[int] = head.waiting.tolist()
    ends: list[int] = head.ends.tolist()
    queue, numbers = environment.queue, environment.numbers

    def finish(task: int) -> None:
        now = ends[task] = environment.now
        for successor in successors[task]:
            left = waiting[successor] - 1
            if left:
                waiting[successor] = left
            else:  # `environment.call` in line
                event = (actions[successor], successor)
                heappush(queue, (now + latencies[successor], NORMAL, next(numbers), event))

    transfer = partial(launch, finish)
    actions += [transfer if other else finish for other in special]
    for task, due in zip(head.ready.tolist(), head.due.tolist(), strict=True):
        environment.call(due - head.time, actions[task], task)
    return ends
