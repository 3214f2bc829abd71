"""What a step is made of before anything is known of machine or cost: abstract tasks, and what each waits for.

A skeleton speaks of *sites*: the ranks of a pipeline position, their tensor or data groups,
the pairs that send to the next position. One abstract task at a site stands for one task of
every class there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from simulator.program import IntArray, StreamKind

RANK = "rank"


class Site(NamedTuple):
    """Where tasks are: ranks, groups or pairs of a ``kind`` at a pipeline position."""

    kind: str
    position: int


class Slot(NamedTuple):
    """What all microbatches of a task share.

    ``what`` and ``key`` name it for the lowering; ``streams`` are (position, stream) held.
    """

    site: Site
    what: str
    key: tuple[int, ...]
    streams: tuple[tuple[int, StreamKind], ...]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """Abstract tasks in order.

    Parameters
    ----------
    slots
        What the tasks are; ``slot_of`` and ``microbatch_of`` say it for each.
    before, after, through
        Edges: the task ``after`` waits for ``before`` at a pipeline position they share.
    step_of
        Of several steps in a row, that of every task.
    """

    slots: tuple[Slot, ...]
    slot_of: IntArray
    microbatch_of: IntArray
    before: IntArray
    after: IntArray
    through: IntArray
    step_of: IntArray | None = None
