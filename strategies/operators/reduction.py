"""Smaller graphs: without choices that are never needed, and with the copies of a layer tied together."""

from collections.abc import Sequence

import numpy as np

from strategies.operators.cost_graph import CostGraph, Edge, IntArray, merge_parallel_edges


def needed(graph: CostGraph, memory: bool) -> tuple[IntArray, ...]:
    """Return per node choices among which one of the best choices of the graph remains.

    A choice is not needed if another one of its node is no slower whatever the neighbours choose (Desmet et al.,
    "The dead-end elimination theorem", Nature 1992, in the form of Goldstein 1994), and needs no more memory if
    ``memory`` counts.
    """
    allowed = [np.arange(size) for size in graph.sizes]
    around: list[list[Edge]] = [[] for _ in allowed]
    for edge in graph.edges:
        around[edge.source].append(edge)
        around[edge.target].append(edge)
    for node in range(len(allowed)):
        allowed[node] = _undominated(graph, node, around[node], allowed, memory)
    return tuple(allowed)


def _undominated(
    graph: CostGraph, node: int, edges: Sequence[Edge], allowed: Sequence[IntArray], memory: bool
) -> IntArray:
    mine = allowed[node]
    times = graph.times[node][mine]
    worst = times[:, None] - times  # the most that the row takes longer than the column
    for source, target, table in edges:
        seen = table[np.ix_(allowed[source], allowed[target])]
        seen = seen if source == node else seen.T
        worst = worst + (seen[:, None] - seen).max(axis=-1)
    beats = worst <= 0
    for bytes_needed in (graph.kept[node][mine], graph.transient[node][mine]) if memory else ():
        beats &= bytes_needed[:, None] <= bytes_needed
    alive = np.ones(len(mine), dtype=np.bool_)
    for index in range(len(mine)):
        alive[index] = False
        alive[index] = not beats[alive, index].any()
    result: IntArray = mine[alive]
    return result


def tied(graph: CostGraph) -> tuple[CostGraph, tuple[int, ...]]:
    """Return the graph in which all copies choose alike, and for every node its place in that graph."""
    members: dict[tuple[bool, int], list[int]] = {}
    for node, number in enumerate(graph.copies):
        members.setdefault((True, node) if number == -1 else (False, number), []).append(node)
    groups = sorted(members.values())
    place = {node: index for index, group in enumerate(groups) for node in group}
    times = [graph.times[group[0]] * len(group) for group in groups]
    edges: list[Edge] = []
    for source, target, table in graph.edges:
        first, second = place[source], place[target]
        if first == second:
            times[first] = times[first] + table.diagonal()
        else:
            edges.append(Edge(first, second, table) if first < second else Edge(second, first, table.T))
    kept = tuple(graph.kept[group[0]] * len(group) for group in groups)
    transient = tuple(graph.transient[group[0]] for group in groups)
    result = CostGraph(tuple(times), kept, transient, tuple(edges), (-1,) * len(groups))
    return merge_parallel_edges(result), tuple(place[node] for node in range(len(graph.copies)))
