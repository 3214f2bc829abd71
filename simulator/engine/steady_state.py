"""Step time of a program of many steps: in the steady state, the time that one more step adds.

Steps without a flush between them overlap, and the first ones also fill the pipeline. If every step waits in the same
way for steps at most ``depth`` before it, the steps are a shift-invariant max-plus system: once the ends of ``depth``
steps equal those of ``depth`` earlier steps plus a constant, all later steps repeat with the same period (Baccelli,
Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992, chapter 3). The step time is the mean over a period.
"""

from typing import NamedTuple

from meshwise.simulator.program import IntArray, Program
from meshwise.simulator.timeline import Window


class Recurrence(NamedTuple):
    """Rows from ``first_row`` on repeat after ``period`` rows, ``shift`` ticks later."""

    first: int
    period: int
    shift: int


def recurrence(ends: IntArray, depth: int) -> Recurrence | None:
    """Return the earliest repetition among rows of ends in ticks, [step, task]; ``None`` if there is none.

    >>> import numpy as np
    >>> recurrence(np.array([[0], [4], [7], [9], [12], [14]]), 2)
    Recurrence(first=1, period=2, shift=5)
    """
    seen: dict[bytes, int] = {}
    for row in range(len(ends) - depth + 1):
        window = ends[row : row + depth]
        # Windows that differ by a constant have equal bytes.
        first = seen.setdefault((window - ends[row, 0]).tobytes(), row)
        if first < row:
            return Recurrence(first, row - first, int(ends[row, 0] - ends[first, 0]))
    return None


def window(program: Program, ends: IntArray) -> Window:
    """Return the part of a run that stands for one step: all of it or, in a program of many steps, the last period.

    The very last steps are left out: they are faster, because no step follows them. If the ends do not repeat, which
    is possible if transfers share links, the second half of the steps stands for all.

    Parameters
    ----------
    ends
        End of every task in ticks.
    """
    if program.steps is None:
        return Window(0, int(ends.max(initial=0)))
    tasks, depth = program.steps
    settled = ends[tasks[: len(tasks) - depth]]
    found = recurrence(settled, depth)
    period = found.period if found else (len(settled) - 1) // 2
    last = settled[[-1 - period, -1]].max(axis=1)
    return Window(int(last[0]), int(last[1]), period, found is not None)
