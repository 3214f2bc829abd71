"""Rates of 32 bits, so that the progress of transfers is counted exactly.

A rate is rounded to 32 significant bits, which hides the noise of sums of floats: what is symmetric
stays symmetric, and no result hangs on the order of a sum. At such a rate bytes, ticks and the end of
a transfer are whole numbers: one that is alone, one that shares links, and one that stands for many
equal ones are told the same tick.

What is moved is given as bytes times ticks a second, so that divided by a rate it is ticks.
"""

from functools import lru_cache
from math import frexp, ldexp

import numpy as np
from numpy.typing import NDArray

_BITS = 32
"""Significant bits of a rate."""
_UNIT = 2.0**64
"""Units in a byte/s times a tick, so that rounded rates above 2**-32 byte/s are whole."""
_DOUBLE = 53
"""Significant bits of a double."""


@lru_cache(maxsize=65536)
def pace(rate: float) -> int:
    """Return a rate in byte/s, rounded to 32 bits, in units a tick.

    >>> pace(3.0) == 3 * 2**64, pace(2.0**40 + 1.0) == pace(2.0**40)
    (True, True)
    """
    mantissa, exponent = frexp(rate)
    return int(ldexp(round(mantissa * 2.0**_BITS), exponent - _BITS) * _UNIT)


def units(moved: float) -> int:
    """Return what is moved in units."""
    return int(moved * _UNIT)


def ticks_at(moved: float, rate: float) -> int:
    """Return the first tick at which so much is moved at one rate.

    >>> ticks_at(10.0, 3.0)
    4
    """
    return -(-units(moved) // pace(rate))


def ticks_at_each(moved: NDArray[np.float64], rate: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return `ticks_at` of every pair; each is below 2**60.

    Both are a whole number times a power of two: 53 bits over 32, divided digit by digit.
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
