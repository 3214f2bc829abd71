"""Divisors of whole numbers: what a message names as the nearest degree that would do."""

from math import isqrt


def nearest_divisor(whole: int, value: int) -> int:
    """Return the divisor of ``whole`` nearest to ``value``, the smaller of two.

    >>> nearest_divisor(12, 5), nearest_divisor(12, 8)
    (4, 6)
    """
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return min(small + [whole // d for d in small], key=lambda d: (abs(d - value), d))
