"""The reference engine: discrete events on SimPy, one event for each task.

A task's event is scheduled when the last task that it waits for ends. When its latency has passed, a communication over
shared links hands its bytes to the max-min fair `Network`; if communication can slow computing, the `Overlap` does so.
A `TenantFlow` is a flow of another job, which repeats beside the step.

Up to the instant at which the first two transfers meet on a link, events happen exactly when the longest path says. So
a simulation may begin there, with all earlier tasks ended (`fast_forward`).

Computing is slowed while a data communication of its rank class moves bytes. Work is counted in whole parts of a tick,
so that times are exact: with a slowdown of ``p / q``, free computing does ``p`` parts a tick and slowed computing
``q``.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import NORMAL, EventPriority

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.engine.compiled import pays
from meshwise.simulator.engine.contraction import contract, expand_times
from meshwise.simulator.engine.flows import Bundle
from meshwise.simulator.engine.longest_path import Walk, walk
from meshwise.simulator.engine.network import Clock, Network
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, deadlock, start_times
from meshwise.simulator.program import Background, IntArray, Program, TaskKind, expand, no_collection, ragged

LAST = EventPriority(NORMAL + 1)
"""Priority, in SimPy, of events after all others of one instant."""

EVENTS = 10_000
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
            heappush(queue, (self._now, LAST, next(self._eid), (action, argument)))

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
            self._run_some(queue)
        return None

    def _run_some(self, queue: list[Any]) -> None:
        for _ in range(EVENTS):
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


class Tenant:
    """A flow of another tenant that, while the step runs, starts every ``period`` ticks, or at its end if later."""

    def __init__(
        self, shape: Bundle, background: Background, network: Network, clock: Clock, running: Callable[[], bool]
    ) -> None:
        self._shape, self._background = shape, background
        self._network, self._clock, self._running = network, clock, running
        self._started = background.start
        clock.call(background.start, self._begin, 0)

    def _begin(self, _: int) -> None:
        # A tenant stops with the step: else the queue would never be empty.
        if self._running():
            self._started = self._clock.now
            self._clock.call(self._background.latency, self._send, 0)

    def _send(self, _: int) -> None:
        self._network.start(self._shape, self._again, 0)

    def _again(self, _: int) -> None:
        self._clock.call(max(self._started + self._background.period - self._clock.now, 0), self._begin, 0)


def unfinished(ends: Sequence[int], last: list[int]) -> Callable[[], bool]:
    """Return a function that tells whether any of ``final_tasks`` has not ended yet."""

    def running() -> bool:
        # Ended tasks are dropped, so that all calls together cost one pass over the tasks.
        while last and ends[last[-1]] >= 0:
            last.pop()
        return bool(last)

    return running


class Head(NamedTuple):
    """State of a step at tick ``time``: ``ends`` of the tasks that have ended, -1 for all others.

    ``num_waits`` is the number of unfinished tasks for which every task waits. ``ready_tasks`` wait for none; each has
    the tick ``due_ticks`` at which it ends or, if others can disturb it, at which its bytes begin to move.
    """

    time: int
    ends: IntArray
    waiting: IntArray
    ready: IntArray
    due: IntArray


def fast_forward(graph: StepGraph, walk: Walk) -> Head | None:
    """Return the state of a step before transfers first meet; ``None`` if they never do, and the walk is exact."""
    due = walk.starts + graph.latencies
    begin = _last_quiet_tick(graph, due, walk.ends)
    if begin is None:
        return None
    done = due < begin
    ends = np.where(done, walk.ends, -1)
    behind = np.repeat(done, np.diff(graph.successor_start))
    waiting = graph.waiting - np.bincount(graph.successors[behind], minlength=graph.num_tasks)
    ready = np.flatnonzero(~done & (waiting == 0))
    return Head(begin, ends, waiting, ready, due[ready])


def _last_quiet_tick(graph: StepGraph, due: IntArray, ends: IntArray) -> int | None:
    """Return the last tick at which no transfer is under way, before two of them share a link; ``None`` if none do."""
    tasks = np.flatnonzero((graph.flow >= 0) & (ends > due))
    meeting = _first_meeting(graph, tasks, due, ends)
    if meeting is None:
        return None
    order = np.argsort(due[tasks], kind="stable")
    begins, over = due[tasks][order], np.maximum.accumulate(ends[tasks][order])
    quiet = np.append(True, begins[1:] >= over[:-1])
    return int(begins[quiet & (begins <= meeting)].max())


def _first_meeting(graph: StepGraph, tasks: IntArray, due: IntArray, ends: IntArray) -> int | None:
    """Return the first tick at which a transfer begins on a link that another one uses; ``None`` if there is none."""
    link_start, link_of = ragged([[link for link, _ in shape.shares] for shape in graph.bundles])
    row, index = expand(link_start, graph.flow[tasks])
    task, link = tasks[row], link_of[index]
    order = np.lexsort((due[task], link))
    task, link = task[order], np.unique(link[order], return_inverse=True)[1]
    span = int(ends.max(initial=0)) + 1
    if (int(link.max(initial=0)) + 1) * span >= 2**62:
        return 0  # too long to be told apart on one axis
    # Links one after another on a single axis of time: one running maximum serves them all.
    over = np.maximum.accumulate(ends[task] + link * span)
    meets = due[task][1:] + link[1:] * span < over[:-1]
    found = due[task][1:][meets & (link[1:] == link[:-1])]
    return int(found.min()) if len(found) else None


Done = Callable[[int], None]


class _Computing:
    """A task that computes: the parts of its work that remain at ``start_tick``, and the number of its timings."""

    __slots__ = ("done", "left", "rank_class", "since", "task", "version")

    def __init__(self, task: int, rank_class: int, left: int, done: Done) -> None:
        self.task, self.rank_class, self.left, self.done = task, rank_class, left, done
        self.since = self.version = 0


class Overlap:
    """Computing tasks, and data communications that slow them, on a clock.

    Attributes
    ----------
    is_special
        For every task, whether ``launch_task`` begins it.
    latencies
        For every task, the ticks before that.
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
        """Begin the work of a task after its latency; ``on_end`` is called with the task when it has ended."""
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
        """Count a communication that begins or ends, and reschedule the computing of its rank classes."""
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
        """Schedule the end of a task at the present rate."""
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
    """Return for every task that can be slowed its rank class; -1 for all others."""
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
    """Return the rank classes of every data communication, by task."""
    data = np.array([item.kind is TaskKind.DATA_COMMUNICATION for item in program.work], dtype=bool)
    return {
        task: tuple(sorted({program.streams[stream].rank_class for stream in program.streams_of(task)}))
        for task in np.flatnonzero(data[program.work_of]).tolist()
    }


