"""The cost graph of operators: time and memory of every choice, as whole numbers, and reductions of the graph.

A node is an operator and chooses one of its shardings. A choice takes time of its own, and every edge takes time that
depends on the choices at its two ends. Some of the memory of a choice is kept through the step, the rest is transient:
it is there only while the node runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief

IntArray = NDArray[np.int64]
MOST = 2**62
"""No sum over all nodes and edges reaches this, so that sums of 64-bit integers are exact."""


class Edge(NamedTuple):
    """A redistribution between two nodes: its ticks, of shape (choices of source, choices of target)."""

    source: int
    target: int
    times: IntArray


@dataclass(frozen=True, eq=False)
class CostGraph:
    """Ticks and bytes of every choice of every node.

    Parameters
    ----------
    times
        Per node the ticks of each choice, its own collectives included.
    kept_bytes
        Per node the bytes of each choice that stay through the step.
    transient_bytes
        Per node the bytes of each choice that are there only while the node runs.
    edges
        Redistributions; the source comes before the target. Several may connect the same two nodes.
    copies
        Per node the number of its class: nodes of one class are the same operator in copies of a layer. -1 is none.

    Raises
    ------
    ValueError
        If there is no node, lengths or shapes disagree, a cost is negative, an edge does not point forward,
        nodes of one class differ, or sums may leave 64 bits.
    """

    times: tuple[IntArray, ...]
    kept: tuple[IntArray, ...]
    transient: tuple[IntArray, ...]
    edges: tuple[Edge, ...]
    copies: tuple[int, ...]

    __repr__ = brief()

    def __post_init__(self) -> None:
        lengths = {len(self.times), len(self.kept), len(self.transient), len(self.copies)}
        if len(lengths) != 1:
            raise ValueError(f"times, kept, transient and copies have one entry a node, got lengths {sorted(lengths)}")
        if not self.times:
            raise ValueError("a cost graph has at least one node")
        for node, costs in enumerate(zip(self.times, self.kept, self.transient, strict=True)):
            _check_node(node, costs)
        for edge in self.edges:
            _check_edge(edge, self.times)
        self._check_copies()
        for name, most in (("ticks", self._most_ticks), ("bytes", self._most_bytes)):
            if most >= MOST:
                raise ValueError(f"the dearest choices together stay under 2**62 {name}, got {most}")

    def _check_copies(self) -> None:
        first: dict[int, int] = {}
        for node, number in enumerate(self.copies):
            other = first.setdefault(number, node)
            if number != -1 and not _same(self, node, other):
                raise ValueError(f"nodes of one class have equal costs, node {node} and node {other} differ")

    @property
    def _most_ticks(self) -> int:
        return sum(int(each.max()) for each in self.times) + sum(int(edge.times.max()) for edge in self.edges)

    @property
    def _most_bytes(self) -> int:
        return sum(int(each.max()) for column in (self.kept, self.transient) for each in column)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of every node."""
        return tuple(len(each) for each in self.times)

    def time(self, choice: Sequence[int]) -> int:
        """Return the ticks of a step in which every node runs as ``choice`` says."""
        nodes = sum(int(each[index]) for each, index in zip(self.times, choice, strict=True))
        return nodes + sum(int(edge.times[choice[edge.source], choice[edge.target]]) for edge in self.edges)

    def memory(self, choice: Sequence[int]) -> int:
        """Return the bytes of a choice for every node: the sum of what is kept, and the largest transient part."""
        kept = sum(int(each[index]) for each, index in zip(self.kept, choice, strict=True))
        return kept + max(int(each[index]) for each, index in zip(self.transient, choice, strict=True))


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for every node that fits in memory, with its ticks and bytes.

    Parameters
    ----------
    bound
        Ticks that every choice that fits takes at least.
    price
        Ticks saved by one more byte of memory, over the next bytes above the limit; None where it is not known.
    was_interrupted
        Whether the user stopped the search: the choice is the best found until then.
    """

    choice: tuple[int, ...]
    time: int
    memory: int
    bound: int
    price: float | None = None
    interrupted: bool = False

    __repr__ = brief()

    @property
    def gap(self) -> float:
        """The fraction by which the time is above the bound; 0 means proven optimal."""
        return 0.0 if self.time == self.bound else self.time / self.bound - 1 if self.bound else float("inf")


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The proof that nothing fits: the choice of least memory, whose bytes are above the limit."""

    choice: tuple[int, ...]
    memory: int
    limit: int

    __repr__ = brief()


def least_memory(graph: CostGraph) -> tuple[int, ...]:
    """Return the choice that needs least memory, exactly.

    Edges take no memory. So under a given ceiling of transient bytes every node takes, of its choices below the
    ceiling, the one that keeps fewest bytes; every size of transient bytes is tried as the ceiling.
    """
    least = max(int(each.min()) for each in graph.transient)
    levels = np.unique(np.concatenate(graph.transient))
    levels = levels[levels >= least]
    kept = np.zeros(len(levels), dtype=np.int64)
    for node in range(len(graph.times)):
        kept += _fewest(graph, node, levels)
    level = int(levels[int(np.argmin(kept + levels))])
    return tuple(_leanest(graph, node, level) for node in range(len(graph.times)))


def _fewest(graph: CostGraph, node: int, levels: IntArray) -> IntArray:
    """Return for each level of transient bytes the fewest bytes that a node keeps within it."""
    order = np.argsort(graph.transient[node], kind="stable")
    fewest = np.minimum.accumulate(graph.kept[node][order])
    result: IntArray = fewest[np.searchsorted(graph.transient[node][order], levels, side="right") - 1]
    return result


