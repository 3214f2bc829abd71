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

from meshwise.simulator.program import IntArray, Program

SELF_LIMIT = -1
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
    known_rates: Mapping[F, float],
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
    if not known_rates and len(users[link]) == len(limits) and level <= min(limits.values()):
        return [(link, level, limits.keys())]
    heapify(levels)
    return _fill_links(levels, users, capacity, limits, dict(known_rates))


def _fill_links(
    levels: list[tuple[float, int]],
    users: Users[F],
    capacity: Sequence[float],
    limits: Mapping[F, float],
    rates: dict[F, float],
) -> list[Group[F]]:
    """Return groups by filling links in the order of ``levels``, a heap of lower bounds of the rates that fill them."""
    groups: list[Group[F]] = []
    lowest_limit, flows_by_limit = min(limits.values()), list[F]()
    while len(rates) < len(limits):
        level, link = levels[0] if levels else (inf, SELF_LIMIT)
        if lowest_limit <= level:
            flows_by_limit = flows_by_limit or sorted(limits, key=limits.__getitem__, reverse=True)
            slowest_flow = flows_by_limit.pop()
            if slowest_flow not in rates:
                rates[slowest_flow] = lowest_limit
                groups.append((SELF_LIMIT, lowest_limit, (slowest_flow,)))
            lowest_limit = limits[flows_by_limit[-1]] if flows_by_limit else inf
            continue
        exact_level, rising_flows = _find_level(users[link], capacity[link], rates)
        if rising_flows and exact_level > level:
            # Flows that stopped elsewhere leave room: the link fills later than its bound.
            heapreplace(levels, (exact_level, link))
            continue
        heappop(levels)
        if rising_flows:
            rates.update(dict.fromkeys(rising_flows, level))
            groups.append((link, level, rising_flows))
    return groups


def _find_level(users: Mapping[F, float], capacity: float, rates: Mapping[F, float]) -> tuple[float, list[F]]:
    """Return the rate at which a link is full if ``rates`` stay as they are, and its flows that still rise."""
    # Sums by `fsum` are exact, so that the order of flows does not matter.
    loads = [share * rates[flow] for flow, share in users.items() if flow in rates]
    rising_flows = [flow for flow in users if flow not in rates]
    if not rising_flows:
        return inf, rising_flows
    return (capacity - fsum(loads)) / fsum([users[flow] for flow in rising_flows]), rising_flows


_BITS = 32
"""Significant bits of a rate."""
_UNIT = 2.0**64
"""Units in one byte/s times one tick, so that rounded rates above 2**-32 byte/s are whole numbers of units a tick."""
_DOUBLE_BITS = 53
"""Significant bits of a double."""


@lru_cache(maxsize=65536)
def to_units_per_tick(rate: float) -> int:
    """Return a rate in byte/s, rounded to 32 bits, in whole units per tick.

    >>> to_units_per_tick(3.0) == 3 * 2**64, to_units_per_tick(2.0**40 + 1.0) == to_units_per_tick(2.0**40)
    (True, True)
    """
    mantissa, exponent = frexp(rate)
    return int(ldexp(round(mantissa * 2.0**_BITS), exponent - _BITS) * _UNIT)


def to_units(scaled_size: float) -> int:
    """Return a scaled size in whole units."""
    return int(scaled_size * _UNIT)


