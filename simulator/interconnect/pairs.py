"""Ordered pairs of different things, numbered without gaps: what is wired all-to-all."""

import numpy as np

from simulator.interconnect.routes import IntArray


def ordered_pairs(size: int) -> tuple[IntArray, IntArray]:
    """Return the first and the second of every ordered pair of different numbers below ``size``.

    >>> [column.tolist() for column in ordered_pairs(3)]
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    first = np.repeat(np.arange(size), max(size - 1, 0))
    second = np.tile(np.arange(max(size - 1, 0)), size)
    return first, second + (second >= first)


def pair_index(first: IntArray, second: IntArray, size: int) -> IntArray:
    """Return where pairs of different numbers stand in `ordered_pairs`; meaningless where they are equal."""
    return first * (size - 1) + second - (second > first)
