"""Communications as flows over many links: the fair rates of flows that share links, and the flows that never do.

Rates are max-min fair, by progressive filling: the rates of all flows rise together; when a link is full, the flows on
it stay at their rate while the others rise further. A flow also stops at its own limit.

Rates are rounded to 32 significant bits, so that the progress of transfers can be counted exactly. The rounding hides
the noise of sums of floats: symmetric flows stay symmetric, and no result depends on the order of a sum. At such rates
bytes, ticks and the ends of transfers are whole numbers: a transfer that is alone, one that shares links, and one that
stands for many equal ones end at the same tick. Sizes are in bytes times ticks per second (``scaled_size``), so that a
size divided by a rate is in ticks.

References
----------
Bertsekas and Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from math import frexp, fsum, inf, ldexp
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray, Program, TaskKind

OWN = -1
"""In the place of a link: its own limit holds a flow up."""

F = TypeVar("F", bound=Hashable)
Group = tuple[int, float, Collection[F]]
"""A link, the rate in byte/s to which it limits flows, and these flows."""
Users = Sequence[Mapping[F, float]] | Mapping[int, Mapping[F, float]]
"""For each link, the flows on it with their shares: bytes on the link for one byte of the flow."""


def fair_groups(
    links: Iterable[int],
    users: Users[F],
    capacity: Sequence[float],
    limits: Mapping[F, float],
    kept: Mapping[F, float],
) -> list[Group[F]]:
    """Return the max-min fair rates of flows in byte/s, grouped by the link that limits them.

    ``limits`` has all flows that use ``links``, each with its highest rate; the rates of flows in ``known_rates`` are
    fixed, and are not returned.

    >>> fair_groups([0, 1], [{"a": 1.0, "b": 1.0}, {"b": 0.5}], [10.0, 1.0], {"a": 10.0, "b": 3.0}, {})
    [(1, 2.0, ['b']), (0, 8.0, ['a'])]
    """
    levels = [(capacity[link] / fsum(users[link].values()), link) for link in links]
    level, link = min(levels)
    # The usual case: one link limits all flows.
    if not kept and len(users[link]) == len(limits) and level <= min(limits.values()):
        return [(link, level, limits.keys())]
    heapify(levels)
    return _fill(levels, users, capacity, limits, dict(kept))


def _fill(
    levels: list[tuple[float, int]],
    users: Users[F],
    capacity: Sequence[float],
    limits: Mapping[F, float],
    rates: dict[F, float],
) -> list[Group[F]]:
    """Return groups by filling links in the order of ``levels``, a heap of lower bounds of the rates that fill them."""
    groups: list[Group[F]] = []
    lowest, by_limit = min(limits.values()), list[F]()
    while len(rates) < len(limits):
        level, link = levels[0] if levels else (inf, OWN)
        if lowest <= level:
            by_limit = by_limit or sorted(limits, key=limits.__getitem__, reverse=True)
            slowest = by_limit.pop()
            if slowest not in rates:
                rates[slowest] = lowest
                groups.append((OWN, lowest, (slowest,)))
            lowest = limits[by_limit[-1]] if by_limit else inf
            continue
        exact, rising = _level(users[link], capacity[link], rates)
        if rising and exact > level:
            # Flows that stopped elsewhere leave room: the link fills later than its bound.
            heapreplace(levels, (exact, link))
            continue
        heappop(levels)
        if rising:
            rates.update(dict.fromkeys(rising, level))
            groups.append((link, level, rising))
    return groups


def _level(users: Mapping[F, float], capacity: float, rates: Mapping[F, float]) -> tuple[float, list[F]]:
    """Return the rate at which a link is full if ``rates`` stay as they are, and its flows that still rise."""
    # Sums by `fsum` are exact, so that the order of flows does not matter.
    taken = [share * rates[flow] for flow, share in users.items() if flow in rates]
    rising = [flow for flow in users if flow not in rates]
    if not rising:
        return inf, rising
    return (capacity - fsum(taken)) / fsum([users[flow] for flow in rising]), rising


_BITS = 32
"""Significant bits of a rate."""
_UNIT = 2.0**64
"""Units in one byte/s times one tick, so that rounded rates above 2**-32 byte/s are whole numbers of units a tick."""
_DOUBLE = 53
"""Significant bits of a double."""


@lru_cache(maxsize=65536)
def pace(rate: float) -> int:
    """Return a rate in byte/s, rounded to 32 bits, in whole units per tick.

    >>> pace(3.0) == 3 * 2**64, pace(2.0**40 + 1.0) == pace(2.0**40)
    (True, True)
    """
    mantissa, exponent = frexp(rate)
    return int(ldexp(round(mantissa * 2.0**_BITS), exponent - _BITS) * _UNIT)


def units(moved: float) -> int:
    """Return a scaled size in whole units."""
    return int(moved * _UNIT)


def ticks_at(moved: float, rate: float) -> int:
    """Return the ticks in which a transfer of this size ends at a constant rate in byte/s, rounded up.

    >>> ticks_at(10.0, 3.0)
    4
    """
    return -(-units(moved) // pace(rate))


def ticks_at_each(moved: NDArray[np.float64], rate: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return `ticks_at` of every pair of a size and a rate; each result is below 2**60.

    Both are a whole number times a power of two, of 53 and of 32 bits. They are divided digit by digit, because 64 bits
    do not hold them shifted to a common power.
    """
    fraction, scale = np.frexp(moved)
    mantissa, exponent = np.frexp(rate)
    whole = np.ldexp(fraction, _DOUBLE).astype(np.uint64)
    divisor = np.rint(np.ldexp(mantissa, _BITS)).astype(np.uint64)
    shift = (scale - _DOUBLE) - (exponent - _BITS)
    quotient, rest = np.divmod(whole, divisor)
    for _ in range(2):  # a quotient has 20 bits at least, so 40 more at most
        digit = np.clip(shift, 0, _BITS).astype(np.uint64)
        more, rest = np.divmod(rest << digit, divisor)
        quotient, shift = (quotient << digit) + more, shift - digit.astype(np.int64)
    quotient += rest > 0
    back = np.clip(-shift, 0, 62).astype(np.uint64)
    one = np.uint64(1)
    result: NDArray[np.int64] = ((quotient + (one << back) - one) >> back).astype(np.int64)
    return result


