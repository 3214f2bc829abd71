"""Enumeration of all choices of a small cost graph: the reference for the solvers."""

import numpy as np

from meshwise.strategies.operators.cost_graph import CostGraph, IntArray, Shortfall, Solution, find_shortfall

MAX_CHOICES = 2**27
BLOCK_SIZE = 2**18
"""Choices that are priced at once, so that arrays stay small however many choices there are."""


def brute_force(graph: CostGraph, limit: int | None = None) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes; of equally fast ones the first in lexicographic order.

    Raises
    ------
    ValueError
        If there are more than 2**27 choices.
    """
    shortfall = find_shortfall(graph, limit)
    if shortfall is not None:
        return shortfall
    num_choices = 1
    for size in graph.sizes:
        num_choices *= size
    if num_choices > MAX_CHOICES:
        raise ValueError(f"brute force takes at most {MAX_CHOICES} choices, the graph has {num_choices}")
    best_candidate: tuple[int, int] | None = None
    for start in range(0, num_choices, BLOCK_SIZE):
        choices = np.array(
            np.unravel_index(np.arange(start, min(start + BLOCK_SIZE, num_choices)), graph.sizes), dtype=np.int64
        ).reshape(len(graph.sizes), -1)
        times, is_fitting = _compute_times(graph, choices), _find_fitting(graph, choices, limit)
        if is_fitting.any():
            row = int(np.flatnonzero(is_fitting)[np.argmin(times[is_fitting])])
            candidate = (int(times[row]), start + row)
            best_candidate = candidate if best_candidate is None else min(best_candidate, candidate)
    assert best_candidate is not None, "the choice of least memory fits"
    choice = tuple(int(index) for index in np.unravel_index(best_candidate[1], graph.sizes))
    return Solution(choice, best_candidate[0], graph.memory(choice), best_candidate[0])


def _compute_times(graph: CostGraph, choices: IntArray) -> IntArray:
    times = np.zeros(choices.shape[1], dtype=np.int64)
    for node_times, row in zip(graph.times, choices, strict=True):
        times += node_times[row]
    for source, target, table in graph.edges:
        times += table[choices[source], choices[target]]
    return times


def _find_fitting(graph: CostGraph, choices: IntArray, limit: int | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    total_kept, max_transient = np.zeros((2, choices.shape[1]), dtype=np.int64)
    for kept_bytes, transient_bytes, row in zip(graph.kept_bytes, graph.transient_bytes, choices, strict=True):
        total_kept += kept_bytes[row]
        np.maximum(max_transient, transient_bytes[row], out=max_transient)
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        np.ones(len(total_kept), dtype=np.bool_) if limit is None else total_kept + max_transient <= limit
    )
    return result
