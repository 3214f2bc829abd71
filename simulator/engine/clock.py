"""SimPy's environment as the network and the tenants see it."""

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

LAST = EventPriority(NORMAL + 1)
"""SimPy's priority of events after all others of one instant."""


class _Call:
    """The least that SimPy's queue runs: callbacks, and that it did not fail."""

    __slots__ = ("action", "callbacks")
    _ok = True

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.callbacks: tuple[Callable[[_Call], None], ...] = (_run,)


def _run(call: _Call) -> None:
    call.action()


class EventClock:
    """The time in ticks of a SimPy environment, and calls at a later one."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment

    @property
    def now(self) -> int:
        """Ticks."""
        return self._environment.now  # type: ignore[return-value]

    def call(self, delay: int, action: Callable[[], None], *, last: bool = False) -> None:
        """Call ``action`` after ``delay`` ticks; ``last`` puts it after all others of that instant."""
        event: Any = _Call(action)
        self._environment.schedule(event, LAST if last else NORMAL, delay)