class Launch(Protocol):
    """Function that begins the work of a task after its latency; ``on_end`` is called with the task at its end."""

    def __call__(self, done: Done, task: int) -> None:  # noqa: D102
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
    """Return the end of every task in ticks, -1 for tasks that never start.

    ``slowed_program`` is the program of the graph if its computing can be slowed; ``head`` is the state of the step at
    which the simulation begins.
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
    # Actions refer to the list that holds them: without this the whole graph would wait for the garbage collector.
    actions.clear()
    return np.array(ends, np.int64)


def _transfers(graph: StepGraph, network: Network) -> Launch:
    """Return the function that begins the transfer of a task."""
    bundles, flow, start = graph.bundles, graph.flow.tolist(), network.start

    def launch(done: Done, task: int) -> None:
        start(bundles[flow[task]], done, task)

    return launch


def _nothing(graph: StepGraph, latencies: IntArray) -> Head:
    """Return the state of a step before its first task."""
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
    """Schedule the tasks that are ready, and return the list into which events write the end of every task.

    ``actions`` is filled with the function that each task's event calls.
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
            else:
                # The body of `environment.call`: this loop runs once for each edge of the graph.
                event = (actions[successor], successor)
                heappush(queue, (now + latencies[successor], NORMAL, next(numbers), event))

    transfer = partial(launch, finish)
    actions += [transfer if other else finish for other in special]
    for task, due in zip(head.ready.tolist(), head.due.tolist(), strict=True):
        environment.call(due - head.time, actions[task], task)
    return ends
