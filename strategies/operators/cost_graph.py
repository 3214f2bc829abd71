"""The cost graph of operators: time and memory of every choice, as whole numbers, and reductions of the graph.

A node is an operator and chooses one of its shardings. A choice takes time of its own, and every edge takes time that
depends on the choices at its two ends. Some of the memory of a choice is kept through the step, the rest is transient:
it is there only while the node runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr

IntArray = NDArray[np.int64]
MAX_SUM = 2**62
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
    kept_bytes: tuple[IntArray, ...]
    transient_bytes: tuple[IntArray, ...]
    edges: tuple[Edge, ...]
    copies: tuple[int, ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        lengths = {len(self.times), len(self.kept_bytes), len(self.transient_bytes), len(self.copies)}
        if len(lengths) != 1:
            raise ValueError(f"times, kept, transient and copies have one entry a node, got lengths {sorted(lengths)}")
        if not self.times:
            raise ValueError("a cost graph has at least one node")
        for node, costs in enumerate(zip(self.times, self.kept_bytes, self.transient_bytes, strict=True)):
            _check_node(node, costs)
        for edge in self.edges:
            _check_edge(edge, self.times)
        self._check_copies()
        max_bytes = self.max_kept + sum(int(node_bytes.max()) for node_bytes in self.transient_bytes)
        for name, total in (("ticks", self.max_ticks), ("bytes", max_bytes)):
            if total >= MAX_SUM:
                raise ValueError(f"the dearest choices together stay under 2**62 {name}, got {total}")

    def _check_copies(self) -> None:
        representatives: dict[int, int] = {}
        for node, number in enumerate(self.copies):
            representative = representatives.setdefault(number, node)
            columns = (self.times, self.kept_bytes, self.transient_bytes)
            pairs = ((column[node], column[representative]) for column in columns)
            if number != -1 and not all(costs is other or np.array_equal(costs, other) for costs, other in pairs):
                raise ValueError(f"nodes of one class have equal costs, node {node} and node {representative} differ")

    @cached_property
    def max_ticks(self) -> int:
        """An upper bound of the ticks of any choice."""
        return sum(int(times.max()) for times in (*self.times, *(edge.times for edge in self.edges)))

    @cached_property
    def max_kept(self) -> int:
        """The most bytes that any choice keeps."""
        return sum(int(node_bytes.max()) for node_bytes in self.kept_bytes)

    @cached_property
    def node_edges(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node the edges that touch it."""
        result: list[list[Edge]] = [[] for _ in self.times]
        for edge in self.edges:
            result[edge.source].append(edge)
            result[edge.target].append(edge)
        return tuple(map(tuple, result))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of every node."""
        return tuple(len(node_times) for node_times in self.times)

    def time(self, choice: Sequence[int]) -> int:
        """Return the ticks of a step in which every node runs as ``choice`` says."""
        node_time = sum(int(node_times[index]) for node_times, index in zip(self.times, choice, strict=True))
        return node_time + sum(int(edge.times[choice[edge.source], choice[edge.target]]) for edge in self.edges)

    def memory(self, choice: Sequence[int]) -> int:
        """Return the bytes of a choice for every node: the sum of what is kept, and the largest transient part."""
        return self.count_kept(choice) + self.find_max_transient(choice)

    def count_kept(self, choice: Sequence[int]) -> int:
        """Return the bytes that a choice for every node keeps through the step."""
        return sum(int(node_bytes[index]) for node_bytes, index in zip(self.kept_bytes, choice, strict=True))

    def find_max_transient(self, choice: Sequence[int]) -> int:
        """Return the largest transient bytes of a choice for every node."""
        return max(int(node_bytes[index]) for node_bytes, index in zip(self.transient_bytes, choice, strict=True))


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for every node that fits in memory, with its ticks and bytes.

    Every choice that fits takes at least ``bound`` ticks. ``price`` are the ticks saved by one more byte of memory,
    over the next bytes above the limit; None where it is not known. ``was_interrupted`` says that the user stopped the
    search: the choice is the best found until then.
    """

    choice: tuple[int, ...]
    time: int
    memory: int
    bound: int
    price: float | None = None
    was_interrupted: bool = False

    __repr__ = brief_repr()

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

    __repr__ = brief_repr()


def find_leanest_choice(graph: CostGraph) -> tuple[int, ...]:
    """Return the choice that needs least memory, exactly.

    Edges take no memory. So under a given ceiling of transient bytes every node takes, of its choices below the
    ceiling, the one that keeps fewest bytes; every size of transient bytes is tried as the ceiling.
    """
    least_level = max(int(node_bytes.min()) for node_bytes in graph.transient_bytes)
    levels = np.unique(np.concatenate(graph.transient_bytes))
    levels = levels[levels >= least_level]
    total_bytes = levels.copy()
    for kept_bytes, transient_bytes in zip(graph.kept_bytes, graph.transient_bytes, strict=True):
        # the fewest bytes that the node keeps within each level
        order = np.argsort(transient_bytes, kind="stable")
        least_bytes = np.minimum.accumulate(kept_bytes[order])
        total_bytes += least_bytes[np.searchsorted(transient_bytes[order], levels, side="right") - 1]
    level, choice = int(levels[int(np.argmin(total_bytes))]), list[int]()
    for kept_bytes, transient_bytes in zip(graph.kept_bytes, graph.transient_bytes, strict=True):
        candidates = np.flatnonzero(transient_bytes <= level)
        choice.append(int(candidates[np.argmin(kept_bytes[candidates])]))
    return tuple(choice)


def compute_time_bound(graph: CostGraph) -> int:
    """Return a lower bound in ticks of every choice: the sum of the least time of every node and every edge."""
    return sum(int(times.min()) for times in (*graph.times, *(edge.times for edge in graph.edges)))