def ticks_at(scaled_size: float, rate: float) -> int:
    """Return the ticks in which a transfer of this size ends at a constant rate in byte/s, rounded up.

    >>> ticks_at(10.0, 3.0)
    4
    """
    return -(-to_units(scaled_size) // to_units_per_tick(rate))


def list_ticks_at(scaled_size: NDArray[np.float64], rate: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return `ticks_at` of every pair of a size and a rate; each result is below 2**60.

    Both are a whole number times a power of two, of 53 and of 32 bits. They are divided digit by digit, because 64 bits
    do not hold them shifted to a common power.
    """
    fraction, scale = np.frexp(scaled_size)
    mantissa, exponent = np.frexp(rate)
    dividend = np.ldexp(fraction, _DOUBLE_BITS).astype(np.uint64)
    divisor = np.rint(np.ldexp(mantissa, _BITS)).astype(np.uint64)
    shift = (scale - _DOUBLE_BITS) - (exponent - _BITS)
    quotient, remainder = np.divmod(dividend, divisor)
    for _ in range(2):  # a quotient has 20 bits at least, so 40 more at most
        digit = np.clip(shift, 0, _BITS).astype(np.uint64)
        next_digit, remainder = np.divmod(remainder << digit, divisor)
        quotient, shift = (quotient << digit) + next_digit, shift - digit.astype(np.int64)
    quotient += remainder > 0
    right_shift = np.clip(-shift, 0, 62).astype(np.uint64)
    unit = np.uint64(1)
    result: NDArray[np.int64] = ((quotient + (unit << right_shift) - unit) >> right_shift).astype(np.int64)
    return result


MAX_TICKS = 2**60
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
    scaled_size: float
    solo_ticks: int


class BundleTable(NamedTuple):
    """Bundles in columns: the rows of bundle ``b`` are ``start[b]`` to ``start[b + 1]``, in order of link.

    ``solo_rate``, ``scaled_size`` and ``solo_ticks`` have an entry for every bundle; a bundle without bytes takes no
    time.
    """

    start: NDArray[np.int64]
    link: NDArray[np.int64]
    share: NDArray[np.float64]
    solo_rate: NDArray[np.float64]
    scaled_size: NDArray[np.float64]
    solo_ticks: NDArray[np.int64]

    @property
    def bundle_of_row(self) -> NDArray[np.int64]:
        """The bundle of every row."""
        return np.repeat(np.arange(len(self.solo_rate)), np.diff(self.start))

    def to_bundles(self, row_mask: NDArray[np.bool_]) -> tuple[Bundle, ...]:
        """Return the bundles as objects, with the rows that ``row_mask`` selects."""
        shares = list(zip(self.link[row_mask].tolist(), self.share[row_mask].tolist(), strict=True))
        start = np.append(0, np.cumsum(row_mask))[self.start].tolist()
        columns = (column.tolist() for column in (self.solo_rate, self.scaled_size, self.solo_ticks))
        rows = zip(pairwise(start), *columns, strict=True)
        return tuple([Bundle(tuple(shares[begin:end]), *figures) for (begin, end), *figures in rows])


def build_bundle_table(
    usages: Sequence[Usage], units: Sequence[float], capacity: Sequence[float], ticks_per_second: int
) -> BundleTable:
    """Return the table of bundles that move ``usages`` bytes over links.

    ``units`` has, for each bundle, the bytes of one transfer on its busiest link, because max-min fairness is among
    transfers; 0 stands for a bundle of one transfer.

    Raises
    ------
    ValueError
        If a bundle takes longer than 2**60 ticks alone.
    """
    count = len(usages)
    link, size = (np.array([pair[column] for usage in usages for pair in usage]) for column in (0, 1))
    link, size, owner = link.astype(np.int64), size.astype(np.float64), np.repeat(np.arange(count), [*map(len, usages)])
    keys = (owner * len(capacity) + link)[size > 0]
    order = np.argsort(keys, kind="stable")
    keys, first_rows = keys[order], np.flatnonzero(np.diff(keys[order], prepend=-1))
    # A usage may name a link twice: the bytes are added up.
    size = np.add.reduceat(size[size > 0][order], first_rows) if len(first_rows) else size[:0]
    owner, link = np.divmod(keys[first_rows], max(len(capacity), 1))
    busiest_bytes, seconds = np.zeros(count), np.zeros(count)
    np.maximum.at(busiest_bytes, owner, size)
    np.maximum.at(seconds, owner, size / np.array(capacity, np.float64)[link])
    if seconds.max(initial=0.0) > MAX_TICKS / ticks_per_second:
        raise ValueError(f"a flow takes at most {MAX_TICKS} ticks (13 days), met {seconds.max():.3g} s")
    unit = np.where(np.array(units, np.float64) > 0, units, busiest_bytes)
    rate = np.divide(unit, seconds, out=np.ones(count), where=seconds > 0)
    start = np.append(0, np.cumsum(np.bincount(owner, minlength=count)))
    scaled_size = np.where(seconds > 0, unit, 0.0) * ticks_per_second
    return BundleTable(start, link, size / unit[owner], rate, scaled_size, list_ticks_at(scaled_size, rate))


def find_watched_links(program: Program, table: BundleTable, tenants: Sequence[int]) -> NDArray[np.bool_]:
    """Return for every link whether two flows can be on it at the same time.

    Tasks that all occupy one stream follow each other, so that a link which only they use never has two flows, unless
    one of ``tenants`` uses it too.
    """
    is_watched = ~_find_exclusive(program, table)
    for tenant in tenants:
        is_watched[_flow_links(table, len(program.flows) + tenant)] = True
    return is_watched


def find_shared_flows(table: BundleTable, is_watched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for every flow whether the engine has to simulate when its bytes move: it is on a watched link."""
    return np.bincount(table.bundle_of_row[is_watched[table.link]], minlength=len(table.solo_rate)) > 0


def find_narrow_rows(table: BundleTable, is_watched: NDArray[np.bool_], capacity: Sequence[float]) -> NDArray[np.bool_]:
    """Return a mask of the rows of flows on watched links that can limit them.

    Of several links with the same flows and the same shares, only the narrowest can.

    >>> from meshwise.simulator.engine.flows import build_bundle_table
    >>> bundles = [((0, 8.0), (1, 8.0), (2, 8.0)), ((0, 4.0), (1, 4.0))]
    >>> moved = build_bundle_table(bundles, [0.0] * 2, [4.0, 3.0, 8.0], 1)
    >>> find_narrow_rows(moved, np.array([True] * 3), [4.0, 3.0, 8.0]).tolist()
    [False, True, True, False, True]
    """
    order = np.argsort(table.link, kind="stable")
    order = order[is_watched[table.link[order]]]
    link = table.link[order]
    # Bytes of a link's rows are its key: links with the same flows and shares have equal bytes.
    users = np.stack([table.bundle_of_row[order], table.share[order]], axis=1).tobytes()
    size = len(users) // max(len(order), 1)
    first_rows, last_rows = np.flatnonzero(np.diff(link, prepend=-1)), np.flatnonzero(np.diff(link, append=-1)) + 1
    narrowest_links: dict[bytes, int] = {}
    for index, begin, end in zip(
        link[first_rows].tolist(), (size * first_rows).tolist(), (size * last_rows).tolist(), strict=True
    ):
        rival = narrowest_links.setdefault(users[begin:end], index)
        if capacity[index] < capacity[rival]:
            narrowest_links[users[begin:end]] = index
    is_narrow = np.zeros(len(is_watched), dtype=bool)
    is_narrow[list(narrowest_links.values())] = True
    return is_narrow[table.link]


def find_disturbing_tenants(program: Program, table: BundleTable) -> list[int]:
    """Return the tenants that share a link with a flow of the step, directly or through other tenants."""
    count = len(program.flows)
    is_reached = np.zeros(len(program.links), dtype=bool)
    is_reached[table.link[: table.start[count]]] = True
    candidates = list(range(len(program.background)))
    while True:
        new_tenants = [tenant for tenant in candidates if is_reached[_flow_links(table, count + tenant)].any()]
        if not new_tenants:
            return [tenant for tenant in range(len(program.background)) if tenant not in candidates]
        candidates = [tenant for tenant in candidates if tenant not in new_tenants]
        for tenant in new_tenants:
            is_reached[_flow_links(table, count + tenant)] = True


def _flow_links(table: BundleTable, flow: int) -> IntArray:
    return table.link[table.start[flow] : table.start[flow + 1]]


def _find_exclusive(program: Program, table: BundleTable) -> NDArray[np.bool_]:
    """Return for every link whether all tasks that use it occupy one common stream.

    Only the first and the last stream of a task are compared: of a send they are its two ends. So the answer is never
    wrongly yes.
    """
    users = np.flatnonzero(program.flow_of >= 0)
    rows = table.start[len(program.flows)]
    flow_of_row, link_of = table.bundle_of_row[:rows], table.link[:rows]
    result = np.zeros(len(program.links), dtype=bool)
    for place in (program.stream_start[users], program.stream_start[users + 1] - 1):
        low, high = _find_extremes(program.stream_of[place], program.flow_of[users], len(program.flows))
        minimum, _ = _find_extremes(low[flow_of_row], link_of, len(program.links))
        _, maximum = _find_extremes(high[flow_of_row], link_of, len(program.links))
        result |= maximum <= minimum
    return result


def _find_extremes(values: IntArray, index: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return minimum and maximum of the values of every index; without values the maximum is below the minimum."""
    minimum, maximum = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(minimum, index, values)
    np.maximum.at(maximum, index, values)
    return minimum, maximum
