"""Where the ends of microbatches or steps begin to repeat, exactly.

A pipeline whose microbatch waits for none more than ``depth`` before it, always in the
same way, is a shift-invariant max-plus system: where the ends of ``depth`` microbatches
equal those of ``depth`` earlier ones plus a constant, all later ones repeat that, too
(Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992, chapter 3).
"""

from typing import NamedTuple

from simulator.program import IntArray


class Recurrence(NamedTuple):
    """Rows from ``first`` on repeat after ``period`` rows, ``shift`` ticks later."""

    first: int
    period: int
    shift: int


def recurrence(ends: IntArray, depth: int) -> Recurrence | None:
    """Return the earliest repetition among rows of ends [microbatch, task]; ``None`` where there is none.

    >>> import numpy as np
    >>> recurrence(np.array([[0], [4], [7], [9], [12], [14]]), 2)
    Recurrence(first=1, period=2, shift=5)
    """
    seen: dict[bytes, int] = {}
    for row in range(len(ends) - depth + 1):
        window = ends[row : row + depth]
        first = seen.setdefault((window - ends[row, 0]).tobytes(), row)
        if first < row:
            return Recurrence(first, row - first, int(ends[row, 0] - ends[first, 0]))
    return None
