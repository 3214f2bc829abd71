"""A network of links that concurrent flows share by weighted max-min fairness, on a clock.

A communication is a *bundle*: it moves bytes over all of its links in proportion, so that one rate describes it, in
byte/s on its busiest link. When a flow starts or ends, rates are solved anew only for flows that share a link with it,
directly or through others.

Flows that one link limits all run at the same rate. They share a clock of bytes, as in generalised processor sharing: a
flow ends when that clock has advanced by its size. So a new rate costs the same for any number of flows, and only the
next end is an event.

Rates are rounded to 32 bits, and all progress is counted in whole units, exactly (`meshwise.simulator.engine.flows`):
flows that share links again and again amplify even the last bit of a float. So no result depends on the order of a sum,
and a bundle of equal transfers takes as many ticks as the transfers one by one.

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
"""Number of flows up to which all are solved anew, without a search for those that a change can reach."""
_ENDED = -1
"""The goal of flows that have ended."""
_PARTS = 2.0**64
"""Parts in a share of 1: shares above 2**-12 are whole numbers of parts, so that their sum is exact in any order."""

T = TypeVar("T")


@lru_cache(maxsize=65536)
def _parts(share: float) -> int:
    return int(share * _PARTS) or 1


class Clock(Protocol):
    """The clock of an engine, as the network needs it: the time, and calls at a later time."""

    @property
    def now(self) -> int:
        """The time in ticks."""
        ...

    def call(self, delay: int, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after ``delay`` ticks."""
        ...

    def call_last(self, action: Callable[[T], None], argument: T) -> None:
        """Call ``action(argument)`` after all other calls of this instant."""
        ...


class _Flow:
    """A bundle under way.

    ``bottleneck`` limits its rate, and the flow ends when the progress of the bottleneck reaches ``goal``. If it is
    ``None``, the flow has been alone since tick ``goal``. ``num_contended`` counts its links with other users.
    """

    __slots__ = ("bottleneck", "bundle", "contended", "done", "goal", "payload")

    def __init__(self, shape: Bundle, done: Callable[[int], None], payload: int, now: int) -> None:
        self.bundle, self.done, self.payload, self.goal = shape, done, payload, now
        self.bottleneck: _Bottleneck | None = None
        self.contended = 0

    @property
    def rate(self) -> float:
        """Byte/s on the busiest link: the solo rate until the network has solved another."""
        return (self.bottleneck and self.bottleneck.rate) or self.bundle.solo_rate

    def left(self, now: int) -> int:
        """Return the units that are still to be moved."""
        held = self.bottleneck
        if held is None:
            return units(self.bundle.moved) - (now - self.goal) * pace(self.bundle.solo_rate)
        return self.goal - held.progress - held.pace * (now - held.since)


class _Bottleneck:
    """A limit that flows share: their common ``rate``, and the ``progress`` of each until ``start_tick``, in units.

    ``units_per_tick`` is the rate in whole units per tick. ``queue`` has (goal, number, flow), also of flows that have
    left since. The next of them ends at tick ``due_tick`` or later. ``alarm`` is the tick of the next valid call of the
    clock, which may be earlier; calls at other ticks are ignored.
    """

    __slots__ = ("alarm", "due", "network", "pace", "progress", "queue", "rate", "since")

    def __init__(self, network: "Network") -> None:
        self.network = network
        self.rate, self.pace, self.progress, self.since = 0.0, 0, 0, 0
        self.queue: list[tuple[int, int, _Flow]] = []
        self.due = 0
        self.alarm: int | None = None

    def hold(self, flows: Iterable[_Flow], rate: float, now: int) -> None:
        """Let ``flows``, and all flows that this limits already, continue at ``rate``."""
        queue = self.queue
        # Flows that left are dropped only here: to remove them from the middle of a heap would cost more.
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
                # The number decides between equal goals, as flows have no order.
                heappush(queue, (goal, next(self.network.numbers), flow))
        # Floor of a negative quotient: the ticks are rounded up.
        due = now - (progress - queue[0][0]) // speed
        self.due = due = due if due > now else now
        if self.alarm is None or due < self.alarm:
            self.alarm = due
            self.network.clock.call(due - now, self.ring, due)

    def ring(self, now: int) -> None:
        """End the flows that have reached their goal."""
        if self.alarm != now:
            return
        # A rate that fell since the call was made puts the next end off: the call is made again.
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
    """A link that flows share: its ``users`` with their shares, whose sum is ``parts``.

    A ``steady`` link limits all of its users but the ``new_users`` that came since. The users that it limits share no
    other link, and ``lowest_limit`` is the lowest of their solo rates. So a change costs the same for any number of
    users. The link is no longer steady when one of them begins to share another link.
    """

    __slots__ = ("capacity", "fresh", "least", "parts", "steady", "users")

    def __init__(self, network: "Network", capacity: float, users: dict[_Flow, float]) -> None:
        super().__init__(network)
        self.capacity, self.users = capacity, users
        self.parts, self.least, self.steady = 0, inf, False
        self.fresh: list[_Flow] = []

    def add(self, flow: _Flow, share: float) -> None:
        """Add a flow to the users of the link."""
        if len(self.users) == 1:
            # A link with a single user kept no account of it.
            ((first, part),) = self.users.items()
            self.parts = _parts(part)
            first.contended += 1
            if first.contended == 2:
                self.network.unsettle(first)
        self.users[flow] = share
        self.parts += _parts(share)
        self.fresh.append(flow)

    def remove(self, flow: _Flow, share: float) -> None:
        """Account for a flow that has left the link to other users."""
        self.parts -= _parts(share)
        if len(self.users) == 1:
            self.steady = False
            next(iter(self.users)).contended -= 1

    def settle(self, now: int) -> bool:
        """Set one rate for all users if this link alone limits them; return whether it does."""
        rate, fresh = self.capacity / (self.parts / _PARTS), self.fresh
        if not self.steady or not (self._even(fresh, self.least, rate) if fresh else self.least >= rate):
            fresh = list(self.users)
            self.steady = self._even(fresh, inf, rate)
        if self.steady:
            self.hold(fresh, rate, now)
        self.fresh.clear()
        return self.steady

    def _even(self, flows: Iterable[_Flow], least: float, rate: float) -> bool:
        """Return whether flows share no other link, and no limit, theirs or ``lowest_limit``, is below ``rate``."""
        for flow in flows:
            if flow.contended > 1:
                return False
            if flow.bundle.solo_rate < least:
                least = flow.bundle.solo_rate
        self.least = least
        return least >= rate


