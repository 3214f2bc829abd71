"""A communication as one flow over many links."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.max_min import fair_groups
from simulator.pace import ticks_at_each

LONGEST = 2**60
"""Ticks that a bundle may take alone, 13 days, so that sums of ticks fit 64 bits."""

Usage = Sequence[tuple[int, float]]
"""Links and the bytes over each."""


class Bundle(NamedTuple):
    """Links, each once, with the bytes it carries for one byte of one transfer on its busiest link.

    A bundle of several equal transfers has shares above 1 where they meet. ``solo_rate`` is in
    byte/s of one transfer and never passed; ``moved`` are the bytes of one transfer, times the ticks
    of a second; ``solo_ticks`` is the time of the bundle at that rate.
    """

    shares: tuple[tuple[int, float], ...]
    solo_rate: float
    moved: float
    solo_ticks: int


class Shapes(NamedTuple):
    """Many bundles in columns: ``rows`` of bundle ``b`` are ``start[b]`` to ``start[b + 1]``, by link, each one once.

    ``solo_rate``, ``moved`` and ``solo_ticks`` are those of every bundle; one that moves nothing takes no time.
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
        """Return the bundles with only those rows that are ``kept``."""
        shares = list(zip(self.link[kept].tolist(), self.share[kept].tolist(), strict=True))
        start = np.append(0, np.cumsum(kept))[self.start].tolist()
        columns = (column.tolist() for column in (self.solo_rate, self.moved, self.solo_ticks))
        own = zip(pairwise(start), *columns, strict=True)
        return tuple([Bundle(tuple(shares[first:last]), *rest) for (first, last), *rest in own])


def shapes(usages: Sequence[Usage], units: Sequence[float], capacity: Sequence[float], ticks_per_second: int) -> Shapes:
    """Return the bundles that move ``usages`` bytes over links, each alone at its best rate.

    ``units`` are the bytes of one of a bundle's transfers on that one's busiest link: the rate that max-min
    fairness makes equal is a transfer's. 0 stands for a bundle of one transfer.

    Raises
    ------
    ValueError
        Where one alone takes longer than 2**60 ticks.
    """
    count = len(usages)
    link, size = (np.array([pair[place] for usage in usages for pair in usage]) for place in (0, 1))
    link, size, owner = link.astype(np.int64), size.astype(np.float64), np.repeat(np.arange(count), [*map(len, usages)])
    keys = (owner * len(capacity) + link)[size > 0]
    order = np.argsort(keys, kind="stable")
    keys, first = keys[order], np.flatnonzero(np.diff(keys[order], prepend=-1))
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
    """Return one bundle of `shapes`.

    >>> bundle([(0, 4.0), (1, 2.0)], [2.0, 2.0], 1)
    Bundle(shares=((0, 1.0), (1, 0.5)), solo_rate=2.0, moved=4.0, solo_ticks=2)
    """
    found = shapes([usage], [unit], capacity, ticks_per_second)
    if not len(found.link):
        raise ValueError(f"a bundle moves bytes over at least one link, met usage {tuple(usage)}")
    return found.bundles(np.full(len(found.link), True))[0]


def max_min_rates(bundles: Sequence[Bundle], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every bundle, in byte/s on its busiest link.

    Two bundles over one link of 10 byte/s get 5 each; the second also uses half its bytes
    on a link of 1 byte/s, so it gets 2 and leaves 8.

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