LONGEST = 2**60
"""Most ticks that a bundle may take alone, 13 days, so that sums of ticks fit 64 bits."""

Usage = Sequence[tuple[int, float]]
"""Pairs of a link and the bytes over it."""


class Bundle(NamedTuple):
    """Equal transfers that move at one rate: links, each once, with their shares.

    A share is the bytes on the link for one byte of one transfer on its busiest link; it is above 1 for links on which
    several transfers meet. ``solo_rate`` is the rate of one transfer in byte/s if the bundle is alone, and its highest;
    ``scaled_size`` is the size of one transfer in bytes times ticks per second; ``solo_ticks`` is the time of the
    bundle at ``solo_rate``.
    """

    shares: tuple[tuple[int, float], ...]
    solo_rate: float
    moved: float
    solo_ticks: int


class Shapes(NamedTuple):
    """Bundles in columns: the rows of bundle ``b`` are ``start[b]`` to ``start[b + 1]``, in order of link.

    ``solo_rate``, ``scaled_size`` and ``solo_ticks`` have an entry for every bundle; a bundle without bytes takes no
    time.
    """

    start: NDArray[np.int64]
    link: NDArray[np.int64]
    share: NDArray[np.float64]
    solo_rate: NDArray[np.float64]
    moved: NDArray[np.float64]
    solo_ticks: NDArray[np.int64]

    @property
    def of_row(self) -> NDArray[np.int64]:
        """The bundle of every row."""
        return np.repeat(np.arange(len(self.solo_rate)), np.diff(self.start))

    def bundles(self, kept: NDArray[np.bool_]) -> tuple[Bundle, ...]:
        """Return the bundles as objects, with the rows that ``row_mask`` selects."""
        shares = list(zip(self.link[kept].tolist(), self.share[kept].tolist(), strict=True))
        start = np.append(0, np.cumsum(kept))[self.start].tolist()
        columns = (column.tolist() for column in (self.solo_rate, self.moved, self.solo_ticks))
        own = zip(pairwise(start), *columns, strict=True)
        return tuple([Bundle(tuple(shares[first:last]), *rest) for (first, last), *rest in own])


