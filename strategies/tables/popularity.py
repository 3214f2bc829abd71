"""How often the rows of a table are looked up: by Zipf's law, row by row of falling popularity.

The row of rank i is looked up with probability ``p_i = i**-s / H(n, s)``, where ``H(n, s)`` is the generalized harmonic
number ``1**-s + 2**-s + .. + n**-s`` [1]_; ``s`` of 0 makes all rows alike. A cache of the most popular rows, which the
least-frequently-used rule keeps once counts have settled, has hits of ``H(c, s) / H(n, s)`` [2]_.

References
----------
.. [1] Zipf 1949, "Human behavior and the principle of least effort"; Knuth, "The art of computer programming",
   volume 1, section 1.2.7 (generalized harmonic numbers), and volume 3, section 6.1 (searches under this law).
.. [2] Breslau et al., "Web caching and Zipf-like distributions: evidence and implications", INFOCOM 1999, section 3
   (the hit rate of the most popular objects under independent requests).
"""

from functools import lru_cache
from math import log, log1p

import numpy as np
from numpy.typing import NDArray

_HEAD = 4096
"""Ranks whose terms are summed one by one; the rest of a sum is an integral with corrections."""
_POINTS = 4001
"""Points of Simpson's rule over the logarithm of the rank."""


@lru_cache(maxsize=1024)
def compute_harmonic(count: int, exponent: float) -> float:
    """Return the generalized harmonic number of ``count`` terms.

    Terms behind the first ones are summed by the Euler-Maclaurin formula up to the third derivative, whose error is
    below one part in 10**15 there.

    >>> compute_harmonic(3, 1.0) == 1 + 1 / 2 + 1 / 3
    True
    """
    head = min(count, _HEAD)
    total = float(np.sum(np.arange(head, 0, -1, dtype=np.float64) ** -exponent))
    if count == head:
        return total
    start, end = float(head), float(count)
    integral = log(end / start) if exponent == 1 else (end ** (1 - exponent) - start ** (1 - exponent)) / (1 - exponent)
    third = exponent * (exponent + 1) * (exponent + 2)
    return float(
        total
        + integral
        + (end**-exponent - start**-exponent) / 2
        - exponent * (end ** (-exponent - 1) - start ** (-exponent - 1)) / 12
        + third * (end ** (-exponent - 3) - start ** (-exponent - 3)) / 720
    )


def compute_hit_rate(num_rows: int, exponent: float, num_cached: int) -> float:
    """Return the share of look-ups that find their row among the ``num_cached`` most popular ones.

    >>> compute_hit_rate(10, 0.0, 4)
    0.4
    """
    return compute_harmonic(num_cached, exponent) / compute_harmonic(num_rows, exponent) if num_cached else 0.0


@lru_cache(maxsize=4096)
def expect_distinct(num_rows: int, exponent: float, num_lookups: int, num_skipped: int = 0) -> float:
    """Return the mean number of different rows that so many independent look-ups find, without the most popular ones.

    It is the sum of ``1 - (1 - p_i)**num_lookups`` over the rows behind the first ``num_skipped``: term by term at the
    head, then the integral between half ranks, by Simpson's rule over the logarithm of the rank.

    >>> expect_distinct(1, 0.0, 5), expect_distinct(2, 0.0, 2)
    (1.0, 1.5)
    """
    if not num_lookups or num_skipped >= num_rows:
        return 0.0
    total = compute_harmonic(num_rows, exponent)

    def find_chance(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the chance that rows of some ranks are looked up."""
        with np.errstate(divide="ignore"):  # a table of one row has no other
            chance: NDArray[np.float64] = -np.expm1(num_lookups * np.log1p(-np.minimum(ranks**-exponent / total, 1.0)))
        return chance

    if exponent == 0:
        share = 1.0 if num_rows == 1 else -float(np.expm1(num_lookups * log1p(-1 / num_rows)))
        return (num_rows - num_skipped) * share
    head = min(num_rows, num_skipped + _HEAD)
    result = float(np.sum(find_chance(np.arange(num_skipped + 1, head + 1, dtype=np.float64))))
    if head == num_rows:
        return result
    logarithms = np.linspace(log(head + 0.5), log(num_rows + 0.5), _POINTS)
    ranks = np.exp(logarithms)
    weights = np.ones(_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    step = (logarithms[-1] - logarithms[0]) / (_POINTS - 1)
    return result + float(np.sum(weights * find_chance(ranks) * ranks) * step / 3)
