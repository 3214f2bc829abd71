"""How many layers each stage of a pipeline gets: published dynamic programs, each exact for its own formula.

All take ``times[stage, n]``, what a microbatch takes on a stage with ``n`` layers, ``inf`` where that is not allowed,
and return the layers of every stage and what the formula says of them; ``None`` where nothing is allowed.

References
----------
Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1 (bottleneck);
Tarnawski et al., "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021 (bottleneck, with memory in
``times``); Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", PPoPP 2021, section 4
(pivot); Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022, section 5.2 (sum and slowest).
"""

from typing import NamedTuple

import numpy as np

from strategies.stages.critical_path import FloatArray


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
        states = {used: _undominated(rows) for used, rows in found.items()}
    if layers not in states:
        return None
    _, time, counts = min(states[layers], key=lambda row: row[1])
    return Partition(counts, time)


def _undominated(rows: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for row in sorted(rows):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return kept
