"""A communication as one flow over many links."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from simulator.max_min import fair_groups


class Bundle(NamedTuple):
    """Links, each once, with the bytes it carries for one byte of one transfer on its busiest link.

    A bundle of several equal transfers has shares above 1 where they meet. ``solo_rate`` is in
    byte/s of one transfer and never passed; ``solo_ticks`` is the time of the bundle at that rate.
    """

    shares: tuple[tuple[int, float], ...]
    solo_rate: float
    solo_ticks: int


def bundle(
    usage: Sequence[tuple[int, float]], capacity: Sequence[float], ticks_per_second: int, unit: float = 0.0
) -> Bundle:
    """Return the bundle that moves ``usage`` bytes over each link, alone at its best rate.

    ``unit`` are the bytes of one of its transfers on that one's busiest link: the rate that max-min
    fairness makes equal is a transfer's. 0 stands for a bundle of one transfer.

    >>> bundle([(0, 4.0), (1, 2.0)], [2.0, 2.0], 1)
    Bundle(shares=((0, 1.0), (1, 0.5)), solo_rate=2.0, solo_ticks=2)
    """
    totals: dict[int, float] = {}
    for link, size in usage:
        totals[link] = totals.get(link, 0.0) + size
    busiest = max(totals.values(), default=0.0)
    if busiest <= 0:
        raise ValueError(f"a bundle moves bytes over at least one link, met usage {tuple(usage)}")
    unit = unit or busiest
    shares = tuple((link, size / unit) for link, size in totals.items() if size > 0)
    seconds = max(size / capacity[link] for link, size in totals.items())
    return Bundle(shares, unit / seconds, ceil(seconds * ticks_per_second))


def max_min_rates(bundles: Sequence[Bundle], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every bundle, in byte/s on its busiest link.

    Two bundles over one link of 10 byte/s get 5 each; the second also uses half its bytes
    on a link of 1 byte/s, so it gets 2 and leaves 8.

    >>> max_min_rates([Bundle(((0, 1.0),), 10.0, 1), Bundle(((0, 1.0), (1, 0.5)), 2.0, 1)], [10.0, 1.0])
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
