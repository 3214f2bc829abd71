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

    first_row: int
    period: int
    shift: int


def find_recurrence(ends: IntArray, depth: int) -> Recurrence | None:
    """Return the earliest repetition among rows of ends in ticks, [step, task]; ``None`` if there is none.

    >>> import numpy as np
    >>> find_recurrence(np.array([[0], [4], [7], [9], [12], [14]]), 2)
    Recurrence(first_row=1, period=2, shift=5)
    """
    first_rows: dict[bytes, int] = {}
    for row in range(len(ends) - depth + 1):
        block = ends[row : row + depth]
        # Windows that differ by a constant have equal bytes.
        first_row = first_rows.setdefault((block - ends[row, 0]).tobytes(), row)
        if first_row < row:
            return Recurrence(first_row, row - first_row, int(ends[row, 0] - ends[first_row, 0]))
    return None


def find_window(program: Program, ends: IntArray) -> Window:
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
    settled_ends = ends[tasks[: len(tasks) - depth]]
    repetition = find_recurrence(settled_ends, depth)
    period = repetition.period if repetition else (len(settled_ends) - 1) // 2
    final_ends = settled_ends[[-1 - period, -1]].max(axis=1)
    return Window(int(final_ends[0]), int(final_ends[1]), period, repetition is not None)
