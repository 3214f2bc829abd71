"""Divisors of whole numbers: what a message names as the nearest degree that would do."""

from math import isqrt


def nearest_divisor(whole: int, value: int) -> int:
    """Return the divisor of ``whole`` nearest to ``value``, the smaller of two.

    >>> nearest_divisor(12, 5), nearest_divisor(12, 8)
    (4, 6)
    """
    return min(divisors(whole), key=lambda d: (abs(d - value), d))


def divisors(whole: int) -> list[int]:
    """Return the divisors of ``whole``, rising.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})
