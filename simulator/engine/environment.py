"""SimPy's environment for events that do no more than call back."""

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, TypeVar

import simpy
from simpy.events import NORMAL, EventPriority

from simulator.deadline import check_deadline

LAST = EventPriority(NORMAL + 1)
"""SimPy's priority of events after all others of one instant."""

EVENTS = 10_000
"""Events that happen, in some hundredths of a second, before the deadline is looked at."""

T = TypeVar("T")


class Environment(simpy.Environment):
    """SimPy's clock, queue and order, in which an event may be a pair: what is called, and with what.

    Such an event costs a third of one with callbacks; SimPy's own events work beside it as ever.
    """

    now = property(attrgetter("_now"), doc="Ticks.")
    queue = property(attrgetter("_queue"), doc="What is to happen: time, priority, number, event.")
    numbers = property(attrgetter("_eid"), doc="By which events of one time and priority come in turn.")

    def call(self, delay: int, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after ``delay`` ticks."""
        heappush(self.queue, (self._now + delay, NORMAL, next(self._eid), (action, argument)))

    def call_last(self, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after all other events of this instant: now, where none is left."""
        queue: list[Any] = self._queue
        if not queue or queue[0][0] > self._now:
            action(argument)
        else:
            heappush(queue, (self._now, LAST, next(self._eid), (action, argument)))

    def step(self) -> None:
        """Let the next event happen."""
        queue: list[Any] = self._queue
        if queue and queue[0][3].__class__ is tuple:
            self._now, _, _, (action, argument) = heappop(queue)
            action(argument)
        else:
            super().step()

    def run(self, until: simpy.core.SimTime | simpy.Event | None = None) -> Any:
        """Let events happen: all, or up to a time or an event."""
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
            self._now, priority, number, event = heappop(queue)
            if event.__class__ is tuple:
                action, argument = event
                action(argument)
            else:
                heappush(queue, (self._now, priority, number, event))
                super().step()
