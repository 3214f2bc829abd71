"""Rows of different lengths, as one column of where each starts and one of all their values."""

import numpy as np

from simulator.program import IntArray


def expand(start: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """Return for the rows ``chosen`` the place in ``chosen`` and the index of each of their values.

    >>> [column.tolist() for column in expand(np.array([0, 2, 2, 3]), np.array([2, 0]))]
    [[0, 1, 1], [2, 0, 1]]
    """
    first = start[chosen]
    length = start[chosen + 1] - first
    place = np.repeat(np.arange(len(chosen)), length)
    return place, np.arange(len(place)) + np.repeat(first - np.cumsum(length) + length, length)
