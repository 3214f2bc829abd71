"""Links that concurrent transfers share by weighted max-min fairness.

A communication is one *bundle*: it moves some bytes over every port it uses, all in
proportion, so that one rate describes it. The rates are max-min fair in bytes a second
on each bundle's busiest port; they are solved anew only for the bundles that share a
port, through others too, with one that starts or ends.

References
----------
Bertsekas and Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2 (progressive filling).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import ceil
from typing import NamedTuple, Protocol


class Bundle(NamedTuple):
    """Ports with the share of the bundle's bytes each carries (the busiest: 1), and the idle ticks."""

    shares: tuple[tuple[Hashable, float], ...]
    solo_rate: float
    solo_ticks: int


def bundle(
    usage: Sequence[tuple[Hashable, float]], capacity: Mapping[Hashable, float], ticks_per_second: int
) -> Bundle:
    """Return the bundle that moves ``usage`` bytes over each port, alone at its best rate.

    >>> bundle([("a", 4.0), ("b", 2.0)], {"a": 2.0, "b": 2.0}, 1)
    Bundle(shares=(('a', 1.0), ('b', 0.5)), solo_rate=2.0, solo_ticks=2)
    """
    totals: dict[Hashable, float] = {}
    for port, size in usage:
        totals[port] = totals.get(port, 0.0) + size
    busiest = max(totals.values())
    shares = tuple((port, size / busiest) for port, size in totals.items() if size > 0)
    rate = min(capacity[port] / share for port, share in shares)
    return Bundle(shares, rate, ceil(busiest / rate * ticks_per_second))


def max_min_rates(bundles: Sequence[Bundle], capacity: Mapping[Hashable, float]) -> list[float]:
    """Return the max-min fair rate of every bundle, in bytes a second on its busiest port.

    Two bundles over one port of 10 byte/s get 5 each; the second also uses half its bytes
    on a port of 1 byte/s, so it gets 2 and leaves 8.

    >>> thin = Bundle((("wide", 1.0), ("thin", 0.5)), 2.0, 1)
    >>> max_min_rates([Bundle((("wide", 1.0),), 10.0, 1), thin], {"wide": 10.0, "thin": 1.0})
    [8.0, 2.0]
    """
    rates = [0.0] * len(bundles)
    active = set(range(len(bundles)))
    left = {port: capacity[port] for b in bundles for port, _ in b.shares}
    while active:
        load: dict[Hashable, float] = {}
        for index in sorted(active):
            for port, share in bundles[index].shares:
                load[port] = load.get(port, 0.0) + share
        fair = {port: left[port] / weight for port, weight in load.items()}
        level = min(fair.values())
        full = {port for port, value in fair.items() if value <= level * (1 + 1e-12)}
        for index in sorted(active):
            if any(port in full for port, _ in bundles[index].shares):
                rates[index] = level
                active.discard(index)
                for port, share in bundles[index].shares:
                    left[port] = max(left[port] - share * level, 0.0)
    return rates


class Clock(Protocol):
    """What the network needs of an engine: the time, and a way to be called later."""

    @property
    def now(self) -> int:
        """Ticks."""
        ...

    def call(self, delay: int, action: Callable[[], None], *, last: bool = False) -> None:
        """Call ``action`` after ``delay`` ticks; ``last`` puts it after all others of that instant."""
        ...


class _Flow:
    """A bundle on its way: ``remaining`` of its idle ticks, run down at ``speed`` (1 = alone)."""

    __slots__ = ("bundle", "done", "remaining", "since", "speed", "version")

    def __init__(self, shape: Bundle, done: Callable[[], None], now: int) -> None:
        self.bundle, self.done = shape, done
        self.remaining, self.since = float(shape.solo_ticks), now
        self.speed, self.version = 0.0, 0


class Network:
    """The bundles under way on a clock; all starts and ends of one instant are solved together."""

    def __init__(self, capacity: Mapping[Hashable, float], clock: Clock) -> None:
        self._capacity, self._clock = capacity, clock
        self._users: dict[Hashable, dict[_Flow, None]] = {port: {} for port in capacity}
        self._dirty: dict[Hashable, None] = {}

    def start(self, shape: Bundle, done: Callable[[], None]) -> None:
        """Begin to move a bundle; ``done`` is called when it has arrived."""
        flow = _Flow(shape, done, self._clock.now)
        alone = not any(self._users[port] for port, _ in shape.shares)
        for port, _ in shape.shares:
            self._users[port][flow] = None
        if alone:
            self._run(flow, 1.0)
        else:
            self._touch(flow)

    def _touch(self, flow: _Flow) -> None:
        if not self._dirty:
            self._clock.call(0, self._solve, last=True)
        self._dirty |= {port: None for port, _ in flow.bundle.shares}

    def _component(self) -> list[_Flow]:
        """Return the flows that share a port with a change, directly or through others."""
        found: dict[_Flow, None] = {}
        ports, seen = list(self._dirty), dict(self._dirty)
        while ports:
            for flow in self._users[ports.pop()]:
                if flow not in found:
                    found[flow] = None
                    fresh = [port for port, _ in flow.bundle.shares if port not in seen]
                    ports += fresh
                    seen |= dict.fromkeys(fresh)
        return list(found)

    def _solve(self) -> None:
        flows = self._component()
        self._dirty = {}
        rates = max_min_rates([flow.bundle for flow in flows], self._capacity)
        for flow, rate in zip(flows, rates, strict=True):
            speed = min(rate / flow.bundle.solo_rate, 1.0)
            if speed != flow.speed:
                self._run(flow, speed)

    def _run(self, flow: _Flow, speed: float) -> None:
        """Let a flow go on at ``speed``, and call when it will have arrived."""
        now = self._clock.now
        flow.remaining -= flow.speed * (now - flow.since)
        flow.since, flow.speed = now, speed
        flow.version += 1
        version = flow.version
        self._clock.call(max(ceil(flow.remaining / speed), 0), lambda: self._arrive(flow, version))

    def _arrive(self, flow: _Flow, version: int) -> None:
        if version != flow.version:
            return  # its rate has changed since: another call is under way
        for port, _ in flow.bundle.shares:
            del self._users[port][flow]
        if any(self._users[port] for port, _ in flow.bundle.shares):
            self._touch(flow)
        flow.done()
