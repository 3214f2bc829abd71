"""Which data rank and microbatch computes each sequence of a step: in order of arrival, sorted, or balanced.

Sorted, the sequences of a microbatch are as alike as they can be, and so are the microbatches that data ranks run at
the same time (bucketing by length). Balanced, each sequence goes, the heaviest first, to the data rank with the least
work that has room (longest processing time first [1]_), and microbatches of a rank are sorted. Where samples are padded
to the longest of their microbatch, microbatches of alike samples go so.

References
----------
.. [1] Graham 1969, "Bounds on multiprocessing timing anomalies", section 5.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import inf

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.loads.lengths import FloatArray

ORDERS = ("arrival", "sorted", "balance")
"""How sequences come to data ranks and microbatches."""


def assign_sequences(
    works: FloatArray, sizes: Sequence[int], microbatches: int, order: str, *, is_padded: bool = False
) -> IntArray:
    """Return the indices of sequences by microbatch, within it by data rank, and one after another: shape [sequences].

    Parameters
    ----------
    works
        The work of every sequence in order of arrival.
    sizes
        Sequences of a microbatch of each data rank.
    order
        One of `ORDERS`. Balanced sequences stay in order of arrival where the data rank with most work has less so.
    is_padded
        Whether a sequence takes as long as the longest of its microbatch. Then sorted microbatches are balanced, not
        sequences; with microbatches of several sizes they are only sorted.
    """
    arrival = np.arange(len(works))
    by_work: IntArray = np.argsort(-works, kind="stable")
    if order == "arrival":
        return arrival
    if order == "sorted" or (is_padded and len(set(sizes)) > 1):
        return by_work
    # what goes to one data rank or another, the heaviest first: rows of one sequence, or of a microbatch
    parts = by_work.reshape(-1, sizes[0] if is_padded else 1)
    part_sizes = [1] * len(sizes) if is_padded else sizes
    rows = _balance(works[parts[:, 0]], part_sizes, microbatches)
    places = [
        row[step * size : (step + 1) * size]
        for step in range(microbatches)
        for row, size in zip(rows, part_sizes, strict=True)
    ]
    balanced: IntArray = parts[np.concatenate(places)].ravel()
    most_work = [
        sum_rank_works(works[indices], sizes, microbatches, is_padded=is_padded).max()
        for indices in (arrival, balanced)
    ]
    return arrival if most_work[0] < most_work[1] else balanced


def _balance(works: FloatArray, sizes: Sequence[int], microbatches: int) -> list[IntArray]:
    """Return the places of the works of every data rank; works fall, and so they do on every rank."""
    rows: list[list[int]] = [[] for _ in sizes]
    queue = [(0.0, rank) for rank in range(len(sizes))]
    heapify(queue)
    for place, work in enumerate(works.tolist()):
        total, rank = queue[0]
        rows[rank].append(place)
        is_full = len(rows[rank]) == sizes[rank] * microbatches
        heapreplace(queue, (inf if is_full else total + work / sizes[rank], rank))
    return [np.array(row, dtype=np.int64) for row in rows]


def list_cell_starts(sizes: Sequence[int], microbatches: int) -> IntArray:
    """Return where each microbatch of each data rank begins among assigned sequences, shape [microbatches * ranks]."""
    counts = np.tile(np.array(sizes, dtype=np.int64), microbatches)
    starts: IntArray = np.cumsum(counts) - counts
    return starts


def sum_rank_works(
    assigned_works: FloatArray, sizes: Sequence[int], microbatches: int, *, is_padded: bool = False
) -> FloatArray:
    """Return the work of every data rank, of works in the order of `assign_sequences`.

    >>> works = np.array([1.0, 2.0, 3.0, 4.0])
    >>> sum_rank_works(works, [1, 1], 2).tolist(), sum_rank_works(works, [2], 2, is_padded=True).tolist()
    ([4.0, 6.0], [12.0])
    """
    starts = list_cell_starts(sizes, microbatches)
    if is_padded:
        cells = np.maximum.reduceat(assigned_works, starts) * np.tile(sizes, microbatches)
    else:
        cells = np.add.reduceat(assigned_works, starts)
    sums: FloatArray = cells.reshape(microbatches, len(sizes)).sum(axis=0)
    return sums
