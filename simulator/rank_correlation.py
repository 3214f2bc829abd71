"""Rank correlation: how well two orders of the same items agree."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-a of pairs of scores: 1 for the same order, -1 for the opposite one, 0 for no pairs.

    Source: Kendall 1938, "A new measure of rank correlation".

    >>> kendall_tau([(1, 1), (2, 3), (3, 2)])
    0.333333333333
    """
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return round(fmean(signs), 12) if signs else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
