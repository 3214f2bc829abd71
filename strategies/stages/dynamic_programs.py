"""Layers of stages, and a way for each of them, by published dynamic programs.

How many layers each stage of a pipeline gets: published dynamic programs, each exact for its own formula.

All take ``times[stage, n]``, what a microbatch takes on a stage with ``n`` layers, ``inf`` where that is not allowed,
and return the layers of every stage and what the formula says of them; ``None`` where nothing is allowed.

A way for every layer of a stage within its memory: Galvatron's dynamic program over layers and memory.

Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB 2023,
section 3.3. Galvatron counts memory in steps of a megabyte, each layer's rounded up, so that many layers lose many
steps; here lists of all pairs of memory and time are kept of which none is worse in both, which is exact.

References
----------
Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1 (bottleneck);
Tarnawski et al., "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021 (bottleneck, with memory in
``times``); Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", PPoPP 2021, section 4
(pivot); Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022, section 5.2 (sum and slowest).
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwise.strategies.stages.division import FloatArray


class Partition(NamedTuple):
    """Layers of every stage, and the time that a formula gives."""

    counts: tuple[int, ...]
    time: float


def least_sum(times: FloatArray, layers: int) -> Partition | None:
    """Return the division whose sum over stages is least."""
    return _divided(times, layers, np.add)


def least_bottleneck(times: FloatArray, layers: int) -> Partition | None:
    """Return the division whose slowest stage is fastest: the steady state of PipeDream, and Piper's time per sample.

    >>> least_bottleneck(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3)
    Partition(counts=(2, 1), time=2.0)
    """
    return _divided(times, layers, np.maximum)


def _divided(times: FloatArray, layers: int, joined: np.ufunc) -> Partition | None:
    """Return the division of least time, of stages ``joined`` one after another: by how many layers are used up."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    before = np.subtract.outer(np.arange(layers + 1), np.arange(times.shape[1]))
    chosen = []
    for row in times:
        table = joined(np.where(before >= 0, best[before], np.inf), row)
        chosen.append(table.argmin(axis=1))
        best = table.min(axis=1)
    if not np.isfinite(best[layers]):
        return None
    counts: list[int] = []
    for used in reversed(chosen):
        counts.append(int(used[layers - sum(counts)]))
    return Partition(tuple(reversed(counts)), float(best[layers]))


def sum_and_slowest(times: FloatArray, layers: int, microbatches: int) -> Partition | None:
    """Return the division with the least sum over stages and ``microbatches - 1`` times the slowest: Alpa's formula.

    As published: one least sum for every time that the slowest stage may take, until that alone is too much.

    >>> sum_and_slowest(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3, 10)
    Partition(counts=(2, 1), time=22.0)
    """
    best: Partition | None = None
    for slowest in np.unique(times[np.isfinite(times)]):
        if best is not None and (microbatches - 1) * slowest >= best.time:
            break
        found = least_sum(np.where(times <= slowest, times, np.inf), layers)
        if found is None:
            continue
        taken = max(float(row[n]) for row, n in zip(times, found.counts, strict=True))
        total = found.time + (microbatches - 1) * taken
        if best is None or total < best.time:
            best = Partition(found.counts, total)
    return best


def pivot(times: FloatArray, layers: int, microbatches: int) -> Partition | None:
    """Return the division with the least latency by DAPPLE: that of the pivot, the stage for which it is longest.

    For a pivot it is the sum of the stages before it, and ``microbatches`` times its own time. Exact by lists of all
    pairs of a sum and a latency of which none is worse in both.

    >>> pivot(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3, 10)
    Partition(counts=(2, 1), time=22.0)
    """
    states: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, 0.0, ())]}
    for row in times:
        found: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for used, rows in states.items():
            for n in range(min(layers - used + 1, len(row))):
                if np.isfinite(row[n]):
                    each = float(row[n])
                    more = [(s + each, max(latency, s + microbatches * each), (*c, n)) for s, latency, c in rows]
                    found.setdefault(used + n, []).extend(more)
        states = {used: _drop_dominated_divisions(rows) for used, rows in found.items()}
    if layers not in states:
        return None
    _, time, counts = min(states[layers], key=lambda row: row[1])
    return Partition(counts, time)


def _drop_dominated_divisions(
    rows: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for row in sorted(rows):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return kept


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
            longer[way] = _drop_dominated_choices(rows)
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


def _drop_dominated_choices(rows: list[Choice]) -> list[Choice]:
    kept: list[Choice] = []
    for row in sorted(rows, key=lambda row: (row.memory, row.time, row.ways)):
        if not kept or row.time < kept[-1].time:
            kept.append(row)
    return kept