def shapes(usages: Sequence[Usage], units: Sequence[float], capacity: Sequence[float], ticks_per_second: int) -> Shapes:
    """Return the table of bundles that move ``usages`` bytes over links.

    ``units`` has, for each bundle, the bytes of one transfer on its busiest link, because max-min fairness is among
    transfers; 0 stands for a bundle of one transfer.

    Raises
    ------
    ValueError
        If a bundle takes longer than 2**60 ticks alone.
    """
    count = len(usages)
    link, size = (np.array([pair[place] for usage in usages for pair in usage]) for place in (0, 1))
    link, size, owner = link.astype(np.int64), size.astype(np.float64), np.repeat(np.arange(count), [*map(len, usages)])
    keys = (owner * len(capacity) + link)[size > 0]
    order = np.argsort(keys, kind="stable")
    keys, first = keys[order], np.flatnonzero(np.diff(keys[order], prepend=-1))
    # A usage may name a link twice: the bytes are added up.
    size = np.add.reduceat(size[size > 0][order], first) if len(first) else size[:0]
    owner, link = np.divmod(keys[first], max(len(capacity), 1))
    busiest, seconds = np.zeros(count), np.zeros(count)
    np.maximum.at(busiest, owner, size)
    np.maximum.at(seconds, owner, size / np.array(capacity, np.float64)[link])
    if seconds.max(initial=0.0) > LONGEST / ticks_per_second:
        raise ValueError(f"a flow takes at most {LONGEST} ticks (13 days), met {seconds.max():.3g} s")
    unit = np.where(np.array(units, np.float64) > 0, units, busiest)
    rate = np.divide(unit, seconds, out=np.ones(count), where=seconds > 0)
    start = np.append(0, np.cumsum(np.bincount(owner, minlength=count)))
    moved = np.where(seconds > 0, unit, 0.0) * ticks_per_second
    return Shapes(start, link, size / unit[owner], rate, moved, ticks_at_each(moved, rate))


def bundle(usage: Usage, capacity: Sequence[float], ticks_per_second: int, unit: float = 0.0) -> Bundle:
    """Return a single bundle, as `build_bundle_table` does.

    >>> bundle([(0, 4.0), (1, 2.0)], [2.0, 2.0], 1)
    Bundle(shares=((0, 1.0), (1, 0.5)), solo_rate=2.0, moved=4.0, solo_ticks=2)
    """
    found = shapes([usage], [unit], capacity, ticks_per_second)
    if not len(found.link):
        raise ValueError(f"a bundle moves bytes over at least one link, met usage {tuple(usage)}")
    return found.bundles(np.full(len(found.link), True))[0]


