"""What a step is made of before anything is known of machine or cost: abstract tasks, and what each waits for.

A skeleton speaks of *sites*: the ranks of a pipeline position, their tensor or data groups,
the pairs that send to the next position. One abstract task at a site stands for one task of
every class there.

Abstract tasks and their edges while they are collected.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import IntArray, StreamKind

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


Waits = list[tuple[int | None, int]]
"""Tasks that must have ended, and the pipeline positions through which that is known."""
Streams = tuple[tuple[int, StreamKind], ...]
"""Pipeline positions and streams that a task holds."""


class TaskList:
    """Abstract tasks while they are collected.

    ``repeated`` are edges that count from the first task of a pass, and the first tasks of passes that have them too.
    """

    def __init__(self) -> None:
        self.slots: dict[Slot, int] = {}
        self.slot_of: list[int] = []
        self.microbatch_of: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.repeated: list[tuple[IntArray, list[int]]] = []

    def add(
        self,
        site: Site,
        what: str,
        key: tuple[int, ...],
        streams: Streams,
        microbatch: int,
        waits: Waits,
    ) -> int:
        """Add a task and return its number."""
        return self.task(self.slot(site, what, key, streams), microbatch, waits)

    def slot(self, site: Site, what: str, key: tuple[int, ...], streams: Streams) -> int:
        """Return the number of a slot."""
        return self.slots.setdefault(Slot(site, what, key, streams), len(self.slots))

    def task(self, slot: int, microbatch: int, waits: Waits) -> int:
        """Add a task of a slot and return its number."""
        number = len(self.slot_of)
        self.slot_of.append(slot)
        self.microbatch_of.append(microbatch)
        self.edges += [(before, number, position) for before, position in waits if before is not None]
        return number

    def tasks(self, slots: list[int], microbatch: int) -> None:
        """Add tasks of one microbatch whose edges are known."""
        self.slot_of += slots
        self.microbatch_of += [microbatch] * len(slots)

    def skeleton(self) -> Skeleton:
        """Return what was collected."""
        edges = self._edges()
        slot_of, microbatch_of = (np.array(c, dtype=np.int64) for c in (self.slot_of, self.microbatch_of))
        return Skeleton(tuple(self.slots), slot_of, microbatch_of, edges[:, 0], edges[:, 1], edges[:, 2])

    def _edges(self) -> IntArray:
        """Return all edges, by the task that waits."""
        parts = [np.array(self.edges, dtype=np.int64).reshape(-1, 3)]
        for edges, starts in self.repeated:
            shift = np.array(starts, dtype=np.int64)[:, None, None] * (1, 1, 0)
            parts.append((edges + shift).reshape(-1, 3))
        edges = np.concatenate(parts)
        return edges[np.argsort(edges[:, 1], kind="stable")]
