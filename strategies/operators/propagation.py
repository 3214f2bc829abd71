"""Propagation: choices that are made spread along edges, each time to what moves least.

References
----------
.. [1] MindSpore, ``frontend/parallel/auto_parallel/graph_costmodel.cc`` (``StrategyPropagate``, ``BFS``) and
   ``edge_costmodel.cc``.
"""

from collections import deque
from collections.abc import Mapping

from strategies.operators.cost_graph import CostGraph, IntArray, merge_parallel_edges


def propagate(graph: CostGraph, seeds: Mapping[int, int]) -> tuple[int, ...]:
    """Return a choice for every node, given those of some: breadth first from each seed, in their order.

    A neighbour takes the choice with the least ticks on the edge by which it is reached, of equal ones that with the
    fewest of its own, and the first of these. One with several nodes before it is reached from them only when all
    have chosen; the edges to the others do not count. What no seed reaches takes its first choice.
    """
    edges = merge_parallel_edges(graph).edges
    forward: dict[int, list[tuple[int, IntArray]]] = {}
    backward: dict[int, list[tuple[int, IntArray]]] = {}
    for source, target, times in edges:
        forward.setdefault(source, []).append((target, times))
        backward.setdefault(target, []).append((source, times))
    chosen = dict(seeds)
    for seed in seeds:
        waiting = deque([seed])
        while waiting:
            node = waiting.popleft()
            reached = [(other, times[chosen[node]], True) for other, times in forward.get(node, ())]
            reached += [(other, times[:, chosen[node]], False) for other, times in backward.get(node, ())]
            for other, moved, ahead in reached:
                ready = not ahead or all(each in chosen for each, _ in backward[other])
                if other not in chosen and ready:
                    own = graph.times[other]
                    chosen[other] = min(range(len(own)), key=lambda each: (int(moved[each]), int(own[each])))
                    waiting.append(other)
    return tuple(chosen.get(node, 0) for node in range(len(graph.times)))
