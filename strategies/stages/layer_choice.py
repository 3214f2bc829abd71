"""A way for every layer of a stage within its memory: Galvatron's dynamic program over layers and memory.

Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB 2023,
section 3.3. Galvatron counts memory in steps of a megabyte, each layer's rounded up, so that many layers lose many
steps; here lists of all pairs of memory and time are kept of which none is worse in both, which is exact.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

GRID = 2.0**20
"""Bytes of a step of memory as published."""


class Choice(NamedTuple):
    """The way of every layer, and the time and memory of all."""

    ways: tuple[int, ...]
    time: float
    memory: float


Ways = Sequence[tuple[float, float]]
"""What a layer takes in each way: time and bytes."""


def fastest_ways(
    layers: Sequence[Ways], limit: float, between: Sequence[Sequence[float]] | None = None
) -> Choice | None:
    """Return the fastest ways of layers that need at most ``limit`` bytes; ``None`` where none do.

    Parameters
    ----------
    between
        Time between a layer in one way and the next one in another: ``between[one][other]``; by default none.

    >>> fastest_ways([[(1.0, 4.0), (2.0, 1.0)]] * 3, 9.0)
    Choice(ways=(0, 1, 0), time=4.0, memory=9.0)
    """
    found: dict[int, list[Choice]] = {-1: [Choice((), 0.0, 0.0)]}
    for ways in layers:
        longer: dict[int, list[Choice]] = {}
        for way, (time, memory) in enumerate(ways):
            rows = [
                Choice((*row.ways, way), row.time + time + moved, row.memory + memory)
                for last, kept in found.items()
                for moved in [between[last][way] if between is not None and last >= 0 else 0.0]
                for row in kept
                if row.memory + memory <= limit
            ]
            longer[way] = _undominated(rows)
        found = longer
    return min((row for rows in found.values() for row in rows), key=lambda row: (row.time, row.memory), default=None)


def fastest_ways_on_grid(layers: Sequence[Ways], limit: float) -> Choice | None:
    """Return the fastest ways where every layer's bytes are rounded up to megabytes, as published.

    >>> fastest_ways_on_grid([[(1.0, 0.4 * 2**20), (2.0, 0.0)]] * 3, 2.0 * 2**20).ways
    (0, 1, 0)
    """
    steps = [[(time, float(ceil(memory / GRID))) for time, memory in ways] for ways in layers]
    found = fastest_ways(steps, limit // GRID)
    if found is None:
        return None
    return found._replace(memory=sum(ways[way][1] for ways, way in zip(layers, found.ways, strict=True)))


def _undominated(rows: list[Choice]) -> list[Choice]:
    kept: list[Choice] = []
    for row in sorted(rows, key=lambda row: (row.memory, row.time, row.ways)):
        if not kept or row.time < kept[-1].time:
            kept.append(row)
    return kept
