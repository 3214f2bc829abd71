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

from meshwise.simulator.engine.flows import SELF_LIMIT, Bundle, fair_groups, to_units, to_units_per_tick

_FEW = 32
"""Number of flows up to which all are solved anew, without a search for those that a change can reach."""
_ENDED_GOAL = -1
"""The goal of flows that have ended."""
_PARTS = 2.0**64
"""Parts in a share of 1: shares above 2**-12 are whole numbers of parts, so that their sum is exact in any order."""

T = TypeVar("T")


@lru_cache(maxsize=65536)
def _to_parts(share: float) -> int:
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

    __slots__ = ("bottleneck", "bundle", "goal", "num_contended", "on_end", "payload")

    def __init__(self, bundle: Bundle, on_end: Callable[[int], None], payload: int, now: int) -> None:
        self.bundle, self.on_end, self.payload, self.goal = bundle, on_end, payload, now
        self.bottleneck: _Bottleneck | None = None
        self.num_contended = 0

    @property
    def rate(self) -> float:
        """Byte/s on the busiest link: the solo rate until the network has solved another."""
        return (self.bottleneck and self.bottleneck.rate) or self.bundle.solo_rate

    def remaining_units(self, now: int) -> int:
        """Return the units that are still to be moved."""
        bottleneck = self.bottleneck
        if bottleneck is None:
            return to_units(self.bundle.scaled_size) - (now - self.goal) * to_units_per_tick(self.bundle.solo_rate)
        return self.goal - bottleneck.progress - bottleneck.units_per_tick * (now - bottleneck.start_tick)


class _Bottleneck:
    """A limit that flows share: their common ``rate``, and the ``progress`` of each until ``start_tick``, in units.

    ``units_per_tick`` is the rate in whole units per tick. ``queue`` has (goal, number, flow), also of flows that have
    left since. The next of them ends at tick ``due_tick`` or later. ``alarm`` is the tick of the next valid call of the
    clock, which may be earlier; calls at other ticks are ignored.
    """

    __slots__ = ("alarm", "due_tick", "network", "progress", "queue", "rate", "start_tick", "units_per_tick")

    def __init__(self, network: "Network") -> None:
        self.network = network
        self.rate, self.units_per_tick, self.progress, self.start_tick = 0.0, 0, 0, 0
        self.queue: list[tuple[int, int, _Flow]] = []
        self.due_tick = 0
        self.alarm: int | None = None

    def hold_flows(self, flows: Iterable[_Flow], rate: float, now: int) -> None:
        """Let ``flows``, and all flows that this limits already, continue at ``rate``."""
        queue = self.queue
        # Flows that left are dropped only here: to remove them from the middle of a heap would cost more.
        while queue:
            goal, _, flow = queue[0]
            if flow.bottleneck is self and flow.goal == goal:
                break
            heappop(queue)
        self.progress = progress = self.progress + self.units_per_tick * (now - self.start_tick) if queue else 0
        self.units_per_tick = units_per_tick = to_units_per_tick(rate)
        self.rate, self.start_tick = rate, now
        for flow in flows:
            if flow.bottleneck is not self:
                goal = progress + flow.remaining_units(now)
                flow.bottleneck, flow.goal = self, goal
                # The number decides between equal goals, as flows have no order.
                heappush(queue, (goal, next(self.network.numbers), flow))
        # Floor of a negative quotient: the ticks are rounded up.
        due_tick = now - (progress - queue[0][0]) // units_per_tick
        self.due_tick = due_tick = due_tick if due_tick > now else now
        if self.alarm is None or due_tick < self.alarm:
            self.alarm = due_tick
            self.network.clock.call(due_tick - now, self.end_due_flows, due_tick)

    def end_due_flows(self, now: int) -> None:
        """End the flows that have reached their goal."""
        if self.alarm != now:
            return
        # A rate that fell since the call was made puts the next end off: the call is made again.
        if self.due_tick > now:
            self.alarm = due_tick = self.due_tick
            self.network.clock.call(due_tick - now, self.end_due_flows, due_tick)
            return
        self.alarm = None
        ended_flows: list[_Flow] = []
        queue, progress = self.queue, self.progress + self.units_per_tick * (now - self.start_tick)
        while queue:
            goal, _, flow = queue[0]
            if flow.bottleneck is self and flow.goal == goal:
                if goal > progress:
                    break
                flow.goal = _ENDED_GOAL
                ended_flows.append(flow)
            heappop(queue)
        if ended_flows:
            self.network.end_flows(ended_flows, self.rate, now)
        elif queue:
            self.hold_flows((), self.rate, now)


