"""Contraction of a step graph: a smaller graph with the same start and end of every task.

Two kinds of edges are dropped: those that two others imply, and those that never decide when a task starts. A task that
follows no contended transfer ends exactly when the longest path says; all other tasks end then or later, as contention
only delays. Then every chain, in which each task waits for the one before it alone, becomes one task. This is exact
because durations are whole ticks and not negative. Tasks whose transfers contend stay as they are. The remaining tasks
are numbered in order of time, so that tasks of about the same time are neighbours in memory.
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
"""Successors of a task up to which paths through it are searched; a barrier has thousands."""


@dataclass(frozen=True, eq=False)
class Contraction:
    """A smaller graph, and the position of the original tasks in it.

    Parameters
    ----------
    chain_of
        For every original task, its task in ``graph``.
    offset
        For every original task, ticks from the start of that task to its own start.
    """

    original: StepGraph
    graph: StepGraph
    chain_of: IntArray
    offset: IntArray

    __repr__ = brief()


def contract(graph: StepGraph, path: Walk | None = None) -> Contraction | None:
    """Return the contraction of a graph, whose longest ``path`` may be known; ``None`` if tasks wait in a cycle."""
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
    """Return start and end of every original task from those of the contracted graph, in ticks."""
    graph, chain = contraction.original, contraction.chain_of
    first = starts[chain] + contraction.offset
    return first, np.where(graph.flow >= 0, ends[chain], first + graph.durations)


def _needed(graph: StepGraph) -> IntArray:
    """Return the indices of edges that no two others imply."""
    keep, mark = np.ones(len(graph.successors), np.int64), np.full(graph.num_tasks, -1, np.int64)
    if pays(graph.num_tasks):
        compiled(_mark_implied)(graph.successor_start, graph.successors, keep, mark)
        return np.flatnonzero(keep)
    kept = keep.tolist()
    _mark_implied(graph.successor_start.tolist(), graph.successors.tolist(), kept, mark.tolist())
    return np.flatnonzero(kept)


def _mark_implied(successor_start: Ints, successors: Ints, keep: Ints, mark: Ints) -> None:
    """Clear ``is_kept`` of edges that a path of two edges implies; ``mark`` is -1 for all tasks, before and after."""
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
    """Return for every task whether it is, or follows, a contended transfer: it may end later than the longest path."""
    found = (graph.flow >= 0).astype(np.int64)
    if pays(graph.num_tasks):
        compiled(_spread)(order, graph.successor_start, graph.successors, found)
        return found
    rows = found.tolist()
    _spread(order.tolist(), *graph.successor_lists, rows)
    return np.array(rows, np.int64)


def _spread(order: Ints, successor_start: Ints, successors: Ints, found: Ints) -> None:
    """Set ``is_disturbed`` of all tasks that follow a task with it set, in topological order."""
    for task in order:
        if found[task]:
            for index in range(successor_start[task], successor_start[task + 1]):
                found[successors[index]] = 1


def _chains(graph: StepGraph, order: IntArray, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """Return for every task the first task of its chain, and the ticks from that task's start to its own."""
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
    """Fill ``chain_of`` and ``offset``, in topological order."""
    for task in order:
        previous = before[task]
        if previous >= 0:
            chain_of[task] = chain_of[previous]
            offset[task] = offset[previous] + durations[previous]


def _smaller(
    graph: StepGraph, chain_of: IntArray, offset: IntArray, heads: IntArray, source: IntArray, target: IntArray
) -> StepGraph:
    """Return the graph of chains, which start with the tasks ``heads``, from edges of tasks."""
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
