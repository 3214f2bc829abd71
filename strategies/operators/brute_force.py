"""Enumeration of all choices of a small cost graph: the reference for the other solvers in tests."""

import numpy as np

from meshwise.strategies.operators.cost_graph import CostGraph, IntArray, Shortfall, Solution, shortfall

MOST_CHOICES = 2**27
BLOCK = 2**18
"""Choices that are priced at once, so that arrays stay small however many choices there are."""


def brute_force(graph: CostGraph, limit: int | None = None) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes; of equally fast ones the first in lexicographic order.

    Raises
    ------
    ValueError
        If there are more than 2**27 choices.
    """
    missing = shortfall(graph, limit)
    if missing is not None:
        return missing
    number = 1
    for size in graph.sizes:
        number *= size
    if number > MOST_CHOICES:
        raise ValueError(f"brute force takes at most {MOST_CHOICES} choices, the graph has {number}")
    best: tuple[int, int] | None = None
    for start in range(0, number, BLOCK):
        choices = np.array(
            np.unravel_index(np.arange(start, min(start + BLOCK, number)), graph.sizes), dtype=np.int64
        ).reshape(len(graph.sizes), -1)
        times, fits = _times(graph, choices), _fits(graph, choices, limit)
        if fits.any():
            first = int(np.flatnonzero(fits)[np.argmin(times[fits])])
            met = (int(times[first]), start + first)
            best = met if best is None else min(best, met)
    assert best is not None, "the choice of least memory fits"
    choice = tuple(int(index) for index in np.unravel_index(best[1], graph.sizes))
    return Solution(choice, best[0], graph.memory(choice), best[0])


def _times(graph: CostGraph, choices: IntArray) -> IntArray:
    times = np.zeros(choices.shape[1], dtype=np.int64)
    for each, row in zip(graph.times, choices, strict=True):
        times += each[row]
    for source, target, table in graph.edges:
        times += table[choices[source], choices[target]]
    return times


def _fits(graph: CostGraph, choices: IntArray, limit: int | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    kept, most = np.zeros((2, choices.shape[1]), dtype=np.int64)
    for each, transient, row in zip(graph.kept, graph.transient, choices, strict=True):
        kept += each[row]
        np.maximum(most, transient[row], out=most)
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        np.ones(len(kept), dtype=np.bool_) if limit is None else kept + most <= limit
    )
    return result
