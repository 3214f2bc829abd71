"""Published dynamic programs: the layers of every pipeline stage, and an option for every layer of a stage.

The programs that divide layers among stages are each exact for their own formula. All take ``times[stage, n]``, the
time of a microbatch on a stage with ``n`` layers, ``inf`` where that is not allowed. They return the layers of every
stage and the value of the formula; ``None`` where no division is allowed.

`choose_options` chooses an option, such as a recomputation, for every layer of a stage within its memory: Galvatron's
dynamic program over layers and memory [5]_. Galvatron counts memory in megabytes and rounds each layer's up, so that
many layers lose many megabytes; here lists keep all pairs of memory and time that no other pair dominates, which is
exact.

References
----------
.. [1] Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1
   (bottleneck).
.. [2] Tarnawski et al., "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021 (bottleneck,
   with memory in ``times``).
.. [3] Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022,
   section 5.2 (sum and slowest).
.. [4] Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", PPoPP 2021, section 4
   (pivot).
.. [5] Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB
   2023, section 3.3.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwise.strategies.stages.division import FloatArray


class Partition(NamedTuple):
    """The layers of every stage, and the time by a formula."""

    counts: tuple[int, ...]
    time: float


def least_sum(times: FloatArray, layers: int) -> Partition | None:
    """Return the division with the least sum of times over stages."""
    return _divided(times, layers, np.add)


def least_bottleneck(times: FloatArray, layers: int) -> Partition | None:
    """Return the division with the fastest bottleneck: PipeDream's steady state [1]_, and Piper's time per sample [2]_.

    >>> least_bottleneck(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3)
    Partition(counts=(2, 1), time=2.0)
    """
    return _divided(times, layers, np.maximum)


def _divided(times: FloatArray, layers: int, joined: np.ufunc) -> Partition | None:
    """Return the division of least time, where ``combine`` adds a stage's time to that of the stages before it.

    The state of the program is the number of layers that the stages so far have.
    """
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
    """Return the division that is least by Alpa's formula [3]_: the sum over stages, and the slowest stage again.

    The slowest stage counts ``num_microbatches - 1`` times. As published, the program minimises the sum for every time
    that the slowest stage may take, until that time alone is too much.

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
    """Return the division with the least latency by DAPPLE [4]_: that of the pivot, the stage for which it is longest.

    The latency for a pivot is the sum of the stages before it, plus ``num_microbatches`` times its own time. Lists
    keep all pairs of a sum and a latency that no other pair dominates, which is exact.

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
    """Return the rows that no other row beats in sum and latency."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for row in sorted(rows):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return kept


GRID = 2.0**20
"""The unit in bytes by which Galvatron counts memory."""


class Choice(NamedTuple):
    """The option of every layer, with the time and memory of all layers."""

    ways: tuple[int, ...]
    time: float
    memory: float


Ways = Sequence[tuple[float, float]]
"""The time and the bytes of a layer with each of its options."""


def fastest_ways(
    layers: Sequence[Ways], limit: float, between: Sequence[Sequence[float]] | None = None
) -> Choice | None:
    """Return the fastest options of layers that need at most ``limit`` bytes; ``None`` where none fit.

    Parameters
    ----------
    transition_times
        Time between a layer with one option and the next layer with another, ``transition_times[one][other]``; by
        default 0.

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
    """Return the fastest options where every layer's bytes are rounded up to megabytes, as published.

    >>> fastest_ways_on_grid([[(1.0, 0.4 * 2**20), (2.0, 0.0)]] * 3, 2.0 * 2**20).ways
    (0, 1, 0)
    """
    steps = [[(time, float(ceil(memory / GRID))) for time, memory in ways] for ways in layers]
    found = fastest_ways(steps, limit // GRID)
    if found is None:
        return None
    return found._replace(memory=sum(ways[way][1] for ways, way in zip(layers, found.ways, strict=True)))


def _drop_dominated_choices(rows: list[Choice]) -> list[Choice]:
    """Return the choices that no other choice beats in memory and time, by ascending memory."""
    kept: list[Choice] = []
    for row in sorted(rows, key=lambda row: (row.memory, row.time, row.ways)):
        if not kept or row.time < kept[-1].time:
            kept.append(row)
    return kept
