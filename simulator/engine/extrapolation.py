"""The makespan of very many microbatches from runs of a few, exactly.

A pipeline whose microbatch waits for none more than ``depth`` before it, always in the
same way, is a shift-invariant max-plus system: where the ends of ``depth`` microbatches
equal those of ``depth`` earlier ones plus a constant, all later ones repeat that, too
(Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992, chapter 3).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from simulator.program import IntArray

Rows = Callable[[int], tuple[IntArray, int]]


class Recurrence(NamedTuple):
    """Rows from ``first`` on repeat after ``period`` rows, ``shift`` ticks later."""

    first: int
    period: int
    shift: int


def recurrence(ends: IntArray, depth: int) -> Recurrence | None:
    """Return the earliest repetition among rows of ends [microbatch, task]; ``None`` where there is none.

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


def extrapolated_makespan(rows: Rows, microbatches: int, depth: int) -> int | None:
    """Return the makespan of ``microbatches`` in ticks, without simulating all of them.

    ``None`` where shorter runs do not show a recurrence, or where it would not hold: then
    the step has to be simulated in full.

    Parameters
    ----------
    rows
        For a run of so many microbatches, the ends in ticks of all tasks that belong to
        one, [microbatch, task], and the makespan. No tasks' transfers contend.
    depth
        Microbatches between a task and any that waits for it; also how many microbatches
        before the last one first feel that the step ends.
    """
    probe = 6 * depth
    while 2 * probe <= microbatches:
        ends = rows(probe)[0][: probe - depth]
        found = recurrence(ends, depth)
        if found is not None:
            return _continued(rows, microbatches, depth, ends, found)
        probe *= 2
    return None


def _continued(rows: Rows, microbatches: int, depth: int, ends: IntArray, found: Recurrence) -> int | None:
    """Return the makespan by a recurrence that two short runs confirm, else ``None``."""
    least = found.first + 2 * depth
    short = least + (microbatches - least) % found.period
    if short + found.period >= microbatches:
        return None
    makespans = []
    for count in (short, short + found.period):
        again, makespan = rows(count)
        settled = min(count - depth, len(ends))
        if not np.array_equal(again[:settled], ends[:settled]):
            return None  # what comes later changes what came before, as in GPipe
        makespans.append(makespan)
    if makespans[1] - makespans[0] != found.shift:
        return None
    return makespans[0] + found.shift * ((microbatches - short) // found.period)