class _Link(_Bottleneck):
    """A link that flows share: its ``users`` with their shares, whose sum is ``parts``.

    A ``steady`` link limits all of its users but the ``new_users`` that came since. The users that it limits share no
    other link, and ``lowest_limit`` is the lowest of their solo rates. So a change costs the same for any number of
    users. The link is no longer steady when one of them begins to share another link.
    """

    __slots__ = ("capacity", "lowest_limit", "new_users", "parts", "steady", "users")

    def __init__(self, network: "Network", capacity: float, users: dict[_Flow, float]) -> None:
        super().__init__(network)
        self.capacity, self.users = capacity, users
        self.parts, self.lowest_limit, self.steady = 0, inf, False
        self.new_users: list[_Flow] = []

    def add_flow(self, flow: _Flow, share: float) -> None:
        """Add a flow to the users of the link."""
        if len(self.users) == 1:
            # A link with a single user kept no account of it.
            ((first_flow, part),) = self.users.items()
            self.parts = _to_parts(part)
            first_flow.num_contended += 1
            if first_flow.num_contended == 2:
                self.network.unsettle_links(first_flow)
        self.users[flow] = share
        self.parts += _to_parts(share)
        self.new_users.append(flow)

    def remove_flow(self, share: float) -> None:
        """Account for a flow that has left the link to other users."""
        self.parts -= _to_parts(share)
        if len(self.users) == 1:
            self.steady = False
            next(iter(self.users)).num_contended -= 1

    def settle_rate(self, now: int) -> bool:
        """Set one rate for all users if this link alone limits them; return whether it does."""
        rate, new_users = self.capacity / (self.parts / _PARTS), self.new_users
        if not self.steady or not (
            self._can_share(new_users, self.lowest_limit, rate) if new_users else self.lowest_limit >= rate
        ):
            new_users = list(self.users)
            self.steady = self._can_share(new_users, inf, rate)
        if self.steady:
            self.hold_flows(new_users, rate, now)
        self.new_users.clear()
        return self.steady

    def _can_share(self, flows: Iterable[_Flow], lowest_limit: float, rate: float) -> bool:
        """Return whether flows share no other link, and no limit, theirs or ``lowest_limit``, is below ``rate``."""
        for flow in flows:
            if flow.num_contended > 1:
                return False
            if flow.bundle.solo_rate < lowest_limit:
                lowest_limit = flow.bundle.solo_rate
        self.lowest_limit = lowest_limit
        return lowest_limit >= rate


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
        self._no_bottleneck = _Bottleneck(self)
        self._dirty_links: dict[int, _Link] = {}
        self._new_flows: list[_Flow] = []
        self._lowest_rate = inf
        self._is_scheduled = False

    def start_flow(self, bundle: Bundle, on_end: Callable[[int], None], payload: int = 0) -> None:
        """Begin to move a bundle; ``on_end(payload)`` is called when it has arrived."""
        now = self.clock.now
        flow = _Flow(bundle, on_end, payload, now)
        for index, share in bundle.shares:
            users = self._users[index]
            if users:
                flow.num_contended += 1
                link = self._dirty_links[index] = self._links[index]
                link.add_flow(flow, share)
            else:
                users[flow] = share
        if flow.num_contended:
            flow.bottleneck, flow.goal = self._no_bottleneck, to_units(bundle.scaled_size)
            self._new_flows.append(flow)
            self._schedule_solve(now)
        else:
            self.clock.call(bundle.solo_ticks, self._end_solo_flow, flow)

    def close(self) -> None:
        """Let go of all flows: links, which refer to the network, have some in their queues that left or ended."""
        for link in self._links.values():
            link.queue.clear()
        self._links.clear()

    def _end_solo_flow(self, flow: _Flow) -> None:
        """End a flow if it has been alone all the time; otherwise its bottleneck ends it."""
        if flow.bottleneck is None:
            self.end_flows((flow,), flow.bundle.solo_rate, self.clock.now)

    def end_flows(self, flows: Sequence[_Flow], rate: float, now: int) -> None:
        """Take flows of rate ``rate`` off their links, and call their ``on_end``."""
        for flow in flows:
            for index, share in flow.bundle.shares:
                users = self._users[index]
                del users[flow]
                if users:
                    link = self._dirty_links[index] = self._links[index]
                    link.remove_flow(share)
        if self._dirty_links and rate < self._lowest_rate:
            self._lowest_rate = rate
        for flow in flows:
            flow.on_end(flow.payload)
        if self._dirty_links:
            self._schedule_solve(now)

    def unsettle_links(self, flow: _Flow) -> None:
        """Mark the links of a flow, which shares several of them from now on, as no longer steady."""
        for index, _ in flow.bundle.shares:
            if index in self._links:
                self._links[index].steady = False

    def _schedule_solve(self, now: int) -> None:
        """Schedule one solution for this instant, after all its starts and ends."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self.clock.call_last(self._solve, now)

    def _solve(self, now: int) -> None:
        """Set new rates for the flows that the changes of this instant can reach."""
        seeds: dict[int, None] = {}
        for index, link in self._dirty_links.items():
            if len(link.users) > 1:
                if not link.settle_rate(now):
                    seeds[index] = None
            elif link.users:
                flow = next(iter(link.users))
                if flow.num_contended:
                    seeds[
                        next(shared_link for shared_link, _ in flow.bundle.shares if len(self._users[shared_link]) > 1)
                    ] = None
                else:
                    self._release_flow(flow, now)
        if seeds:
            self._share_links(seeds, now)
        self._dirty_links.clear()
        self._new_flows.clear()
        self._lowest_rate, self._is_scheduled = inf, False

    def _release_flow(self, flow: _Flow, now: int) -> None:
        """Let a flow continue at its solo rate."""
        if flow.bottleneck is self._no_bottleneck:
            flow.bottleneck, flow.goal = None, now
            self.clock.call(flow.bundle.solo_ticks, self._end_solo_flow, flow)
        elif isinstance(flow.bottleneck, _Link):
            _Bottleneck(self).hold_flows((flow,), flow.bundle.solo_rate, now)

    def _share_links(self, seeds: dict[int, None], now: int) -> None:
        """Set new rates for the flows that share the links ``seeds``, directly or through others."""
        # A link may have become steady after it became a seed.
        seeds = {index: None for index in seeds if not self._links[index].steady}
        if not seeds:
            return
        # A few flows are all solved; among many it pays to find those that keep their rate.
        links, limits = self._find_reachable(seeds, 0.0, _FEW)
        known_rates: dict[_Flow, float] = {}
        if len(limits) > _FEW:
            level = self._undisturbed_rate()
            links, limits = self._find_reachable(seeds, level, inf)
            known_rates = {flow: flow.rate for flow in limits if flow.rate < level}
        for link, rate, flows in fair_groups(links, self._users, self._capacity, limits, known_rates):
            if link != SELF_LIMIT:
                self._links[link].hold_flows(flows, rate, now)
            else:
                for flow in flows:
                    self._release_flow(flow, now)

    def _find_reachable(
        self, seeds: dict[int, None], level: float, max_flows: float
    ) -> tuple[list[int], dict[_Flow, float]]:
        """Return the links and flows that are connected to ``seeds``, flows with their solo rates.

        The search does not pass through flows slower than ``level``, and stops beyond ``max_flows`` flows.
        """
        users, links, visited_links = self._users, list(seeds), seeds.copy()
        limits: dict[_Flow, float] = {}
        for link in links:
            for flow in users[link]:
                if flow not in limits:
                    limits[flow] = flow.bundle.solo_rate
                    if flow.num_contended > 1 and (not level or flow.rate >= level):
                        for neighbour, _ in flow.bundle.shares:
                            if neighbour not in visited_links and len(users[neighbour]) > 1:
                                visited_links[neighbour] = None
                                links.append(neighbour)
            if len(limits) > max_flows:
                break
        return links, limits

    def _undisturbed_rate(self) -> float:
        """Return a rate in byte/s below which flows continue as before.

        Progressive filling runs the same with and without a flow up to that flow's rate. That is the old rate of a flow
        that has ended; for a flow that starts it is at least its fair part of its narrowest link.
        """
        rates = [self._lowest_rate]
        for flow in self._new_flows:
            rates.append(flow.bundle.solo_rate)
            rates += [self._capacity[link] / fsum(self._users[link].values()) for link, _ in flow.bundle.shares]
        return min(rates)
