"""The reference engine: discrete events on SimPy, one event for each task.

A task's event is scheduled when the last task that it waits for ends. When its latency has passed, a communication over
shared links hands its bytes to the max-min fair `Network`. A `TenantFlow` is a flow of another job, which repeats
beside the step.

Up to the instant at which the first two transfers meet on a link, events happen exactly when the longest path says. So
a simulation may begin there, with all earlier tasks ended (`fast_forward`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import simpy
from simpy.events import NORMAL, EventPriority

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.engine.compiled import pays
from meshwise.simulator.engine.contraction import contract_graph, expand_times
from meshwise.simulator.engine.flows import Bundle
from meshwise.simulator.engine.longest_path import Walk, walk_graph
from meshwise.simulator.engine.network import Clock, Network
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, find_deadlock, start_times
from meshwise.simulator.program import Background, IntArray, Program, expand_rows, pause_collection, ragged

LAST_PRIORITY = EventPriority(NORMAL + 1)
"""Priority, in SimPy, of events after all others of one instant."""

EVENTS_PER_CHECK = 10_000
"""Events between two checks of the deadline; they take some hundredths of a second."""

T = TypeVar("T")


class Environment(simpy.Environment):
    """SimPy's environment, in which an event may also be a pair of a function and its argument.

    Such an event costs a third of a SimPy event with callbacks; SimPy's own events work as before.
    """

    now = property(attrgetter("_now"), doc="Ticks.")
    queue = property(attrgetter("_queue"), doc="What is to happen: time, priority, number, event.")
    numbers = property(attrgetter("_eid"), doc="By which events of one time and priority come in turn.")

    def call(self, delay: int, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after ``delay`` ticks."""
        heappush(self.queue, (self._now + delay, NORMAL, next(self._eid), (action, argument)))

    def call_last(self, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after all other events of this instant, or now if there are none."""
        queue: list[Any] = self._queue
        if not queue or queue[0][0] > self._now:
            action(argument)
        else:
            heappush(queue, (self._now, LAST_PRIORITY, next(self._eid), (action, argument)))

    def step(self) -> None:
        """Process the next event."""
        queue: list[Any] = self._queue
        if queue and queue[0][3].__class__ is tuple:
            self._now, _, _, (action, argument) = heappop(queue)
            action(argument)
        else:
            super().step()

    def run(self, until: simpy.core.SimTime | simpy.Event | None = None) -> Any:
        """Process all events, or those up to a time or an event."""
        if until is not None:
            return super().run(until)
        queue: list[Any] = self._queue
        while queue:
            check_deadline()
            self._run_events(queue)
        return None

    def _run_events(self, queue: list[Any]) -> None:
        for _ in range(EVENTS_PER_CHECK):
            if not queue:
                return
            # The body of `step`, without a call for each event.
            self._now, priority, number, event = heappop(queue)
            if event.__class__ is tuple:
                action, argument = event
                action(argument)
            else:
                heappush(queue, (self._now, priority, number, event))
                super().step()


class TenantFlow:
    """A flow of another tenant that, while the step runs, starts every ``period`` ticks, or at its end if later."""

    def __init__(
        self, bundle: Bundle, background: Background, network: Network, clock: Clock, is_running: Callable[[], bool]
    ) -> None:
        self._shape, self._background = bundle, background
        self._network, self._clock, self._is_running = network, clock, is_running
        self._start_tick = background.start
        clock.call(background.start, self._begin_flow, 0)

    def _begin_flow(self, _: int) -> None:
        # A tenant stops with the step: else the queue would never be empty.
        if self._is_running():
            self._start_tick = self._clock.now
            self._clock.call(self._background.latency, self._send_bytes, 0)

    def _send_bytes(self, _: int) -> None:
        self._network.start_flow(self._shape, self._repeat_flow, 0)

    def _repeat_flow(self, _: int) -> None:
        self._clock.call(max(self._start_tick + self._background.period - self._clock.now, 0), self._begin_flow, 0)


def build_running_check(ends: Sequence[int], final_tasks: list[int]) -> Callable[[], bool]:
    """Return a function that tells whether any of ``final_tasks`` has not ended yet."""

    def is_running() -> bool:
        # Ended tasks are dropped, so that all calls together cost one pass over the tasks.
        while final_tasks and ends[final_tasks[-1]] >= 0:
            final_tasks.pop()
        return bool(final_tasks)

    return is_running


class Head(NamedTuple):
    """State of a step at tick ``time``: ``ends`` of the tasks that have ended, -1 for all others.

    ``num_waits`` is the number of unfinished tasks for which every task waits. ``ready_tasks`` wait for none; each has
    the tick ``due_ticks`` at which it ends or, if others can disturb it, at which its bytes begin to move.
    """

    time: int
    ends: IntArray
    num_waits: IntArray
    ready_tasks: IntArray
    due_ticks: IntArray


def fast_forward(graph: StepGraph, walk: Walk) -> Head | None:
    """Return the state of a step before transfers first meet; ``None`` if they never do, and the walk is exact."""
    due_ticks = walk.starts + graph.latencies
    quiet_tick = _find_quiet_tick(graph, due_ticks, walk.ends)
    if quiet_tick is None:
        return None
    is_done = due_ticks < quiet_tick
    ends = np.where(is_done, walk.ends, -1)
    is_released = np.repeat(is_done, np.diff(graph.successor_start))
    num_waits = graph.num_waits - np.bincount(graph.successors[is_released], minlength=graph.num_tasks)
    ready_tasks = np.flatnonzero(~is_done & (num_waits == 0))
    return Head(quiet_tick, ends, num_waits, ready_tasks, due_ticks[ready_tasks])


def _find_quiet_tick(graph: StepGraph, due_ticks: IntArray, ends: IntArray) -> int | None:
    """Return the last tick at which no transfer is under way, before two of them share a link; ``None`` if none do."""
    tasks = np.flatnonzero((graph.flow >= 0) & (ends > due_ticks))
    meeting = _find_meeting(graph, tasks, due_ticks, ends)
    if meeting is None:
        return None
    order = np.argsort(due_ticks[tasks], kind="stable")
    begin_ticks, latest_ends = due_ticks[tasks][order], np.maximum.accumulate(ends[tasks][order])
    is_quiet = np.append(True, begin_ticks[1:] >= latest_ends[:-1])
    return int(begin_ticks[is_quiet & (begin_ticks <= meeting)].max())


def _find_meeting(graph: StepGraph, tasks: IntArray, due_ticks: IntArray, ends: IntArray) -> int | None:
    """Return the first tick at which a transfer begins on a link that another one uses; ``None`` if there is none."""
    link_start, link_of = ragged([[link for link, _ in bundle.shares] for bundle in graph.bundles])
    row, index = expand_rows(link_start, graph.flow[tasks])
    task, link = tasks[row], link_of[index]
    order = np.lexsort((due_ticks[task], link))
    task, link = task[order], np.unique(link[order], return_inverse=True)[1]
    span = int(ends.max(initial=0)) + 1
    if (int(link.max(initial=0)) + 1) * span >= 2**62:
        return 0  # too long to be told apart on one axis
    # Links one after another on a single axis of time: one running maximum serves them all.
    latest_ends = np.maximum.accumulate(ends[task] + link * span)
    meets = due_ticks[task][1:] + link[1:] * span < latest_ends[:-1]
    meeting_ticks = due_ticks[task][1:][meets & (link[1:] == link[:-1])]
    return int(meeting_ticks.min()) if len(meeting_ticks) else None


OnEnd = Callable[[int], None]


class Launch(Protocol):
    """Function that begins the work of a task after its latency; ``on_end`` is called with the task at its end."""

    def __call__(self, on_end: OnEnd, task: int) -> None:  # noqa: D102
        ...


def finish_times(program: Program, *, every_event: bool = False) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks.

    Parts of the step that are known without events are not simulated, with the same result: chains that nothing can
    disturb become one task, and events begin where the first two transfers meet. With ``every_event`` all is simulated.

    Raises
    ------
    Deadlock
        If tasks wait for each other in a cycle, which the message names.
    """
    graph = compile_program(program)
    path = walk_graph(graph)
    if len(path.ends) and path.ends.min() < 0:
        raise find_deadlock(program, graph, path.ends >= 0)
    if graph.tenants or every_event:
        ends = run_graph(graph)
        return start_times(graph, ends), ends
    head = fast_forward(graph, path)
    if head is None:
        return path.starts, path.ends
    contraction = contract_graph(graph, path) if pays(3 * graph.num_tasks) else None
    if contraction is None:
        ends = run_graph(graph, head=head)
        return start_times(graph, ends), ends
    ends = run_graph(contraction.graph, head=fast_forward(contraction.graph, walk_graph(contraction.graph)))
    return expand_times(contraction, start_times(contraction.graph, ends), ends)


@pause_collection()
def run_graph(graph: StepGraph, head: Head | None = None) -> IntArray:
    """Return the end of every task in ticks, -1 for tasks that never start.

    ``head`` is the state of the step at which the simulation begins.
    """
    environment = Environment(initial_time=head.time if head else 0)
    network = Network(graph.capacity, environment)
    actions: list[OnEnd] = []
    ends = _schedule_ready(graph, head or _build_first_head(graph), environment, _build_launch(graph, network), actions)
    is_running = build_running_check(ends, np.flatnonzero(np.diff(graph.successor_start) == 0).tolist())
    for bundle, background in graph.tenants:
        TenantFlow(bundle, background, network, environment, is_running)
    environment.run()
    # Actions refer to the list that holds them, and flows to actions: without this the whole graph would wait for the
    # garbage collector.
    actions.clear()
    network.close()
    return np.array(ends, np.int64)


def _build_launch(graph: StepGraph, network: Network) -> Launch:
    """Return the function that begins the transfer of a task."""
    bundles, flow, start = graph.bundles, graph.flow.tolist(), network.start_flow

    def launch(on_end: OnEnd, task: int) -> None:
        start(bundles[flow[task]], on_end, task)

    return launch


def _build_first_head(graph: StepGraph) -> Head:
    """Return the state of a step before its first task."""
    roots = np.flatnonzero(graph.num_waits == 0)
    return Head(0, np.full(graph.num_tasks, -1), graph.num_waits, roots, graph.latencies[roots])


def _schedule_ready(
    graph: StepGraph, head: Head, environment: Environment, launch: Launch, actions: list[OnEnd]
) -> list[int]:
    """Schedule the tasks that are ready, and return the list into which events write the end of every task.

    ``actions`` is filled with the function that each task's event calls.
    """
    latencies, is_transfer = graph.latency_list, (graph.flow >= 0).tolist()
    successors = graph.successor_rows
    num_waits: list[int] = head.num_waits.tolist()
    ends: list[int] = head.ends.tolist()
    queue, numbers = environment.queue, environment.numbers

    def finish(task: int) -> None:
        now = ends[task] = environment.now
        for successor in successors[task]:
            num_left = num_waits[successor] - 1
            if num_left:
                num_waits[successor] = num_left
            else:
                # The body of `environment.call`: this loop runs once for each edge of the graph.
                event = (actions[successor], successor)
                heappush(queue, (now + latencies[successor], NORMAL, next(numbers), event))

    transfer = partial(launch, finish)
    actions += [transfer if has_bytes else finish for has_bytes in is_transfer]
    for task, due_tick in zip(head.ready_tasks.tolist(), head.due_ticks.tolist(), strict=True):
        environment.call(due_tick - head.time, actions[task], task)
    return ends
