"""Contraction of a step graph: a smaller graph with the same start and end of every task.

Two kinds of edges are dropped: those that two others imply, and those that never decide when a task starts. A task that
follows no contended transfer ends exactly when the longest path says; all other tasks end then or later, as contention
only delays. Then every chain, in which each task waits for the one before it alone, becomes one task. This is exact
because durations are whole ticks and not negative. Tasks whose transfers contend stay as they are. The remaining tasks
are numbered in order of time, so that tasks of about the same time are neighbours in memory.
"""

from dataclasses import dataclass

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.engine.compiled import Ints, pays, run_loop
from meshwise.simulator.engine.longest_path import Walk, walk_graph
from meshwise.simulator.engine.step_graph import StepGraph
from meshwise.simulator.program import IntArray

MAX_SUCCESSORS = 64
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

    source_graph: StepGraph
    graph: StepGraph
    chain_of: IntArray
    offset: IntArray

    __repr__ = brief_repr()


def contract_graph(graph: StepGraph, path: Walk | None = None) -> Contraction | None:
    """Return the contraction of a graph, whose longest ``path`` may be known; ``None`` if tasks wait in a cycle."""
    starts, ends, order = path or walk_graph(graph)
    if len(order) < graph.num_tasks:
        return None
    edges = _find_needed_edges(graph)
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))[edges]
    target = graph.successors[edges]
    decides = (_find_disturbed(graph, order)[source] > 0) | (ends[source] >= starts[target])
    source, target = source[decides], target[decides]
    chain_of, offset = _find_chains(graph, order, source, target)
    heads = np.flatnonzero(chain_of == np.arange(graph.num_tasks))
    heads = heads[np.argsort(starts[heads], kind="stable")]
    number = np.empty(graph.num_tasks, np.int64)
    number[heads] = np.arange(len(heads))
    chain_of = number[chain_of]
    return Contraction(graph, _build_graph(graph, chain_of, offset, heads, source, target), chain_of, offset)


def expand_times(contraction: Contraction, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return start and end of every original task from those of the contracted graph, in ticks."""
    graph, chain = contraction.source_graph, contraction.chain_of
    task_starts = starts[chain] + contraction.offset
    return task_starts, np.where(graph.flow >= 0, ends[chain], task_starts + graph.durations)


def _find_needed_edges(graph: StepGraph) -> IntArray:
    """Return the indices of edges that no two others imply."""
    columns = (np.ones(len(graph.successors), np.int64), np.full(graph.num_tasks, -1, np.int64))
    inputs = (graph.successor_start, graph.successors)
    _, (is_kept, _) = run_loop(_mark_implied, inputs, columns, pays(graph.num_tasks))
    return np.flatnonzero(is_kept)


def _mark_implied(successor_start: Ints, successors: Ints, is_kept: Ints, mark: Ints) -> None:
    """Clear ``is_kept`` of edges that a path of two edges implies; ``mark`` is -1 for all tasks, before and after."""
    for task in range(len(mark)):
        start, stop = successor_start[task], successor_start[task + 1]
        if stop - start < 2:
            continue
        for index in range(start, stop):
            mark[successors[index]] = index
        for index in range(start, stop):
            middle = successors[index]
            begin, end = successor_start[middle], successor_start[middle + 1]
            if end - begin <= MAX_SUCCESSORS:
                for edge in range(begin, end):
                    marked_edge = mark[successors[edge]]
                    if marked_edge >= start:
                        is_kept[marked_edge] = 0
        for index in range(start, stop):
            mark[successors[index]] = -1


def _find_disturbed(graph: StepGraph, order: IntArray) -> IntArray:
    """Return for every task whether it is, or follows, a contended transfer: it may end later than the longest path."""
    inputs = (order, graph.successor_start, graph.successors)
    contended = (graph.flow >= 0).astype(np.int64)
    _, (is_disturbed,) = run_loop(_spread_marks, inputs, [contended], pays(graph.num_tasks))
    return is_disturbed


def _spread_marks(order: Ints, successor_start: Ints, successors: Ints, is_disturbed: Ints) -> None:
    """Set ``is_disturbed`` of all tasks that follow a task with it set, in topological order."""
    for task in order:
        if is_disturbed[task]:
            for index in range(successor_start[task], successor_start[task + 1]):
                is_disturbed[successors[index]] = 1


def _find_chains(graph: StepGraph, order: IntArray, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """Return for every task the first task of its chain, and the ticks from that task's start to its own."""
    count, is_plain = graph.num_tasks, graph.flow < 0
    is_single = (np.bincount(source, minlength=count)[source] == 1) & (
        np.bincount(target, minlength=count)[target] == 1
    )
    is_chained = is_single & is_plain[source] & is_plain[target]
    predecessor = np.full(count, -1, np.int64)
    predecessor[target[is_chained]] = source[is_chained]
    inputs, columns = (order, predecessor, graph.durations), (np.arange(count), np.zeros(count, np.int64))
    _, (chain_of, offset) = run_loop(_follow_chains, inputs, columns, pays(count))
    return chain_of, offset


def _follow_chains(order: Ints, predecessor: Ints, durations: Ints, chain_of: Ints, offset: Ints) -> None:
    """Fill ``chain_of`` and ``offset``, in topological order."""
    for task in order:
        source = predecessor[task]
        if source >= 0:
            chain_of[task] = chain_of[source]
            offset[task] = offset[source] + durations[source]


def _build_graph(
    graph: StepGraph, chain_of: IntArray, offset: IntArray, heads: IntArray, source: IntArray, target: IntArray
) -> StepGraph:
    """Return the graph of chains, which start with the tasks ``heads``, from edges of tasks."""
    count = len(heads)
    is_crossing = chain_of[source] != chain_of[target]
    target_chain, source_chain = chain_of[target[is_crossing]], chain_of[source[is_crossing]]
    edge_order = np.lexsort((target_chain, source_chain))
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(source_chain, minlength=count), out=start[1:])
    durations = np.zeros(count, np.int64)
    np.maximum.at(durations, chain_of, offset + graph.durations)
    flow = graph.flow[heads]
    return StepGraph(
        start,
        target_chain[edge_order],
        np.bincount(target_chain, minlength=count),
        durations,
        np.where(flow >= 0, graph.latencies[heads], durations),
        flow,
        graph.bundles,
        graph.capacity,
        graph.tenants,
    )
