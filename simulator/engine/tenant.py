"""Flows of other jobs, over and over beside the step."""

from collections.abc import Callable, Sequence

from simulator.network import Bundle, Clock, Network
from simulator.program import Background


class Tenant:
    """A flow that starts every ``period`` ticks, or when it has ended if that is later, while the step runs."""

    def __init__(
        self, shape: Bundle, background: Background, network: Network, clock: Clock, running: Callable[[], bool]
    ) -> None:
        self._shape, self._background = shape, background
        self._network, self._clock, self._running = network, clock, running
        self._started = background.start
        clock.call(background.start, self._begin, 0)

    def _begin(self, _: int) -> None:
        if self._running():
            self._started = self._clock.now
            self._clock.call(self._background.latency, self._send, 0)

    def _send(self, _: int) -> None:
        self._network.start(self._shape, self._again, 0)

    def _again(self, _: int) -> None:
        self._clock.call(max(self._started + self._background.period - self._clock.now, 0), self._begin, 0)


def unfinished(ends: Sequence[int], last: list[int]) -> Callable[[], bool]:
    """Return what tells whether any of the tasks ``last`` has not ended yet."""

    def running() -> bool:
        while last and ends[last[-1]] >= 0:
            last.pop()
        return bool(last)

    return running
