"""Schedules as torch.distributed.pipelining's CSV: a row a pipeline rank, a cell an action.

What its runtime schedules read with ``_load_csv(FILE, format="compute_only")`` and write with ``_dump_csv``. Empty
cells are steps in which a rank idles; they say nothing, for an order has no clock.
"""

import csv
import io

from strategies.schedule import Schedule


def to_csv(schedule: Schedule) -> str:
    """Return the orders of a schedule.

    >>> from strategies.schedule import schedule
    >>> print(to_csv(schedule("gpipe", 1, 2)), end="")
    0F0,0F1,0B0,0B1
    """
    return "".join(",".join(line.split()) + "\n" for line in str(schedule).splitlines())


def from_csv(text: str) -> Schedule:
    """Return the schedule whose orders are rows of cells.

    Raises
    ------
    ValueError
        Where it is none; an `OrderError` names the row.

    >>> print(from_csv("0F0,,0B0,\\n,1F0,1B0,\\n"))
    0F0 0B0
    1F0 1B0
    """
    try:
        rows = [[cell for cell in map(str.strip, row) if cell] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ValueError(f"a schedule is rows of actions, met no CSV: {error}") from None
    if any(" " in cell for row in rows for cell in row):
        raise ValueError("a cell is one action, met several")
    while rows and not rows[-1]:
        rows.pop()
    return Schedule.parse("\n".join(" ".join(row) for row in rows) or " ")
