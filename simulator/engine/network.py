"""Links that concurrent flows share by weighted max-min fairness, on a clock.

A communication is one *bundle*: it moves some bytes over every link it uses, all in
proportion, so that one rate describes it: byte/s on its busiest link. Rates are solved
anew only for the flows that share a link, through others too, with one that starts or ends.

Flows that one link holds up all run at one rate. They share a clock of bytes, as in
generalised processor sharing: a flow is done when that clock has advanced by its bytes,
so a new rate costs the same for any number of flows, and only the next end is an event.

Rates are rounded to 32 bits, and all progress is then counted in whole units, exactly
(`meshwise.simulator.engine.flows`): flows that share links again and again amplify even the last bit of a float. So a
result does not hang on the order of sums, and a bundle of equal transfers takes the very ticks that they take one by
one.

References
----------
Bertsekas and Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2 (max-min fairness).
Parekh and Gallager, "A generalized processor sharing approach to flow control in integrated
services networks", IEEE/ACM Transactions on Networking 1(3), 1993 (virtual time).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import fsum, inf
from typing import Protocol, TypeVar

from meshwise.simulator.engine.flows import OWN, Bundle, fair_groups, pace, units

_FEW = 32
"""Flows that are solved again without a look at which of them a change can reach."""
_ENDED = -1
"""The goal of flows that have reached it."""
_PARTS = 2.0**64
"""Parts in a share of 1: shares above 2**-12 are whole, and the sum of all is exact in any order."""

T = TypeVar("T")


@lru_cache(maxsize=65536)
def _parts(share: float) -> int:
    return int(share * _PARTS) or 1


class Clock(Protocol):
    """What the network needs of an engine: the time, and a way to be called later."""

    @property
    def now(self) -> int:
        """Ticks."""
        ...

    def call(self, delay: int, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after ``delay`` ticks."""
        ...

    def call_last(self, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after all other calls of this instant."""
        ...


class _Flow:
    """A bundle under way.

    ``bottleneck`` holds it up, and it ends when that has advanced to ``goal``; with ``None`` it
    has been alone since it began at tick ``goal``. ``contended`` counts its links with other users.
    """

    __slots__ = ("bottleneck", "bundle", "contended", "done", "goal", "payload")

    def __init__(self, shape: Bundle, done: Callable[[int], None], payload: int, now: int) -> None:
        self.bundle, self.done, self.payload, self.goal = shape, done, payload, now
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
            return units(self.bundle.moved) - (now - self.goal) * pace(self.bundle.solo_rate)
        return self.goal - held.progress - held.pace * (now - held.since)


class _Bottleneck:
    """What holds flows up: the ``rate`` of them all, and the ``progress`` each had made at tick ``since``.

    ``pace`` is the rate in whole units a tick.

    ``queue`` has (goal, number, flow), also of flows that have gone since. At tick ``due``, or later,
    the next of them ends. ``alarm`` is the tick of the next call to come; it may be earlier, and calls
    at other ticks are void.
    """

    __slots__ = ("alarm", "due", "network", "pace", "progress", "queue", "rate", "since")

    def __init__(self, network: "Network") -> None:
        self.network = network
        self.rate, self.pace, self.progress, self.since = 0.0, 0, 0, 0
        self.queue: list[tuple[int, int, _Flow]] = []
        self.due = 0
        self.alarm: int | None = None

    def hold(self, flows: Iterable[_Flow], rate: float, now: int) -> None:
        """Let ``flows``, and all that are held up already, go on at ``rate``."""
        queue = self.queue
        while queue:
            goal, _, flow = queue[0]
            if flow.bottleneck is self and flow.goal == goal:
                break
            heappop(queue)
        self.progress = progress = self.progress + self.pace * (now - self.since) if queue else 0
        self.pace = speed = pace(rate)
        self.rate, self.since = rate, now
        for flow in flows:
            if flow.bottleneck is not self:
                goal = progress + flow.left(now)
                flow.bottleneck, flow.goal = self, goal
                heappush(queue, (goal, next(self.network.numbers), flow))
        due = now - (progress - queue[0][0]) // speed
        self.due = due = due if due > now else now
        if self.alarm is None or due < self.alarm:
            self.alarm = due
            self.network.clock.call(due - now, self.ring, due)

    def ring(self, now: int) -> None:
        """End the flows that have reached their goal."""
        if self.alarm != now:
            return
        if self.due > now:
            self.alarm = due = self.due
            self.network.clock.call(due - now, self.ring, due)
            return
        self.alarm = None
        ended: list[_Flow] = []
        queue, reached = self.queue, self.progress + self.pace * (now - self.since)
        while queue:
            goal, _, flow = queue[0]
            if flow.bottleneck is self and flow.goal == goal:
                if goal > reached:
                    break
                flow.goal = _ENDED
                ended.append(flow)
            heappop(queue)
        if ended:
            self.network.end(ended, self.rate, now)
        elif queue:
            self.hold((), self.rate, now)


class _Link(_Bottleneck):
    """A link that flows share: its ``users`` with their shares, of which ``parts`` is the sum.

    A ``steady`` link holds up all users but those in ``fresh``, who came since; those it holds up
    share no other link, and each could go at ``least`` as fast. So a change costs the same for any
    number of users. It is steady no more when one of them begins to share another link.
    """

    __slots__ = ("capacity", "fresh", "least", "parts", "steady", "users")

    def __init__(self, network: "Network", capacity: float, users: dict[_Flow, float]) -> None:
        super().__init__(network)
        self.capacity, self.users = capacity, users
        self.parts, self.least, self.steady = 0, inf, False
        self.fresh: list[_Flow] = []

    def add(self, flow: _Flow, share: float) -> None:
        """Let a flow share the link."""
        if len(self.users) == 1:
            ((first, part),) = self.users.items()
            self.parts = _parts(part)
            first.contended += 1
            if first.contended == 2:
                self.network.unsettle(first)
        self.users[flow] = share
        self.parts += _parts(share)
        self.fresh.append(flow)

    def remove(self, flow: _Flow, share: float) -> None:
        """Take note that a flow has gone, and others are left."""
        self.parts -= _parts(share)
        if len(self.users) == 1:
            self.steady = False
            next(iter(self.users)).contended -= 1

    def settle(self, now: int) -> bool:
        """Let all users go at one rate, if this link alone decides that; say if it does."""
        rate, fresh = self.capacity / (self.parts / _PARTS), self.fresh
        if not self.steady or not (self._even(fresh, self.least, rate) if fresh else self.least >= rate):
            fresh = list(self.users)
            self.steady = self._even(fresh, inf, rate)
        if self.steady:
            self.hold(fresh, rate, now)
        self.fresh.clear()
        return self.steady

    def _even(self, flows: Iterable[_Flow], least: float, rate: float) -> bool:
        """Return whether flows share no other link, and they and those that go at ``least`` can go at ``rate``."""
        for flow in flows:
            if flow.contended > 1:
                return False
            if flow.bundle.solo_rate < least:
                least = flow.bundle.solo_rate
        self.least = least
        return least >= rate


class _Links(dict[int, _Link]):
    """The links that flows share, by index; each is made when two first do."""

    def __init__(self, network: "Network", capacity: Sequence[float], users: Sequence[dict[_Flow, float]]) -> None:
        self._network, self._capacity, self._users = network, capacity, users

    def __missing__(self, index: int) -> _Link:
        link = self[index] = _Link(self._network, self._capacity[index], self._users[index])
        return link


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
        self._links = _Links(self, capacity, self._users)
        self._unsolved = _Bottleneck(self)
        self._dirty: dict[int, _Link] = {}
        self._started: list[_Flow] = []
        self._slowest = inf
        self._called = False

    def start(self, shape: Bundle, done: Callable[[int], None], payload: int = 0) -> None:
        """Begin to move a bundle; ``done(payload)`` is called when it has arrived."""
        now = self.clock.now
        flow = _Flow(shape, done, payload, now)
        for index, share in shape.shares:
            users = self._users[index]
            if users:
                flow.contended += 1
                link = self._dirty[index] = self._links[index]
                link.add(flow, share)
            else:
                users[flow] = share
        if flow.contended:
            flow.bottleneck, flow.goal = self._unsolved, units(shape.moved)
            self._started.append(flow)
            self._solve_soon(now)
        else:
            self.clock.call(shape.solo_ticks, self._arrive, flow)

    def _arrive(self, flow: _Flow) -> None:
        """End a flow, if it has been alone all the time."""
        if flow.bottleneck is None:
            self.end((flow,), flow.bundle.solo_rate, self.clock.now)

    def end(self, flows: Sequence[_Flow], rate: float, now: int) -> None:
        """Take flows that went at ``rate`` off their links."""
        for flow in flows:
            for index, share in flow.bundle.shares:
                users = self._users[index]
                del users[flow]
                if users:
                    link = self._dirty[index] = self._links[index]
                    link.remove(flow, share)
        if self._dirty and rate < self._slowest:
            self._slowest = rate
        for flow in flows:
            flow.done(flow.payload)
        if self._dirty:
            self._solve_soon(now)

    def unsettle(self, flow: _Flow) -> None:
        """Take note that a flow shares several links from now on."""
        for index, _ in flow.bundle.shares:
            if index in self._links:
                self._links[index].steady = False

    def _solve_soon(self, now: int) -> None:
        """Solve when all starts and ends of this instant are known."""
        if not self._called:
            self._called = True
            self.clock.call_last(self._solve, now)

    def _solve(self, now: int) -> None:
        """Give new rates to the flows that a change can reach."""
        seeds: dict[int, None] = {}
        for index, link in self._dirty.items():
            if len(link.users) > 1:
                if not link.settle(now):
                    seeds[index] = None
            elif link.users:
                flow = next(iter(link.users))
                if flow.contended:
                    seeds[next(other for other, _ in flow.bundle.shares if len(self._users[other]) > 1)] = None
                else:
                    self._let_go(flow, now)
        if seeds:
            self._share(seeds, now)
        self._dirty.clear()
        self._started.clear()
        self._slowest, self._called = inf, False

    def _let_go(self, flow: _Flow, now: int) -> None:
        """Let a flow go on at its solo rate."""
        if flow.bottleneck is self._unsolved:
            flow.bottleneck, flow.goal = None, now
            self.clock.call(flow.bundle.solo_ticks, self._arrive, flow)
        elif isinstance(flow.bottleneck, _Link):
            _Bottleneck(self).hold((flow,), flow.bundle.solo_rate, now)

    def _share(self, seeds: dict[int, None], now: int) -> None:
        """Give new rates to the flows that share a link with ``seeds``, directly or through others."""
        seeds = {index: None for index in seeds if not self._links[index].steady}  # settled after it became one
        if not seeds:
            return
        links, limits = self._reached(seeds, 0.0, _FEW)
        kept: dict[_Flow, float] = {}
        if len(limits) > _FEW:
            level = self._undisturbed()
            links, limits = self._reached(seeds, level, inf)
            kept = {flow: flow.rate for flow in limits if flow.rate < level}
        for link, rate, flows in fair_groups(links, self._users, self._capacity, limits, kept):
            if link != OWN:
                self._links[link].hold(flows, rate, now)
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
        rates = [self._slowest]
        for flow in self._started:
            rates.append(flow.bundle.solo_rate)
            rates += [self._capacity[link] / fsum(self._users[link].values()) for link, _ in flow.bundle.shares]
        return min(rates)
