"""Two exact dynamic programs over a cost graph: bucket elimination without a memory limit, a sweep within one.

Bucket elimination (Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 1999)
eliminates one node after another: it adds up all tables that mention the node and minimises the node out, which
leaves a table over the node's neighbours. It is exact for any graph; its largest table has an entry for every
combination of choices of a node and its neighbours.

Equal tables share one number. An elimination of the same numbers in the same arrangement as an earlier one has the
same result, so identical layers are eliminated once, and a chain of equal layers by doubling, although nothing tells
the algorithm that there are layers.

The sweep finds the fastest choice within a budget of bytes. It visits the nodes in order and keeps a list of partial
choices for each state of the frontier: the nodes already visited that still have an edge to a node ahead. Partial
choices of one state differ only in time and memory, so those that another one beats in both are dropped (Nemhauser
and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969). A price of memory bounds
the cost of the nodes ahead: partial choices that cannot become faster than the best known choice are dropped too.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.operators.cost_graph import MAX_SUM, CostGraph, Edge, IntArray

MAX_TABLE_ENTRIES = 2**25
MANY_ENTRIES = 2**16
"""Entries of the largest table beyond which the minimum-fill order is tried as well: it costs more to find."""


class EntangledGraphError(ValueError):
    """A graph whose elimination would need tables of too many entries."""


class Factor(NamedTuple):
    """A table over the choices of the nodes in ``scope``, in that order, after a chain of ``level`` eliminations."""

    table: int
    scope: tuple[int, ...]
    level: int


class Bucket(NamedTuple):
    """A distinct elimination: it adds ``inputs`` to a table of ``num_axes`` axes and minimises the last axis out.

    ``inputs`` are pairs of a table's number and the axes of the sum that the table spans; ``output`` is the number of
    the resulting table.
    """

    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    num_axes: int
    output: int


@dataclass(frozen=True, eq=False)
class Buckets:
    """The eliminations of a graph.

    Parameters
    ----------
    classes
        Per node the number of its costs; nodes of equal costs have the same number.
    nodes, edges
        Per distinct table a node, or an edge, that has it, and the number of the table.
    distinct_buckets
        The distinct eliminations, in order.
    eliminations
        Per node, in order of elimination: the node, the index of its bucket, and the neighbours on whose choices the
        best choice of the node depends.
    constants
        Numbers of the final tables, over no node: their sum is the minimum.
    """

    classes: tuple[int, ...]
    nodes: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int], ...]
    distinct_buckets: tuple[Bucket, ...]
    eliminations: tuple[tuple[int, int, tuple[int, ...]], ...]
    constants: tuple[int, ...]

    def find_minimum(self, costs: Sequence[IntArray], edges: Sequence[IntArray]) -> tuple[int, tuple[int, ...]]:
        """Return the least sum of tables, and a choice for every node that attains it.

        ``costs`` and ``edges`` have the costs of every distinct node and edge table, in order of the fields ``nodes``
        and ``edges``.
        """
        tables: dict[int, IntArray] = {number: table for (_, number), table in zip(self.nodes, costs, strict=True)}
        tables |= {number: table for (_, number), table in zip(self.edges, edges, strict=True)}
        best_choices: list[IntArray] = []
        for bucket in self.distinct_buckets:
            total = _add_tables(bucket, tables)
            best_choices.append(total.argmin(axis=-1))
            tables[bucket.output] = np.take_along_axis(total, best_choices[-1][..., None], axis=-1)[..., 0]
        # backwards, so that the neighbours on which a node depends have chosen before it
        choice = [0] * len(self.eliminations)
        for node, number, neighbours in reversed(self.eliminations):
            choice[node] = int(best_choices[number][tuple(choice[neighbour] for neighbour in neighbours)])
        return sum(int(tables[number]) for number in self.constants), tuple(choice)


def _add_tables(bucket: Bucket, tables: dict[int, IntArray]) -> IntArray:
    total: IntArray | None = None
    for number, axes in bucket.inputs:
        order = sorted(range(len(axes)), key=axes.__getitem__)
        broadcast = tuple(slice(None) if axis in axes else None for axis in range(bucket.num_axes))
        table = tables[number].transpose(order)[broadcast]
        total = table if total is None else total + table
    assert total is not None
    return total


def build_buckets(graph: CostGraph) -> Buckets:
    """Return the eliminations of a graph: smallest table first, or minimum fill where that keeps tables smaller.

    Raises
    ------
    EntangledGraphError
        If a table would need more than 2**25 entries.
    """
    builder = _Builder(graph, min_fill=False)
    builder.run()
    if builder.max_entries > MANY_ENTRIES:
        fill_builder = _Builder(graph, min_fill=True)
        fill_builder.run()
        builder = min(builder, fill_builder, key=lambda candidate: candidate.max_entries)
    if builder.max_entries > MAX_TABLE_ENTRIES:
        raise EntangledGraphError(
            f"a table of the elimination has at most {MAX_TABLE_ENTRIES} entries, it needs {builder.max_entries}"
        )
    return builder.build_result()


class _Builder:
    """The remaining factors during elimination, and the key that orders the nodes to eliminate.

    With ``min_fill`` the node whose elimination adds fewest entries of new edges comes first.
    """

    def __init__(self, graph: CostGraph, min_fill: bool) -> None:
        self.sizes, self.min_fill, self.max_entries = graph.sizes, min_fill, 0
        self.numbers: dict[object, int] = {}
        self.nodes: dict[int, int] = {}
        self.edges: dict[int, int] = {}
        self.buckets: dict[object, tuple[int, Bucket]] = {}
        self.eliminations: list[tuple[int, int, tuple[int, ...]]] = []
        self.constants: list[int] = []
        self.factors: list[set[Factor]] = [set() for _ in graph.times]
        self.multiplicity: dict[Factor, int] = {}
        columns = zip(graph.times, graph.kept_bytes, graph.transient_bytes, strict=True)
        self.classes = tuple(self._assign_number(tuple(costs.tobytes() for costs in row)) for row in columns)
        for node, number in enumerate(self.classes):
            self.nodes.setdefault(number, node)
            self._add_factor(Factor(number, (node,), 0))
        for index, (source, target, times) in enumerate(graph.edges):
            number = self._assign_number((times.tobytes(), self.classes[source], self.classes[target]))
            self.edges.setdefault(number, index)
            self._add_factor(Factor(number, (source, target), 0))

    def run(self) -> None:
        heap = [(self._compute_key(node), node) for node in range(len(self.sizes))]
        keys = [key for key, _ in heap]
        heapq.heapify(heap)
        is_eliminated = [False] * len(self.sizes)
        while heap:
            key, node = heapq.heappop(heap)
            # a node is pushed again whenever its key changes; older entries of the heap are stale
            if is_eliminated[node] or key != keys[node]:
                continue
            is_eliminated[node] = True
            for neighbour in self._eliminate_node(node):
                keys[neighbour] = self._compute_key(neighbour)
                heapq.heappush(heap, (keys[neighbour], neighbour))

    def build_result(self) -> Buckets:
        return Buckets(
            self.classes,
            tuple((node, number) for number, node in self.nodes.items()),
            tuple((edge, number) for number, edge in self.edges.items()),
            tuple(bucket for _, bucket in self.buckets.values()),
            tuple(self.eliminations),
            tuple(self.constants),
        )

    def _assign_number(self, content: object) -> int:
        return self.numbers.setdefault(content, len(self.numbers))

    def _add_factor(self, factor: Factor) -> None:
        self.multiplicity[factor] = self.multiplicity.get(factor, 0) + 1
        for node in factor.scope:
            self.factors[node].add(factor)

    def _list_neighbours(self, node: int) -> tuple[int, ...]:
        return tuple(sorted({neighbour for factor in self.factors[node] for neighbour in factor.scope} - {node}))

    def _compute_key(self, node: int) -> tuple[int, int, int, int, int]:
        """Return the key by which nodes are eliminated, least first.

        A node with at most two neighbours never widens the tables of others, so the size of its table does not count.
        Among such nodes those that fewest eliminations have touched come first: this joins equal layers in pairs,
        then pairs of pairs, whose tables are then equal too.
        """
        neighbours = self._list_neighbours(node)
        factors = self.factors[node]
        entries = self.sizes[node] * prod(self.sizes[neighbour] for neighbour in neighbours)
        level = max(factor.level for factor in factors)
        arrangement = tuple(sorted((factor.table, factor.scope.index(node)) for factor in factors))
        fill = self._count_fill(neighbours) if self.min_fill else 0
        return fill, entries if len(neighbours) > 2 else 0, level, self._assign_number(arrangement), node

    def _count_fill(self, neighbours: tuple[int, ...]) -> int:
        known_pairs = {
            pair for node in neighbours for factor in self.factors[node] for pair in combinations(factor.scope, 2)
        }
        return sum(self.sizes[i] * self.sizes[j] for i, j in combinations(neighbours, 2) if (i, j) not in known_pairs)

    def _eliminate_node(self, node: int) -> tuple[int, ...]:
        """Eliminate a node and return the nodes whose keys may have changed."""
        neighbours = self._list_neighbours(node)
        scope = (*neighbours, node)
        self.max_entries = max(self.max_entries, prod(self.sizes[scope_node] for scope_node in scope))
        # sorted, so that equal layers add equal tables in one order and find one bucket
        factors = sorted(
            self.factors[node], key=lambda candidate: (len(candidate.scope), candidate.scope, candidate.table)
        )
        inputs: list[tuple[int, tuple[int, ...]]] = []
        for factor in factors:
            axes = tuple(scope.index(scope_node) for scope_node in factor.scope)
            inputs += [(factor.table, axes)] * self.multiplicity.pop(factor)
            for scope_node in factor.scope:
                self.factors[scope_node].discard(factor)
        number, bucket = self._find_bucket(tuple(inputs), len(scope))
        self.eliminations.append((node, number, neighbours))
        if not neighbours:
            self.constants.append(bucket.output)
            return ()
        self._add_factor(Factor(bucket.output, neighbours, 1 + max(factor.level for factor in factors)))
        changed_nodes = set(neighbours)
        if self.min_fill:
            changed_nodes.update(*map(self._list_neighbours, neighbours))
        return tuple(sorted(changed_nodes))

    def _find_bucket(self, inputs: tuple[tuple[int, tuple[int, ...]], ...], num_axes: int) -> tuple[int, Bucket]:
        entry = self.buckets.get(inputs)
        if entry is None:
            entry = len(self.buckets), Bucket(inputs, num_axes, self._assign_number(("step", inputs)))
            self.buckets[inputs] = entry
        return entry


BoolArray = NDArray[np.bool_]


def find_undominated(group: IntArray, *criteria: IntArray) -> IntArray:
    """Return the indices of rows that no other row of their group dominates, one of equal rows, in order of group.

    ``group`` has the number of each row's group, ``criteria`` are one to three arrays, all of shape (rows,) and none
    negative; less is better. The third should have few distinct values: the work grows with their number.

    >>> find_undominated(np.array([0, 0, 0, 1]), np.array([1, 2, 3, 9]), np.array([5, 4, 4, 9])).tolist()
    [1, 0, 3]
    """
    first_criterion, second_criterion = criteria[0], criteria[1] if len(criteria) > 1 else np.zeros_like(criteria[0])
    levels = criteria[2] if len(criteria) > 2 else np.zeros_like(first_criterion)
    order = np.lexsort((first_criterion, second_criterion, levels, group))
    # rows that a row of their own level beats go first: the loop over levels then has fewer rows
    order = order[_find_leaders(_number_groups(group[order], levels[order]), first_criterion[order])]
    order = order[np.lexsort((levels[order], first_criterion[order], second_criterion[order], group[order]))]
    group, first_criterion, levels = group[order], first_criterion[order], levels[order]
    keep_mask = np.zeros(len(order), dtype=np.bool_)
    for level in np.unique(levels):
        rows = np.flatnonzero(levels <= level)
        is_leading = _find_leaders(group[rows], first_criterion[rows])
        keep_mask[rows[is_leading & (levels[rows] == level)]] = True
    result: IntArray = order[keep_mask]
    return result


def _number_groups(group: IntArray, levels: IntArray) -> IntArray:
    """Return for every row the number of its pair of group and level; rows are sorted by both."""
    return np.cumsum(np.r_[True, (group[1:] != group[:-1]) | (levels[1:] != levels[:-1])][: len(group)])


def _find_leaders(group: IntArray, values: IntArray) -> BoolArray:
    """Return which rows have a value below all earlier rows of their group; the rows of a group are adjacent."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    starts = np.r_[True, group[1:] != group[:-1]]
    group_number = np.cumsum(starts) - 1
    # ranks in place of values where the shift below would leave 64 bits: only their order matters
    if (int(values.max()) + 1) * int(group_number[-1] + 1) >= MAX_SUM:
        values = np.unique(values, return_inverse=True)[1].astype(np.int64)
    shifted_values = values - group_number * (int(values.max()) + 1)  # every later group lies below all earlier ones
    running_min = np.minimum.accumulate(shifted_values)
    result: BoolArray = np.r_[True, shifted_values[1:] < running_min[:-1]]
    return result


