"""How long a step takes in a program of many: in the steady state, what one more step adds.

Steps that run in a row without a flush overlap, and the first ones also fill the pipeline. Where a step waits for
none more than ``depth`` before it, always in the same way, steps are a shift-invariant max-plus system: where the ends
of ``depth`` steps equal those of ``depth`` earlier ones plus a constant, all later ones repeat that, too (Baccelli,
Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992, chapter 3). One step of such a period, on average, is
the step time.
"""

from typing import NamedTuple

from meshwise.simulator.program import IntArray, Program
from meshwise.simulator.timeline import Window


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


def window(program: Program, ends: IntArray) -> Window:
    """Return the part of a run that stands for one step: all of it, or where there are many, their last period.

    The last steps are left out, which are quicker, for no other ones follow. Where the ends do not repeat, as may
    be where transfers share links, the second half of the steps stands for all.

    Parameters
    ----------
    ends
        The end in ticks of every task.
    """
    if program.steps is None:
        return Window(0, int(ends.max(initial=0)))
    tasks, depth = program.steps
    settled = ends[tasks[: len(tasks) - depth]]
    found = recurrence(settled, depth)
    period = found.period if found else (len(settled) - 1) // 2
    last = settled[[-1 - period, -1]].max(axis=1)
    return Window(int(last[0]), int(last[1]), period, found is not None)