def find_shortfall(graph: CostGraph, limit: int | None) -> Shortfall | None:
    """Return the proof that nothing fits within ``limit`` bytes, None if something does."""
    if limit is None:
        return None
    choice = find_leanest_choice(graph)
    memory = graph.memory(choice)
    return Shortfall(choice, memory, limit) if memory > limit else None


def merge_parallel_edges(graph: CostGraph) -> CostGraph:
    """Return the graph with parallel edges added up to one, and edges in order of their nodes."""
    sums: dict[tuple[int, int], IntArray] = {}
    for source, target, times in graph.edges:
        edge_sum = sums.get((source, target))
        sums[source, target] = times if edge_sum is None else edge_sum + times
    edges = tuple(Edge(*ends, times) for ends, times in sorted(sums.items(), key=lambda item: item[0]))
    return CostGraph(graph.times, graph.kept_bytes, graph.transient_bytes, edges, graph.copies)


def restrict_choices(graph: CostGraph, allowed_choices: Mapping[int, IntArray]) -> CostGraph:
    """Return the graph in which the nodes of ``allowed_choices`` have only those choices, by index and in that order.

    These nodes are no copies any more: their choices may now differ.
    """

    def restrict_columns(values: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return tuple(
            column[allowed_choices[node]] if node in allowed_choices else column for node, column in enumerate(values)
        )

    def restrict_edge(edge: Edge) -> Edge:
        ends = [allowed_choices.get(node, np.arange(graph.sizes[node])) for node in edge[:2]]
        return edge._replace(times=edge.times[np.ix_(*ends)])

    edges = (edge if allowed_choices.keys().isdisjoint(edge[:2]) else restrict_edge(edge) for edge in graph.edges)
    times, kept_bytes, transient_bytes = map(restrict_columns, (graph.times, graph.kept_bytes, graph.transient_bytes))
    copies = tuple(-1 if node in allowed_choices else number for node, number in enumerate(graph.copies))
    return CostGraph(times, kept_bytes, transient_bytes, tuple(edges), copies)


def _check_node(node: int, costs: tuple[IntArray, IntArray, IntArray]) -> None:
    for name, column in zip(("times", "kept", "transient"), costs, strict=True):
        if column.ndim != 1 or not len(column) or len(column) != len(costs[0]):
            raise ValueError(f"node {node}: {name} has one entry a choice, at least one, got shape {column.shape}")
        _check_numbers(f"node {node}: {name}", column)


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


def list_needed_choices(graph: CostGraph, memory: bool) -> tuple[IntArray, ...]:
    """Return per node the choices that suffice: they still contain an optimal choice of the graph.

    A choice is not needed if another one of its node is no slower whatever the neighbours choose (Desmet et al.,
    "The dead-end elimination theorem", Nature 1992, in the form of Goldstein 1994), and, where ``memory`` is limited,
    needs no more of it.
    """
    allowed_choices = [np.arange(size) for size in graph.sizes]
    for node in range(len(allowed_choices)):
        allowed_choices[node] = _list_undominated(graph, node, allowed_choices, memory)
    return tuple(allowed_choices)


def _list_undominated(graph: CostGraph, node: int, allowed_choices: Sequence[IntArray], memory: bool) -> IntArray:
    choices = allowed_choices[node]
    times = graph.times[node][choices]
    max_excess = times[:, None] - times  # the most that the row takes longer than the column
    for source, target, table in graph.node_edges[node]:
        edge_times = table[np.ix_(allowed_choices[source], allowed_choices[target])]
        edge_times = edge_times if source == node else edge_times.T
        max_excess = max_excess + (edge_times[:, None] - edge_times).max(axis=-1)
    dominance = max_excess <= 0
    for choice_bytes in (graph.kept_bytes[node][choices], graph.transient_bytes[node][choices]) if memory else ():
        dominance &= choice_bytes[:, None] <= choice_bytes
    # one by one against those still alive, so that of choices that beat each other one remains
    is_alive = np.ones(len(choices), dtype=np.bool_)
    for index in range(len(choices)):
        is_alive[index] = False
        is_alive[index] = not dominance[is_alive, index].any()
    result: IntArray = choices[is_alive]
    return result


def tie_copies(graph: CostGraph) -> tuple[CostGraph, tuple[int, ...]]:
    """Return the graph in which all copies choose alike, and for every node its index in that graph."""
    members: dict[tuple[bool, int], list[int]] = {}
    for node, number in enumerate(graph.copies):
        members.setdefault((True, node) if number == -1 else (False, number), []).append(node)
    groups = sorted(members.values())
    positions = {node: index for index, group in enumerate(groups) for node in group}
    times = [graph.times[group[0]] * len(group) for group in groups]
    edges: list[Edge] = []
    for source, target, table in graph.edges:
        source_group, target_group = positions[source], positions[target]
        # copies choose alike, so an edge between two copies takes the time of equal choices
        if source_group == target_group:
            times[source_group] = times[source_group] + table.diagonal()
        else:
            is_forward = source_group < target_group
            ends = (source_group, target_group) if is_forward else (target_group, source_group)
            edges.append(Edge(*ends, table if is_forward else table.T))
    kept_bytes = tuple(graph.kept_bytes[group[0]] * len(group) for group in groups)
    transient_bytes = tuple(graph.transient_bytes[group[0]] for group in groups)
    result = CostGraph(tuple(times), kept_bytes, transient_bytes, tuple(edges), (-1,) * len(groups))
    return merge_parallel_edges(result), tuple(positions[node] for node in range(len(graph.copies)))
