"""A step graph made smaller without changing when anything happens.

Edges that two others imply are left out, and those that never decide when a task starts: what is behind no contended
transfer ends when the longest path says, and all else then or later, for contention only delays. Then every chain
of tasks in which each waits for the one before it and for nothing else becomes one task. Exact because durations are
whole ticks and not negative. Tasks whose transfers contend stay as they are. What is
left is numbered in order of time, so that an engine finds it side by side in memory.
"""

from collections.abc import MutableSequence
from dataclasses import dataclass

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.engine.compiled import compiled, pays
from meshwise.simulator.engine.longest_path import Walk, walk
from meshwise.simulator.engine.step_graph import StepGraph
from meshwise.simulator.program import IntArray

Ints = MutableSequence[int]

LOOK = 64
"""Successors of a task up to which edges that go through it are looked for; a barrier has thousands."""


@dataclass(frozen=True, eq=False)
class Contraction:
    """A smaller graph, and where the tasks of the original lie in it.

    Parameters
    ----------
    chain_of
        For every task of the original, its task in ``graph``.
    offset
        Ticks from the start of that to its own.
    """

    original: StepGraph
    graph: StepGraph
    chain_of: IntArray
    offset: IntArray

    __repr__ = brief()


def contract(graph: StepGraph, path: Walk | None = None) -> Contraction | None:
    """Return the contraction of a graph, whose ``path`` may be known; ``None`` where tasks wait in a cycle."""
    starts, ends, order = path or walk(graph)
    if len(order) < graph.num_tasks:
        return None
    keep = _needed(graph)
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))[keep]
    target = graph.successors[keep]
    decides = (_disturbed(graph, order)[source] > 0) | (ends[source] >= starts[target])
    source, target = source[decides], target[decides]
    chain_of, offset = _chains(graph, order, source, target)
    heads = np.flatnonzero(chain_of == np.arange(graph.num_tasks))
    heads = heads[np.argsort(starts[heads], kind="stable")]
    number = np.empty(graph.num_tasks, np.int64)
    number[heads] = np.arange(len(heads))
    chain_of = number[chain_of]
    return Contraction(graph, _smaller(graph, chain_of, offset, heads, source, target), chain_of, offset)


def expand_times(contraction: Contraction, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return start and end of every original task from those of the contracted ones."""
    graph, chain = contraction.original, contraction.chain_of
    first = starts[chain] + contraction.offset
    return first, np.where(graph.flow >= 0, ends[chain], first + graph.durations)


def _needed(graph: StepGraph) -> IntArray:
    """Return the edges that no two others imply."""
    keep, mark = np.ones(len(graph.successors), np.int64), np.full(graph.num_tasks, -1, np.int64)
    if pays(graph.num_tasks):
        compiled(_mark_implied)(graph.successor_start, graph.successors, keep, mark)
        return np.flatnonzero(keep)
    kept = keep.tolist()
    _mark_implied(graph.successor_start.tolist(), graph.successors.tolist(), kept, mark.tolist())
    return np.flatnonzero(kept)


def _mark_implied(successor_start: Ints, successors: Ints, keep: Ints, mark: Ints) -> None:
    """Clear ``keep`` of every edge past which a path of two edges leads; ``mark`` holds -1 for each task."""
    for task in range(len(mark)):
        first, last = successor_start[task], successor_start[task + 1]
        if last - first < 2:
            continue
        for index in range(first, last):
            mark[successors[index]] = index
        for index in range(first, last):
            middle = successors[index]
            begin, end = successor_start[middle], successor_start[middle + 1]
            if end - begin <= LOOK:
                for beyond in range(begin, end):
                    other = mark[successors[beyond]]
                    if other >= first:
                        keep[other] = 0
        for index in range(first, last):
            mark[successors[index]] = -1


def _disturbed(graph: StepGraph, order: IntArray) -> IntArray:
    """Return whether a contended transfer is behind every task, or the task itself: it may end later than alone."""
    found = (graph.flow >= 0).astype(np.int64)
    if pays(graph.num_tasks):
        compiled(_spread)(order, graph.successor_start, graph.successors, found)
        return found
    rows = found.tolist()
    _spread(order.tolist(), *graph.successor_lists, rows)
    return np.array(rows, np.int64)


def _spread(order: Ints, successor_start: Ints, successors: Ints, found: Ints) -> None:
    """Set ``found`` of all that is behind a task of which it is set, in topological order."""
    for task in order:
        if found[task]:
            for index in range(successor_start[task], successor_start[task + 1]):
                found[successors[index]] = 1


def _chains(graph: StepGraph, order: IntArray, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """Return for every task the first of its chain, and the ticks from the start of that to its own."""
    count, plain = graph.num_tasks, graph.flow < 0
    alone = (np.bincount(source, minlength=count)[source] == 1) & (np.bincount(target, minlength=count)[target] == 1)
    joined = alone & plain[source] & plain[target]
    before = np.full(count, -1, np.int64)
    before[target[joined]] = source[joined]
    chain_of, offset = np.arange(count), np.zeros(count, np.int64)
    if pays(count):
        compiled(_follow)(order, before, graph.durations, chain_of, offset)
        return chain_of, offset
    columns = (chain_of.tolist(), offset.tolist())
    _follow(order.tolist(), before.tolist(), graph.durations.tolist(), *columns)
    return np.array(columns[0], np.int64), np.array(columns[1], np.int64)


def _follow(order: Ints, before: Ints, durations: Ints, chain_of: Ints, offset: Ints) -> None:
    """Fill ``chain_of`` and ``offset`` in topological order."""
    for task in order:
        previous = before[task]
        if previous >= 0:
            chain_of[task] = chain_of[previous]
            offset[task] = offset[previous] + durations[previous]


def _smaller(
    graph: StepGraph, chain_of: IntArray, offset: IntArray, heads: IntArray, source: IntArray, target: IntArray
) -> StepGraph:
    count = len(heads)
    crossing = chain_of[source] != chain_of[target]
    after, before = chain_of[target[crossing]], chain_of[source[crossing]]
    by_source = np.lexsort((after, before))
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(before, minlength=count), out=start[1:])
    durations = np.zeros(count, np.int64)
    np.maximum.at(durations, chain_of, offset + graph.durations)
    flow = graph.flow[heads]
    return StepGraph(
        start,
        after[by_source],
        np.bincount(after, minlength=count),
        durations,
        np.where(flow >= 0, graph.latencies[heads], durations),
        flow,
        graph.bundles,
        graph.capacity,
        graph.tenants,
    )