class _Links(dict[int, _Link]):
    """The shared links by index; a link is created when it first has two users."""

    def __init__(self, network: "Network", capacity: Sequence[float], users: Sequence[dict[_Flow, float]]) -> None:
        self._network, self._capacity, self._users = network, capacity, users

    def __missing__(self, index: int) -> _Link:
        link = self[index] = _Link(self._network, self._capacity[index], self._users[index])
        return link


class Network:
    """The network: bundles under way on a clock. All starts and ends of one instant are solved together.

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
        """Begin to move a bundle; ``on_end(payload)`` is called when it has arrived."""
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
        """End a flow if it has been alone all the time; otherwise its bottleneck ends it."""
        if flow.bottleneck is None:
            self.end((flow,), flow.bundle.solo_rate, self.clock.now)

    def end(self, flows: Sequence[_Flow], rate: float, now: int) -> None:
        """Take flows of rate ``rate`` off their links, and call their ``on_end``."""
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
        """Mark the links of a flow, which shares several of them from now on, as no longer steady."""
        for index, _ in flow.bundle.shares:
            if index in self._links:
                self._links[index].steady = False

    def _solve_soon(self, now: int) -> None:
        """Schedule one solution for this instant, after all its starts and ends."""
        if not self._called:
            self._called = True
            self.clock.call_last(self._solve, now)

    def _solve(self, now: int) -> None:
        """Set new rates for the flows that the changes of this instant can reach."""
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
        """Let a flow continue at its solo rate."""
        if flow.bottleneck is self._unsolved:
            flow.bottleneck, flow.goal = None, now
            self.clock.call(flow.bundle.solo_ticks, self._arrive, flow)
        elif isinstance(flow.bottleneck, _Link):
            _Bottleneck(self).hold((flow,), flow.bundle.solo_rate, now)

    def _share(self, seeds: dict[int, None], now: int) -> None:
        """Set new rates for the flows that share the links ``seeds``, directly or through others."""
        # A link may have become steady after it became a seed.
        seeds = {index: None for index in seeds if not self._links[index].steady}
        if not seeds:
            return
        # A few flows are all solved; among many it pays to find those that keep their rate.
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
        """Return the links and flows that are connected to ``seeds``, flows with their solo rates.

        The search does not pass through flows slower than ``level``, and stops beyond ``max_flows`` flows.
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
        """Return a rate in byte/s below which flows continue as before.

        Progressive filling runs the same with and without a flow up to that flow's rate. That is the old rate of a flow
        that has ended; for a flow that starts it is at least its fair part of its narrowest link.
        """
        rates = [self._slowest]
        for flow in self._started:
            rates.append(flow.bundle.solo_rate)
            rates += [self._capacity[link] / fsum(self._users[link].values()) for link, _ in flow.bundle.shares]
        return min(rates)