def max_min_rates(bundles: Sequence[Bundle], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every bundle, in byte/s on its busiest link.

    In the example two bundles share a link of 10 byte/s. The second also sends half of its bytes over a link of 1
    byte/s: it gets 2 byte/s, and leaves 8 to the first.

    >>> max_min_rates([Bundle(((0, 1.0),), 10.0, 10.0, 1), Bundle(((0, 1.0), (1, 0.5)), 2.0, 2.0, 1)], [10.0, 1.0])
    [8.0, 2.0]
    """
    users: dict[int, dict[int, float]] = {}
    for index, shape in enumerate(bundles):
        for link, share in shape.shares:
            users.setdefault(link, {})[index] = share
    limits = {index: shape.solo_rate for index, shape in enumerate(bundles)}
    rates = [0.0] * len(bundles)
    for _, rate, group in fair_groups(users, users, capacity, limits, {}) if bundles else ():
        for index in group:
            rates[index] = rate
    return rates


def watched_links(program: Program, moved: Shapes, heard: Sequence[int]) -> NDArray[np.bool_]:
    """Return for every link whether two flows can be on it at the same time.

    Tasks that all occupy one stream follow each other, so that a link which only they use never has two flows, unless
    one of ``tenants`` uses it too.
    """
    watched = ~_exclusive(program, moved)
    for tenant in heard:
        watched[_links(moved, len(program.flows) + tenant)] = True
    return watched


def shared_flows(program: Program, moved: Shapes, watched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for every flow whether the engine has to simulate when its bytes move.

    It has to for flows on watched links, and for data communications if they slow computing.
    """
    shared = np.bincount(moved.of_row[watched[moved.link]], minlength=len(moved.solo_rate)) > 0
    if program.slowdown > 1:
        data = np.array([item.kind is TaskKind.DATA_COMMUNICATION for item in program.work], dtype=bool)
        slowing = program.flow_of[(program.flow_of >= 0) & data[program.work_of]]
        shared[slowing] = np.diff(moved.start)[slowing] > 0
    return shared


def narrow_rows(moved: Shapes, watched: NDArray[np.bool_], capacity: Sequence[float]) -> NDArray[np.bool_]:
    """Return a mask of the rows of flows on watched links that can limit them.

    Of several links with the same flows and the same shares, only the narrowest can.

    >>> from meshwise.simulator.engine.flows import shapes
    >>> moved = shapes([((0, 8.0), (1, 8.0), (2, 8.0)), ((0, 4.0), (1, 4.0))], [0.0] * 2, [4.0, 3.0, 8.0], 1)
    >>> narrow_rows(moved, np.array([True] * 3), [4.0, 3.0, 8.0]).tolist()
    [False, True, True, False, True]
    """
    order = np.argsort(moved.link, kind="stable")
    order = order[watched[moved.link[order]]]
    link = moved.link[order]
    # Bytes of a link's rows are its key: links with the same flows and shares have equal bytes.
    users = np.stack([moved.of_row[order], moved.share[order]], axis=1).tobytes()
    size = len(users) // max(len(order), 1)
    first, last = np.flatnonzero(np.diff(link, prepend=-1)), np.flatnonzero(np.diff(link, append=-1)) + 1
    narrowest: dict[bytes, int] = {}
    for index, begin, end in zip(link[first].tolist(), (size * first).tolist(), (size * last).tolist(), strict=True):
        other = narrowest.setdefault(users[begin:end], index)
        if capacity[index] < capacity[other]:
            narrowest[users[begin:end]] = index
    kept = np.zeros(len(watched), dtype=bool)
    kept[list(narrowest.values())] = True
    return kept[moved.link]


def disturbing(program: Program, moved: Shapes) -> list[int]:
    """Return the tenants that share a link with a flow of the step, directly or through other tenants."""
    count = len(program.flows)
    reached = np.zeros(len(program.links), dtype=bool)
    reached[moved.link[: moved.start[count]]] = True
    left = list(range(len(program.background)))
    while True:
        more = [tenant for tenant in left if reached[_links(moved, count + tenant)].any()]
        if not more:
            return [tenant for tenant in range(len(program.background)) if tenant not in left]
        left = [tenant for tenant in left if tenant not in more]
        for tenant in more:
            reached[_links(moved, count + tenant)] = True


def _links(moved: Shapes, flow: int) -> IntArray:
    return moved.link[moved.start[flow] : moved.start[flow + 1]]


def _exclusive(program: Program, moved: Shapes) -> NDArray[np.bool_]:
    """Return for every link whether all tasks that use it occupy one common stream.

    Only the first and the last stream of a task are compared: of a send they are its two ends. So the answer is never
    wrongly yes.
    """
    users = np.flatnonzero(program.flow_of >= 0)
    rows = moved.start[len(program.flows)]
    flow_of_row, link_of = moved.of_row[:rows], moved.link[:rows]
    result = np.zeros(len(program.links), dtype=bool)
    for place in (program.stream_start[users], program.stream_start[users + 1] - 1):
        low, high = _extremes(program.stream_of[place], program.flow_of[users], len(program.flows))
        least, _ = _extremes(low[flow_of_row], link_of, len(program.links))
        _, most = _extremes(high[flow_of_row], link_of, len(program.links))
        result |= most <= least
    return result


def _extremes(values: IntArray, index: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return minimum and maximum of the values of every index; without values the maximum is below the minimum."""
    least, most = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(least, index, values)
    np.maximum.at(most, index, values)
    return least, most
