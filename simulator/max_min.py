"""Weighted max-min fair rates by progressive filling.

All flows speed up together; when a link is full, the flows on it stay at that rate, and
the others go on. A flow also stops at its own limit.

References
----------
Bertsekas and Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import fsum, inf
from typing import TypeVar

OWN = -1
"""In the place of a link: a flow is held up by its own limit."""

F = TypeVar("F", bound=Hashable)
Group = tuple[int, float, Collection[F]]
"""The link that holds flows up, the one rate they all get, and the flows."""
Users = Sequence[Mapping[F, float]] | Mapping[int, Mapping[F, float]]
"""Of each link, the flows on it with their shares: bytes on the link for one byte of the flow."""


def fair_groups(
    links: Iterable[int],
    users: Users[F],
    capacity: Sequence[float],
    limits: Mapping[F, float],
    kept: Mapping[F, float],
) -> list[Group[F]]:
    """Return the max-min fair rates of flows, in byte/s, by what holds them up.

    ``limits`` names all flows that use ``links``, each with the rate it cannot pass;
    those in ``kept`` already have their rate.

    >>> fair_groups([0, 1], [{"a": 1.0, "b": 1.0}, {"b": 0.5}], [10.0, 1.0], {"a": 10.0, "b": 3.0}, {})
    [(1, 2.0, ['b']), (0, 8.0, ['a'])]
    """
    levels = [(capacity[link] / fsum(users[link].values()), link) for link in links]
    level, link = min(levels)
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
    """Fill links in the order of ``levels``: a heap of rates at which, at the earliest, each is full."""
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
            heapreplace(levels, (exact, link))
            continue
        heappop(levels)
        if rising:
            rates.update(dict.fromkeys(rising, level))
            groups.append((link, level, rising))
    return groups


def _level(users: Mapping[F, float], capacity: float, rates: Mapping[F, float]) -> tuple[float, list[F]]:
    """Return the rate at which a link is full while ``rates`` stay, and its flows that still rise."""
    taken = [share * rates[flow] for flow, share in users.items() if flow in rates]
    rising = [flow for flow in users if flow not in rates]
    if not rising:
        return inf, rising
    return (capacity - fsum(taken)) / fsum([users[flow] for flow in rising]), rising