MAX_SWEEP_ENTRIES = 2**22
"""Entries of the largest table of a sweep; a graph that needs more keeps the bound of its price."""


class Price(NamedTuple):
    """The price of memory: ``ticks`` for ``num_bytes`` bytes, in whole numbers so that bounds are exact."""

    ticks: int
    num_bytes: int

    def bound(self, min_priced: int, budget: int) -> int:
        """Return the least ticks of any choice that keeps at most ``budget`` bytes.

        ``min_priced`` is the least of ``num_bytes`` * time + ``ticks`` * kept bytes over all choices.
        """
        return -((self.ticks * budget - min_priced) // self.num_bytes)


class SweepResult(NamedTuple):
    """The fastest choice of a sweep, None if none is fast enough; no choice takes fewer ticks than ``bound``."""

    choice: tuple[int, ...] | None
    bound: int


class Labels(NamedTuple):
    """Partial choices: number of the frontier's state, ticks and kept bytes so far; all of shape (labels,)."""

    state: IntArray
    times: IntArray
    kept_bytes: IntArray


@dataclass(frozen=True, eq=False)
class Sweep:
    """A graph in the order of its nodes, with the least priced time ahead of each state of the frontier."""

    graph: CostGraph
    budget: int
    price: Price

    @cached_property
    def incoming_edges(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node its edges from earlier nodes."""
        result: list[list[Edge]] = [[] for _ in self.graph.times]
        for edge in self.graph.edges:
            result[edge.target].append(edge)
        return tuple(tuple(node_edges) for node_edges in result)

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """Per position in the order the earlier nodes that have an edge to a node at or after it."""
        last_use = list(range(len(self.graph.times)))
        for source, target, _ in self.graph.edges:
            last_use[source] = max(last_use[source], target)
        result: list[tuple[int, ...]] = [()]
        for node in range(len(last_use)):
            result.append(tuple(earlier_node for earlier_node in (*result[-1], node) if last_use[earlier_node] > node))
        return tuple(result)

    @property
    def max_entries(self) -> int:
        """Entries of the largest table of a sweep."""
        scopes = ((*frontier, node) for node, frontier in enumerate(self.frontiers[:-1]))
        return max(prod(self.graph.sizes[node] for node in scope) for scope in scopes)

    @cached_property
    def tail_times(self) -> tuple[IntArray, ...]:
        """Per position, over the choices of its frontier, the least priced time of all nodes at or after it."""
        result = [np.zeros((), dtype=np.int64)]
        for node in range(len(self.graph.times) - 1, -1, -1):
            scope = (*self.frontiers[node], node)
            priced_times = (
                self.price.num_bytes * self.graph.times[node] + self.price.ticks * self.graph.kept_bytes[node]
            )
            total = _broadcast_table(result[-1], self.frontiers[node + 1], scope) + priced_times
            for edge in self.incoming_edges[node]:
                total = total + self.price.num_bytes * _broadcast_table(edge.times, (edge.source, node), scope)
            result.append(total.min(axis=-1))
        return tuple(reversed(result))

    @cached_property
    def tail_bytes(self) -> IntArray:
        """Per position the fewest bytes that all nodes at or after it keep."""
        min_bytes = np.array([int(node_bytes.min()) for node_bytes in self.graph.kept_bytes], dtype=np.int64)
        result: IntArray = np.r_[np.cumsum(min_bytes[::-1])[::-1], 0]
        return result

    def find_below(self, ticks: int, max_labels: int) -> SweepResult:
        """Return the fastest choice that takes fewer than ``ticks``.

        At most ``max_labels`` partial choices are kept at a node.
        """
        partial_labels = Labels(*(np.zeros(1, dtype=np.int64) for _ in range(3)))
        history: list[tuple[IntArray, IntArray]] = []
        bound = ticks
        for node in range(len(self.graph.times)):
            extended_labels, min_priced = self._extend_labels(node, partial_labels)
            # the highest priced time at which a choice within the budget may still take fewer ticks than the bound
            priced_limit = self.price.num_bytes * (bound - 1) + self.price.ticks * self.budget
            has_memory = extended_labels.kept_bytes + self.tail_bytes[node + 1] <= self.budget
            fitting_rows = np.flatnonzero((min_priced <= priced_limit) & has_memory)
            rows = fitting_rows[find_undominated(*(column[fitting_rows] for column in extended_labels))]
            # labels that are dropped for want of room lower the bound to the least that they promised
            if len(rows) > max_labels:
                order = np.argpartition(min_priced[rows], max_labels)
                bound = min(bound, self.price.bound(int(min_priced[rows[order[max_labels]]]), self.budget))
                rows = rows[np.sort(order[:max_labels])]
            history.append((rows // self.graph.sizes[node], rows % self.graph.sizes[node]))
            partial_labels = Labels(*(column[rows] for column in extended_labels))
        row = int(np.argmin(partial_labels.times)) if len(partial_labels.times) else None
        if row is None or partial_labels.times[row] >= ticks:
            return SweepResult(None, bound)
        return SweepResult(_trace_choice(history, row), min(bound, int(partial_labels.times[row])))

    def _extend_labels(self, node: int, labels: Labels) -> tuple[Labels, IntArray]:
        """Return every label extended by every choice of a node, and their least priced times over the whole graph."""
        frontier, next_frontier = self.frontiers[node], self.frontiers[node + 1]
        shape = tuple(self.graph.sizes[frontier_node] for frontier_node in frontier)
        frontier_choices = dict(zip(frontier, np.unravel_index(labels.state, shape), strict=True)) if frontier else {}
        times = labels.times[:, None] + self.graph.times[node]
        for edge in self.incoming_edges[node]:
            times = times + edge.times[frontier_choices[edge.source]]
        kept_bytes = labels.kept_bytes[:, None] + self.graph.kept_bytes[node]
        state = np.zeros_like(times)
        for earlier_node in next_frontier:
            is_new = earlier_node == node
            choices = np.arange(self.graph.sizes[node]) if is_new else frontier_choices[earlier_node][:, None]
            state = state * self.graph.sizes[earlier_node] + choices
        extended_labels = Labels(state.ravel(), times.ravel(), kept_bytes.ravel())
        priced_times = self.price.num_bytes * extended_labels.times + self.price.ticks * extended_labels.kept_bytes
        return extended_labels, priced_times + self.tail_times[node + 1].ravel()[extended_labels.state]


def _broadcast_table(table: IntArray, scope: tuple[int, ...], full_scope: tuple[int, ...]) -> IntArray:
    result: IntArray = table[tuple(slice(None) if node in scope else None for node in full_scope)]
    return result


def _trace_choice(history: list[tuple[IntArray, IntArray]], row: int) -> tuple[int, ...]:
    choice: list[int] = []
    for parents, choices in reversed(history):
        choice.append(int(choices[row]))
        row = int(parents[row])
    return tuple(reversed(choice))
