"""Which of many partial choices no other beats in everything that counts."""

import numpy as np
from numpy.typing import NDArray

from strategies.operators.cost_graph import MOST, IntArray

BoolArray = NDArray[np.bool_]


def undominated(group: IntArray, *criteria: IntArray) -> IntArray:
    """Return the indices of rows that no row of their group beats, of equal rows one, in order of group.

    Parameters
    ----------
    group
        Shape (rows,): only rows of the same group are compared.
    criteria
        One to three arrays of shape (rows,), none negative; less is better. Of three the last one has few values.

    Examples
    --------
    >>> undominated(np.array([0, 0, 0, 1]), np.array([1, 2, 3, 9]), np.array([5, 4, 4, 9])).tolist()
    [1, 0, 3]
    """
    first, second = criteria[0], criteria[1] if len(criteria) > 1 else np.zeros_like(criteria[0])
    levels = criteria[2] if len(criteria) > 2 else np.zeros_like(first)
    order = np.lexsort((first, second, levels, group))
    order = order[_leads(_together(group[order], levels[order]), first[order])]
    order = order[np.lexsort((levels[order], first[order], second[order], group[order]))]
    group, first, levels = group[order], first[order], levels[order]
    kept = np.zeros(len(order), dtype=np.bool_)
    for level in np.unique(levels):
        within = np.flatnonzero(levels <= level)
        best = _leads(group[within], first[within])
        kept[within[best & (levels[within] == level)]] = True
    result: IntArray = order[kept]
    return result


def _together(group: IntArray, levels: IntArray) -> IntArray:
    """Return one number per group and level of rows sorted by both."""
    return np.cumsum(np.r_[True, (group[1:] != group[:-1]) | (levels[1:] != levels[:-1])][: len(group)])


def _leads(group: IntArray, values: IntArray) -> BoolArray:
    """Return which rows are below all earlier rows of their group; the rows of a group are together."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    starts = np.r_[True, group[1:] != group[:-1]]
    number = np.cumsum(starts) - 1
    if (int(values.max()) + 1) * int(number[-1] + 1) >= MOST:
        values = np.unique(values, return_inverse=True)[1].astype(np.int64)
    shifted = values - number * (int(values.max()) + 1)  # every later group lies below all earlier ones
    least = np.minimum.accumulate(shifted)
    result: BoolArray = np.r_[True, shifted[1:] < least[:-1]]
    return result