def _leanest(graph: CostGraph, node: int, level: int) -> int:
    """Return the choice of a node that keeps fewest bytes, of those within ``level`` transient bytes."""
    within = np.flatnonzero(graph.transient[node] <= level)
    return int(within[np.argmin(graph.kept[node][within])])


def least_time(graph: CostGraph) -> int:
    """Return a lower bound in ticks of every choice: the sum of the least time of every node and every edge."""
    return sum(int(each.min()) for each in graph.times) + sum(int(edge.times.min()) for edge in graph.edges)


def shortfall(graph: CostGraph, limit: int | None) -> Shortfall | None:
    """Return the proof that nothing fits within ``limit`` bytes, None if something does."""
    if limit is None:
        return None
    choice = least_memory(graph)
    memory = graph.memory(choice)
    return Shortfall(choice, memory, limit) if memory > limit else None


def merge_parallel_edges(graph: CostGraph) -> CostGraph:
    """Return the graph with parallel edges added up to one, and edges in order of their nodes."""
    sums: dict[tuple[int, int], IntArray] = {}
    for source, target, times in graph.edges:
        met = sums.get((source, target))
        sums[source, target] = times if met is None else met + times
    edges = tuple(Edge(*ends, times) for ends, times in sorted(sums.items(), key=lambda item: item[0]))
    return CostGraph(graph.times, graph.kept, graph.transient, edges, graph.copies)


def restrict(graph: CostGraph, allowed: Sequence[IntArray]) -> CostGraph:
    """Return the graph in which each node has only its ``allowed_choices``, by index and in that order.

    No nodes are copies any more: their choices may now differ.
    """

    def columns(values: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return tuple(each[index] for each, index in zip(values, allowed, strict=True))

    edges = (Edge(*edge[:2], edge.times[np.ix_(allowed[edge.source], allowed[edge.target])]) for edge in graph.edges)
    times, kept, transient = map(columns, (graph.times, graph.kept, graph.transient))
    return CostGraph(times, kept, transient, tuple(edges), (-1,) * len(graph.copies))


def _same(graph: CostGraph, node: int, other: int) -> bool:
    columns = (graph.times, graph.kept, graph.transient)
    return all(column[node] is column[other] or np.array_equal(column[node], column[other]) for column in columns)


def _check_node(node: int, costs: tuple[IntArray, IntArray, IntArray]) -> None:
    for name, each in zip(("times", "kept", "transient"), costs, strict=True):
        if each.ndim != 1 or not len(each) or len(each) != len(costs[0]):
            raise ValueError(f"node {node}: {name} has one entry a choice, at least one, got shape {each.shape}")
        _check_numbers(f"node {node}: {name}", each)


def _check_edge(edge: Edge, times: tuple[IntArray, ...]) -> None:
    name = f"edge {edge.source} -> {edge.target}"
    if not 0 <= edge.source < edge.target < len(times):
        raise ValueError(f"{name}: 0 <= source < target < {len(times)} nodes")
    shape = (len(times[edge.source]), len(times[edge.target]))
    if edge.times.shape != shape:
        raise ValueError(f"{name}: times have shape {shape}, got {edge.times.shape}")
    _check_numbers(f"{name}: times", edge.times)


def _check_numbers(name: str, values: IntArray) -> None:
    if values.dtype != np.int64:
        raise ValueError(f"{name} are 64-bit integers, got {values.dtype}")
    if int(values.min()) < 0:
        raise ValueError(f"{name} are not negative, got {int(values.min())}")


def needed(graph: CostGraph, memory: bool) -> tuple[IntArray, ...]:
    """Return per node the choices that suffice: they still contain an optimal choice of the graph.

    A choice is not needed if another one of its node is no slower whatever the neighbours choose (Desmet et al.,
    "The dead-end elimination theorem", Nature 1992, in the form of Goldstein 1994), and, where ``memory`` is limited,
    needs no more of it.
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
    # one by one against those still alive, so that of choices that beat each other one remains
    alive = np.ones(len(mine), dtype=np.bool_)
    for index in range(len(mine)):
        alive[index] = False
        alive[index] = not beats[alive, index].any()
    result: IntArray = mine[alive]
    return result


def tied(graph: CostGraph) -> tuple[CostGraph, tuple[int, ...]]:
    """Return the graph in which all copies choose alike, and for every node its index in that graph."""
    members: dict[tuple[bool, int], list[int]] = {}
    for node, number in enumerate(graph.copies):
        members.setdefault((True, node) if number == -1 else (False, number), []).append(node)
    groups = sorted(members.values())
    place = {node: index for index, group in enumerate(groups) for node in group}
    times = [graph.times[group[0]] * len(group) for group in groups]
    edges: list[Edge] = []
    for source, target, table in graph.edges:
        first, second = place[source], place[target]
        # copies choose alike, so an edge between two copies takes the time of equal choices
        if first == second:
            times[first] = times[first] + table.diagonal()
        else:
            edges.append(Edge(first, second, table) if first < second else Edge(second, first, table.T))
    kept = tuple(graph.kept[group[0]] * len(group) for group in groups)
    transient = tuple(graph.transient[group[0]] for group in groups)
    result = CostGraph(tuple(times), kept, transient, tuple(edges), (-1,) * len(groups))
    return merge_parallel_edges(result), tuple(place[node] for node in range(len(graph.copies)))
