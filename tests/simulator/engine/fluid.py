"""Transfers to try the network on, and their ideal ends by a plain fluid model."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from meshwise.simulator.engine.flows import Bundle, Usage, build_bundle_table, fair_groups
from meshwise.simulator.engine.network import Network

LINKS = 5
TICKS = 10**12


class Transfer(NamedTuple):
    """Bytes over each link, from tick ``start`` on."""

    start: int
    usage: tuple[tuple[int, float], ...]


Number = Fraction | float
Rule = Callable[[Sequence[Transfer], Sequence[Number]], list[Number]]
"""From transfers under way and the links' byte/s, byte/s of each transfer on its busiest link."""

capacities = st.lists(st.integers(1, 9), min_size=LINKS, max_size=LINKS)
usages = st.dictionaries(st.integers(0, LINKS - 1), st.integers(1, 9), min_size=1, max_size=3).map(
    lambda usage: tuple(usage.items())
)
transfers = st.lists(
    st.builds(Transfer, st.integers(0, 5).map(lambda second: second * TICKS), usages), min_size=1, max_size=8
)


class HeapClock:
    """The clock of a bare event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._queue: list[tuple[int, bool, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def call(self, delay: int, action: Callable[[Any], None], argument: Any) -> None:
        assert isinstance(delay, int) and delay >= 0
        self._push(self.now + delay, False, action, argument)

    def call_last(self, action: Callable[[Any], None], argument: Any) -> None:
        self._push(self.now, True, action, argument)

    def _push(self, tick: int, last: bool, action: Callable[[Any], None], argument: Any) -> None:
        self._count += 1
        heappush(self._queue, (tick, last, self._count, action, argument))

    def run(self) -> None:
        while self._queue:
            self.now, _, _, action, argument = heappop(self._queue)
            action(argument)


def build_bundle(usage: Usage, capacity: Sequence[float], ticks_per_second: int, unit: float = 0.0) -> Bundle:
    """Return a single bundle, as `build_bundle_table` does.

    >>> build_bundle([(0, 4.0), (1, 2.0)], [2.0, 2.0], 1)
    Bundle(shares=((0, 1.0), (1, 0.5)), solo_rate=2.0, scaled_size=4.0, solo_ticks=2)
    """
    table = build_bundle_table([usage], [unit], capacity, ticks_per_second)
    return table.to_bundles(np.full(len(table.link), True))[0]


def max_min_rates(bundles: Sequence[Bundle], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every bundle, in byte/s on its busiest link.

    In the example two bundles share a link of 10 byte/s. The second also sends half of its bytes over a link of 1
    byte/s: it gets 2 byte/s, and leaves 8 to the first.

    >>> max_min_rates([Bundle(((0, 1.0),), 10.0, 10.0, 1), Bundle(((0, 1.0), (1, 0.5)), 2.0, 2.0, 1)], [10.0, 1.0])
    [8.0, 2.0]
    """
    users: dict[int, dict[int, float]] = {}
    for index, bundle in enumerate(bundles):
        for link, share in bundle.shares:
            users.setdefault(link, {})[index] = share
    limits = {index: bundle.solo_rate for index, bundle in enumerate(bundles)}
    rates = [0.0] * len(bundles)
    for _, rate, group in fair_groups(users, users, capacity, limits, {}) if bundles else ():
        for index in group:
            rates[index] = rate
    return rates


def ends_of(capacity: Sequence[float], started: Sequence[tuple[int, Bundle]]) -> list[int]:
    """Return the tick at which each bundle ends in the network, from the tick at which it starts."""
    clock, ends = HeapClock(), [-1] * len(started)
    network = Network(capacity, clock)

    def done(index: int) -> None:
        assert ends[index] == -1
        ends[index] = clock.now

    for index, (start, shape) in enumerate(started):
        clock.call(start, partial(network.start_flow, shape, done), index)
    clock.run()
    return ends


def network_ends(
    capacity: Sequence[float],
    moved: Sequence[Transfer],
    ticks_per_second: int = TICKS,
) -> list[int]:
    """Return the tick at which each transfer ends in the network."""
    return ends_of(capacity, [(start, build_bundle(usage, capacity, ticks_per_second)) for start, usage in moved])


def fluid_ends(capacity: Sequence[Number], moved: Sequence[Transfer], rule: Rule) -> list[Number]:
    """Return the second at which each transfer ends where ``rule`` sets all rates anew at every start and end."""
    one = capacity[0] / capacity[0]
    starts = [transfer.start * one / TICKS for transfer in moved]
    left = [max(size for _, size in transfer.usage) * one for transfer in moved]
    ends: list[Number] = [-one] * len(moved)
    now, waiting = min(starts), sorted(range(len(moved)), key=lambda index: -starts[index])
    active: list[int] = []
    while active or waiting:
        while waiting and starts[waiting[-1]] <= now:
            active.append(waiting.pop())
        rates = rule([moved[index] for index in active], capacity)
        steps = [left[index] / rate for index, rate in zip(active, rates, strict=True)]
        step = min([*steps, *(starts[index] - now for index in waiting[-1:])])
        now += step
        for index, rate in zip(active, rates, strict=True):
            left[index] -= rate * step
            if left[index] <= rate * 1e-13:
                ends[index] = now
        active = [index for index in active if ends[index] < 0]
    return ends


def max_min(moved: Sequence[Transfer], capacity: Sequence[Number]) -> list[Number]:
    """Raise all rates together; those on a full link stay."""
    shares = [[(link, size / max(s for _, s in usage)) for link, size in usage] for _, usage in moved]
    rates: list[Number | None] = [None] * len(moved)
    while None in rates:
        left, load = list(capacity), [0 * capacity[0]] * len(capacity)
        for rate, flow in zip(rates, shares, strict=True):
            for link, share in flow:
                if rate is None:
                    load[link] += share
                else:
                    left[link] -= share * rate
        level, full = min((left[link] / load[link], link) for link in range(len(capacity)) if load[link])
        for index, flow in enumerate(shares):
            if rates[index] is None and full in dict(flow):
                rates[index] = level
    return [rate for rate in rates if rate is not None]


def equal_split(moved: Sequence[Transfer], capacity: Sequence[Number]) -> list[Number]:
    """Give every transfer an equal part of each link, and let no other use what it leaves."""
    users = [sum(link in dict(usage) for _, usage in moved) for link in range(len(capacity))]
    return [min(capacity[link] / users[link] for link, _ in usage) for _, usage in moved]


def exact(numbers: Sequence[int]) -> list[Fraction]:
    """Return numbers with which arithmetic is exact."""
    return [Fraction(number) for number in numbers]
