"""Links that concurrent flows share by weighted max-min fairness, on a clock.

A communication is one *bundle*: it moves some bytes over every link it uses, all in
proportion, so that one rate describes it: byte/s on its busiest link. Rates are solved
anew only for the flows that share a link, through others too, with one that starts or ends.

Flows that one link holds up all run at one rate. They share a clock of bytes, as in
generalised processor sharing: a flow is done when that clock has advanced by its bytes,
so a new rate costs the same for any number of flows, and only the next end is an event.

Rates are rounded to 32 bits, and all progress is then counted in whole units, exactly. So what is
symmetric stays symmetric, and a result does not hang on the order of sums: flows that share links
again and again amplify even the last bit of a float.

References
----------
Bertsekas and Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2 (max-min fairness).
Parekh and Gallager, "A generalized processor sharing approach to flow control in integrated
services networks", IEEE/ACM Transactions on Networking 1(3), 1993 (virtual time).
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import frexp, fsum, inf, ldexp
from typing import Protocol

from simulator.bundle import Bundle, bundle, max_min_rates
from simulator.max_min import OWN, fair_groups

__all__ = ["Bundle", "Clock", "Network", "bundle", "max_min_rates"]


_FEW = 32
"""Flows that are solved again without a look at which of them a change can reach."""
_ENDED = -1
"""The goal of flows that have reached it."""
_BITS = 32
"""Significant bits of a rate."""
_UNIT = 2.0**64
"""Units in a byte/s times a tick, so that rounded rates above 2**-32 byte/s are whole."""


@lru_cache(maxsize=65536)
def _whole(rate: float) -> int:
    """Return a rate in units a tick, rounded to `_BITS` bits."""
    mantissa, exponent = frexp(rate)
    return int(ldexp(round(mantissa * 2.0**_BITS), exponent - _BITS) * _UNIT)


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
    """A bundle under way.

    ``bottleneck`` holds it up, and it ends when that has advanced to ``goal``; with ``None`` it
    has been alone so far and ends at tick ``goal``. ``contended`` counts its links with other users.
    """

    __slots__ = ("bottleneck", "bundle", "contended", "done", "goal", "network", "payload", "solo")

    def __init__(self, shape: Bundle, done: Callable[[int], None], payload: int, network: "Network", end: int) -> None:
        self.bundle, self.done, self.payload, self.network = shape, done, payload, network
        self.solo = shape.solo_rate
        self.goal = end
        self.bottleneck: _Bottleneck | None = None
        self.contended = 0

    @property
    def rate(self) -> float:
        """Return byte/s on the busiest link: the solo rate as long as nothing else is known."""
        return (self.bottleneck and self.bottleneck.rate) or self.bundle.solo_rate

    def left(self, now: int) -> int:
        """Return what is still to be moved, in units."""
        held = self.bottleneck
        if held is None:
            return (self.goal - now) * _whole(self.bundle.solo_rate)
        return self.goal - held.progress - held.pace * (now - held.since)

    def arrive(self) -> None:
        """End, if the flow has been alone all the time."""
        if self.bottleneck is None:
            self.network.leave(self)
            self.done(self.payload)


class _Bottleneck:
    """What holds flows up: the ``rate`` of them all, and the ``progress`` each had made at tick ``since``.

    ``pace`` is the rate in whole units a tick.

    ``queue`` has (goal, number, flow), also of flows that have gone since. ``alarm`` is the
    tick of the next call to come; it may be early, and calls at other ticks are void.
    """

    __slots__ = ("alarm", "network", "own", "pace", "progress", "queue", "rate", "since")

    def __init__(self, network: "Network", own: bool = False) -> None:
        self.network, self.own = network, own
        self.rate, self.pace, self.progress, self.since = 0.0, 0, 0, 0
        self.queue: list[tuple[int, int, _Flow]] = []
        self.alarm: int | None = None

    def hold(self, flows: Collection[_Flow], rate: float, now: int) -> None:
        """Let ``flows``, and no others, go on at ``rate``."""
        queue = self.queue
        while queue and (queue[0][2].bottleneck is not self or queue[0][2].goal != queue[0][0]):
            heappop(queue)
        self.progress = self.progress + self.pace * (now - self.since) if queue else 0
        self.rate, self.pace, self.since = rate, _whole(rate), now
        for flow in flows:
            if flow.bottleneck is not self:
                goal = self.progress + flow.left(now)
                flow.bottleneck, flow.goal = self, goal
                heappush(queue, (goal, next(self.network.numbers), flow))
        self._call_at(self._end(queue[0][0]), now)

    def _end(self, goal: int) -> int:
        """Return the first tick at which ``goal`` is reached."""
        return self.since + max(-(-(goal - self.progress) // self.pace), 0)

    def _call_at(self, tick: int, now: int) -> None:
        if self.alarm is None or tick < self.alarm:
            self.alarm = tick
            self.network.clock.call(tick - now, self.ring)

    def ring(self) -> None:
        """End the flows that have reached their goal."""
        now = self.network.clock.now
        if self.alarm != now:
            return
        self.alarm = None
        queue, ended = self.queue, []
        while queue:
            goal, _, flow = queue[0]
            if flow.bottleneck is self and flow.goal == goal:
                end = self._end(goal)
                if end > now:
                    break
                flow.goal = _ENDED
                ended.append(flow)
                self.network.leave(flow)
            heappop(queue)
        if queue and not ended:
            self._call_at(end, now)
        for flow in ended:
            flow.done(flow.payload)


class Network:
    """The bundles under way on a clock; all starts and ends of one instant are solved together.

    Parameters
    ----------
    capacity
        Byte/s of every link.
    """

    def __init__(self, capacity: Sequence[float], clock: Clock) -> None:
        self.clock, self.numbers = clock, count()
        self._capacity = capacity
        self._users: list[dict[_Flow, float]] = [{} for _ in capacity]
        self._bottlenecks = [_Bottleneck(self) for _ in capacity]
        self._unsolved = _Bottleneck(self)
        self._changed: list[_Flow] = []
        self._dirty: dict[int, None] = {}

    def start(self, shape: Bundle, done: Callable[[int], None], payload: int = 0) -> None:
        """Begin to move a bundle; ``done(payload)`` is called when it has arrived."""
        flow = _Flow(shape, done, payload, self, self.clock.now + shape.solo_ticks)
        for link, share in shape.shares:
            users = self._users[link]
            if users:
                self._dirty[link] = None
                flow.contended += 1
                if len(users) == 1:
                    next(iter(users)).contended += 1
            users[flow] = share
        if flow.contended:
            flow.bottleneck, flow.goal = self._unsolved, shape.solo_ticks * _whole(shape.solo_rate)
            self._change(flow)
        else:
            self.clock.call(shape.solo_ticks, flow.arrive)

    def leave(self, flow: _Flow) -> None:
        """Take a flow off its links."""
        for link, _ in flow.bundle.shares:
            users = self._users[link]
            del users[flow]
            if users:
                self._dirty[link] = None
                if len(users) == 1:
                    next(iter(users)).contended -= 1
        if flow.contended:
            self._change(flow)

    def _change(self, flow: _Flow) -> None:
        if not self._changed:
            self.clock.call(0, self._solve, last=True)
        self._changed.append(flow)

    def _solve(self) -> None:
        """Give new rates to the flows that a change can reach."""
        now, dirty = self.clock.now, self._dirty
        if len(dirty) != 1 or not self._simple(next(iter(dirty)), now):
            self._solve_all(now)
        self._changed, self._dirty = [], {}

    def _simple(self, link: int, now: int) -> bool:
        """Give their rate to the flows of a link that share no other and can all go as fast; say if that is so."""
        users = self._users[link]
        if len(users) < 2:
            return False
        rate = self._capacity[link] / fsum(users.values())
        for flow in users:
            if flow.contended > 1 or flow.solo < rate:
                return False
        self._bottlenecks[link].hold(users, rate, now)
        return True

    def _solve_all(self, now: int) -> None:
        seeds = dict[int, None]()
        for link in self._dirty:
            users = self._users[link]
            if len(users) > 1:
                seeds[link] = None
            elif users:
                flow = next(iter(users))
                if flow.contended:
                    seeds[next(other for other, _ in flow.bundle.shares if len(self._users[other]) > 1)] = None
                else:
                    self._let_go(flow, now)
        if seeds:
            self._share(seeds, now)

    def _let_go(self, flow: _Flow, now: int) -> None:
        """Let a flow go on at its solo rate."""
        if flow.bottleneck is self._unsolved:
            flow.bottleneck, flow.goal = None, now + flow.bundle.solo_ticks
            self.clock.call(flow.bundle.solo_ticks, flow.arrive)
        elif flow.bottleneck is not None and not flow.bottleneck.own:
            _Bottleneck(self, own=True).hold((flow,), flow.bundle.solo_rate, now)

    def _share(self, seeds: dict[int, None], now: int) -> None:
        """Give new rates to the flows that share a link with ``seeds``, directly or through others."""
        links, limits = self._reached(seeds, 0.0, _FEW)
        kept: dict[_Flow, float] = {}
        if len(limits) > _FEW:
            level = self._undisturbed()
            links, limits = self._reached(seeds, level, inf)
            kept = {flow: flow.rate for flow in limits if flow.rate < level}
        for link, rate, flows in fair_groups(links, self._users, self._capacity, limits, kept):
            if link != OWN:
                self._bottlenecks[link].hold(flows, rate, now)
            else:
                for flow in flows:
                    self._let_go(flow, now)

    def _reached(self, seeds: dict[int, None], level: float, most: float) -> tuple[list[int], dict[_Flow, float]]:
        """Return links and flows in reach of ``seeds``, flows with their solo rates, and stop at ``most`` flows.

        What flows slower than ``level`` share with others is out of reach.
        """
        users, links, found = self._users, list(seeds), seeds.copy()
        limits: dict[_Flow, float] = {}
        for link in links:
            for flow in users[link]:
                if flow not in limits:
                    limits[flow] = flow.bundle.solo_rate
                    if flow.contended > 1 and (not level or flow.rate >= level):
                        for other, _ in flow.bundle.shares:
                            if other not in found and len(users[other]) > 1:
                                found[other] = None
                                links.append(other)
            if len(limits) > most:
                break
        return links, limits

    def _undisturbed(self) -> float:
        """Return a rate below which flows go on as before.

        Progressive filling takes the same course with and without a flow until it has
        reached that flow's rate: the old rate of one that has ended; of one that starts,
        at least an even part of its narrowest link.
        """
        rates = []
        for flow in self._changed:
            rates.append(flow.rate)
            if flow.bottleneck is self._unsolved:
                rates += [self._capacity[link] / sum(self._users[link].values()) for link, _ in flow.bundle.shares]
        return min(rates)
