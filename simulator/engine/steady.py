"""How long a step takes in a program of many: in the steady state, what one more step adds.

Steps that run in a row without a flush overlap, and the first ones also fill the pipeline. Where a step waits for
none more than ``depth`` before it, always in the same way, the ends of steps become periodic: they are those of
some steps before plus a constant (see `simulator.engine.extrapolation`). One step of a period, on average, is the
step time.
"""

from simulator.engine.extrapolation import recurrence
from simulator.program import IntArray, Program
from simulator.window import Window


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
