"""Abstract tasks and their edges while they are collected."""

import numpy as np

from simulator.program import IntArray, StreamKind
from strategies.lowering.skeleton import Site, Skeleton, Slot

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
