"""Memory profiles by a plain loop over changes."""

from collections.abc import Iterable

import numpy as np

from meshwise.simulator.memory import CATEGORIES, Column, MemoryProfile
from meshwise.simulator.program import MemoryChange


def sweep(
    rank_class: int,
    capacity: float,
    resident_memory: Iterable[MemoryChange],
    changes: Iterable[tuple[float, MemoryChange]],
) -> MemoryProfile:
    """Return the memory profile of one rank class from its resident memory and its changes at times in seconds.

    Changes of one instant count as one, so that memory released at an instant is free for allocations at it, as on an
    in-order stream.
    """
    changes_by_time: dict[float, list[MemoryChange]] = {0.0: []}
    for time, change in (*((0.0, change) for change in resident_memory), *changes):
        if change.rank_class == rank_class:
            changes_by_time.setdefault(time, []).append(change)
    levels = np.zeros((len(changes_by_time), len(CATEGORIES)))
    for row, time in enumerate(sorted(changes_by_time)):
        for change in changes_by_time[time]:
            levels[row:, CATEGORIES.index(change.category)] += change.size
    return MemoryProfile(rank_class, capacity, Column(np.array(sorted(changes_by_time))), Column(levels))
