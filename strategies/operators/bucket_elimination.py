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

from meshwise.strategies.operators.cost_graph import MOST, CostGraph, Edge, IntArray

MOST_TABLE_ENTRIES = 2**25
MANY_ENTRIES = 2**16
"""Entries of the largest table beyond which the minimum-fill order is tried as well: it costs more to find."""


class Factor(NamedTuple):
    """A table over the choices of the nodes in ``scope``, in that order, after a chain of ``level`` eliminations."""

    table: int
    scope: tuple[int, ...]
    level: int


class Step(NamedTuple):
    """A distinct elimination: it adds ``inputs`` to a table of ``num_axes`` axes and minimises the last axis out.

    ``inputs`` are pairs of a table's number and the axes of the sum that the table spans; ``output`` is the number of
    the resulting table.
    """

    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    rank: int
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
    steps: tuple[Step, ...]
    eliminated: tuple[tuple[int, int, tuple[int, ...]], ...]
    constants: tuple[int, ...]

    def minimum(self, costs: Sequence[IntArray], edges: Sequence[IntArray]) -> tuple[int, tuple[int, ...]]:
        """Return the least sum of tables, and a choice for every node that attains it.

        Parameters
        ----------
        costs
            Per distinct node table, in order of the field ``nodes``, the cost of each choice.
        edges
            Per distinct edge table, in order of the field ``edges``, the costs.
        """
        tables: dict[int, IntArray] = {number: each for (_, number), each in zip(self.nodes, costs, strict=True)}
        tables |= {number: each for (_, number), each in zip(self.edges, edges, strict=True)}
        best: list[IntArray] = []
        for step in self.steps:
            total = _added(step, tables)
            best.append(total.argmin(axis=-1))
            tables[step.output] = np.take_along_axis(total, best[-1][..., None], axis=-1)[..., 0]
        # backwards, so that the neighbours on which a node depends have chosen before it
        choice = [0] * len(self.eliminated)
        for node, number, around in reversed(self.eliminated):
            choice[node] = int(best[number][tuple(choice[other] for other in around)])
        return sum(int(tables[number]) for number in self.constants), tuple(choice)


def _added(step: Step, tables: dict[int, IntArray]) -> IntArray:
    total: IntArray | None = None
    for number, axes in step.inputs:
        order = sorted(range(len(axes)), key=axes.__getitem__)
        spread = tuple(slice(None) if axis in axes else None for axis in range(step.rank))
        each = tables[number].transpose(order)[spread]
        total = each if total is None else total + each
    assert total is not None
    return total


def buckets(graph: CostGraph) -> Buckets:
    """Return the eliminations of a graph: smallest table first, or minimum fill where that keeps tables smaller.

    Raises
    ------
    ValueError
        If a table would need more than 2**25 entries.
    """
    builder = _Builder(graph, fill=False)
    builder.run()
    if builder.most > MANY_ENTRIES:
        other = _Builder(graph, fill=True)
        other.run()
        builder = min(builder, other, key=lambda each: each.most)
    if builder.most > MOST_TABLE_ENTRIES:
        raise ValueError(
            f"a table of the elimination has at most {MOST_TABLE_ENTRIES} entries, it needs {builder.most}"
        )
    return builder.result()


class _Builder:
    """The remaining factors during elimination, and the key that orders the nodes to eliminate.

    With ``min_fill`` the node whose elimination adds fewest entries of new edges comes first.
    """

    def __init__(self, graph: CostGraph, fill: bool) -> None:
        self.sizes, self.fill, self.most = graph.sizes, fill, 0
        self.numbers: dict[object, int] = {}
        self.nodes: dict[int, int] = {}
        self.edges: dict[int, int] = {}
        self.steps: dict[object, tuple[int, Step]] = {}
        self.eliminated: list[tuple[int, int, tuple[int, ...]]] = []
        self.constants: list[int] = []
        self.factors: list[set[Factor]] = [set() for _ in graph.times]
        self.multiple: dict[Factor, int] = {}
        self.classes = tuple(self._number(_costs(graph, node)) for node in range(len(graph.times)))
        for node, number in enumerate(self.classes):
            self.nodes.setdefault(number, node)
            self._add(Factor(number, (node,), 0))
        contents: dict[int, bytes] = {}
        for index, (source, target, times) in enumerate(graph.edges):
            content = contents.setdefault(id(times), times.tobytes())
            number = self._number((content, self.classes[source], self.classes[target]))
            self.edges.setdefault(number, index)
            self._add(Factor(number, (source, target), 0))

    def run(self) -> None:
        heap = [(self._key(node), node) for node in range(len(self.sizes))]
        keys = [key for key, _ in heap]
        heapq.heapify(heap)
        done = [False] * len(self.sizes)
        while heap:
            key, node = heapq.heappop(heap)
            # a node is pushed again whenever its key changes; older entries of the heap are stale
            if done[node] or key != keys[node]:
                continue
            done[node] = True
            for other in self._eliminate(node):
                keys[other] = self._key(other)
                heapq.heappush(heap, (keys[other], other))

    def result(self) -> Buckets:
        return Buckets(
            self.classes,
            tuple((node, number) for number, node in self.nodes.items()),
            tuple((edge, number) for number, edge in self.edges.items()),
            tuple(step for _, step in self.steps.values()),
            tuple(self.eliminated),
            tuple(self.constants),
        )

    def _number(self, content: object) -> int:
        return self.numbers.setdefault(content, len(self.numbers))

    def _add(self, factor: Factor) -> None:
        self.multiple[factor] = self.multiple.get(factor, 0) + 1
        for node in factor.scope:
            self.factors[node].add(factor)

    def _around(self, node: int) -> tuple[int, ...]:
        return tuple(sorted({other for factor in self.factors[node] for other in factor.scope} - {node}))

    def _key(self, node: int) -> tuple[int, int, int, int, int]:
        """Return the key by which nodes are eliminated, least first.

        A node with at most two neighbours never widens the tables of others, so the size of its table does not count.
        Among such nodes those that fewest eliminations have touched come first: this joins equal layers in pairs,
        then pairs of pairs, whose tables are then equal too.
        """
        around = self._around(node)
        factors = self.factors[node]
        entries = self.sizes[node] * prod(self.sizes[other] for other in around)
        level = max(factor.level for factor in factors)
        arrangement = tuple(sorted((factor.table, factor.scope.index(node)) for factor in factors))
        fill = self._missing(around) if self.fill else 0
        return fill, entries if len(around) > 2 else 0, level, self._number(arrangement), node

    def _missing(self, around: tuple[int, ...]) -> int:
        known = {pair for node in around for factor in self.factors[node] for pair in combinations(factor.scope, 2)}
        return sum(self.sizes[a] * self.sizes[b] for a, b in combinations(around, 2) if (a, b) not in known)

    def _eliminate(self, node: int) -> tuple[int, ...]:
        """Eliminate a node and return the nodes whose keys may have changed."""
        around = self._around(node)
        joined = (*around, node)
        self.most = max(self.most, prod(self.sizes[other] for other in joined))
        # sorted, so that equal layers add equal tables in one order and find one bucket
        factors = sorted(self.factors[node], key=lambda each: (len(each.scope), each.scope, each.table))
        inputs: list[tuple[int, tuple[int, ...]]] = []
        for factor in factors:
            axes = tuple(joined.index(other) for other in factor.scope)
            inputs += [(factor.table, axes)] * self.multiple.pop(factor)
            for other in factor.scope:
                self.factors[other].discard(factor)
        number, step = self._step(tuple(inputs), len(joined))
        self.eliminated.append((node, number, around))
        if not around:
            self.constants.append(step.output)
            return ()
        self._add(Factor(step.output, around, 1 + max(factor.level for factor in factors)))
        second = {distant for near in around for distant in self._around(near)} if self.fill else set()
        return tuple(sorted({*around, *second}))

    def _step(self, inputs: tuple[tuple[int, tuple[int, ...]], ...], rank: int) -> tuple[int, Step]:
        met = self.steps.get(inputs)
        if met is None:
            met = len(self.steps), Step(inputs, rank, self._number(("step", inputs)))
            self.steps[inputs] = met
        return met


def _costs(graph: CostGraph, node: int) -> object:
    return graph.times[node].tobytes(), graph.kept[node].tobytes(), graph.transient[node].tobytes()


BoolArray = NDArray[np.bool_]


def undominated(group: IntArray, *criteria: IntArray) -> IntArray:
    """Return the indices of rows that no other row of their group dominates, one of equal rows, in order of group.

    Parameters
    ----------
    group
        Number of each row's group, shape (rows,): only rows of the same group are compared.
    criteria
        One to three arrays of shape (rows,), none negative; less is better. The third should have few distinct
        values: the work grows with their number.

    Examples
    --------
    >>> undominated(np.array([0, 0, 0, 1]), np.array([1, 2, 3, 9]), np.array([5, 4, 4, 9])).tolist()
    [1, 0, 3]
    """
    first, second = criteria[0], criteria[1] if len(criteria) > 1 else np.zeros_like(criteria[0])
    levels = criteria[2] if len(criteria) > 2 else np.zeros_like(first)
    order = np.lexsort((first, second, levels, group))
    # rows that a row of their own level beats go first: the loop over levels then has fewer rows
    order = order[_leads(_together(group[order], levels[order]), first[order])]
    order = order[np.lexsort((levels[order], first[order], second[order], group[order]))]
    group, first, levels = group[order], first[order], levels[order]
    kept = np.zeros(len(order), dtype=np.bool_)
    for level in np.unique(levels):
        within = np.flatnonzero(levels <= level)
        best = _leads(group[within], first[within])
        kept[within[best & (levels[within] == level)]] = True
    result: IntArray = order[kept]
    return result


def _together(group: IntArray, levels: IntArray) -> IntArray:
    """Return for every row the number of its pair of group and level; rows are sorted by both."""
    return np.cumsum(np.r_[True, (group[1:] != group[:-1]) | (levels[1:] != levels[:-1])][: len(group)])


def _leads(group: IntArray, values: IntArray) -> BoolArray:
    """Return which rows have a value below all earlier rows of their group; the rows of a group are adjacent."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    starts = np.r_[True, group[1:] != group[:-1]]
    number = np.cumsum(starts) - 1
    # ranks in place of values where the shift below would leave 64 bits: only their order matters
    if (int(values.max()) + 1) * int(number[-1] + 1) >= MOST:
        values = np.unique(values, return_inverse=True)[1].astype(np.int64)
    shifted = values - number * (int(values.max()) + 1)  # every later group lies below all earlier ones
    least = np.minimum.accumulate(shifted)
    result: BoolArray = np.r_[True, shifted[1:] < least[:-1]]
    return result


MOST_SWEEP_ENTRIES = 2**22
"""Entries of the largest table of a sweep; a graph that needs more keeps the bound of its price."""


class Price(NamedTuple):
    """The price of memory: ``ticks`` for ``num_bytes`` bytes, in whole numbers so that bounds are exact."""

    ticks: int
    of: int

    def bound(self, least: int, budget: int) -> int:
        """Return the least ticks of any choice that keeps at most ``budget`` bytes.

        ``min_priced`` is the least of ``num_bytes`` * time + ``ticks`` * kept bytes over all choices.
        """
        return -((self.ticks * budget - least) // self.of)


class Swept(NamedTuple):
    """The fastest choice of a sweep, None if none is fast enough; no choice takes fewer ticks than ``bound``."""

    choice: tuple[int, ...] | None
    bound: int


class Labels(NamedTuple):
    """Partial choices: number of the frontier's state, ticks and kept bytes so far; all of shape (labels,)."""

    state: IntArray
    times: IntArray
    kept: IntArray


@dataclass(frozen=True, eq=False)
class Sweep:
    """A graph in the order of its nodes, with the least priced time ahead of each state of the frontier."""

    graph: CostGraph
    budget: int
    price: Price

    @cached_property
    def into(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node its edges from earlier nodes."""
        result: list[list[Edge]] = [[] for _ in self.graph.times]
        for edge in self.graph.edges:
            result[edge.target].append(edge)
        return tuple(tuple(each) for each in result)

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """Per position in the order the earlier nodes that have an edge to a node at or after it."""
        last = list(range(len(self.graph.times)))
        for source, target, _ in self.graph.edges:
            last[source] = max(last[source], target)
        result: list[tuple[int, ...]] = [()]
        for node in range(len(last)):
            result.append(tuple(each for each in (*result[-1], node) if last[each] > node))
        return tuple(result)

    @property
    def entries(self) -> int:
        """Entries of the largest table of a sweep."""
        return max(self._shape((*ahead, node)) for node, ahead in enumerate(self.frontiers[:-1]))

    def _shape(self, nodes: tuple[int, ...]) -> int:
        return prod(self.graph.sizes[node] for node in nodes)

    @cached_property
    def ahead(self) -> tuple[IntArray, ...]:
        """Per position, over the choices of its frontier, the least priced time of all nodes at or after it."""
        result = [np.zeros((), dtype=np.int64)]
        for node in range(len(self.graph.times) - 1, -1, -1):
            joined = (*self.frontiers[node], node)
            total = _spread(result[-1], self.frontiers[node + 1], joined) + self._priced(node)
            for edge in self.into[node]:
                total = total + self.price.of * _spread(edge.times, (edge.source, node), joined)
            result.append(total.min(axis=-1))
        return tuple(reversed(result))

    def _priced(self, node: int) -> IntArray:
        return self.price.of * self.graph.times[node] + self.price.ticks * self.graph.kept[node]

    @cached_property
    def least(self) -> IntArray:
        """Per position the fewest bytes that all nodes at or after it keep."""
        fewest = np.array([int(each.min()) for each in self.graph.kept], dtype=np.int64)
        result: IntArray = np.r_[np.cumsum(fewest[::-1])[::-1], 0]
        return result

    def below(self, ticks: int, labels: int) -> Swept:
        """Return the fastest choice that takes fewer than ``ticks``.

        At most ``max_labels`` partial choices are kept at a node.
        """
        now = Labels(*(np.zeros(1, dtype=np.int64) for _ in range(3)))
        history: list[tuple[IntArray, IntArray]] = []
        bound = ticks
        for node in range(len(self.graph.times)):
            ahead, least = self._extended(node, now)
            fits = np.flatnonzero((least <= self._worth(bound)) & (ahead.kept + self.least[node + 1] <= self.budget))
            best = undominated(ahead.state[fits], ahead.times[fits], ahead.kept[fits])
            rows = fits[best]
            # labels that are dropped for want of room lower the bound to the least that they promised
            if len(rows) > labels:
                order = np.argpartition(least[rows], labels)
                bound = min(bound, self.price.bound(int(least[rows[order[labels]]]), self.budget))
                rows = rows[np.sort(order[:labels])]
            history.append((rows // self.graph.sizes[node], rows % self.graph.sizes[node]))
            now = Labels(*(each[rows] for each in ahead))
        row = int(np.argmin(now.times)) if len(now.times) else None
        if row is None or now.times[row] >= ticks:
            return Swept(None, bound)
        return Swept(_traced(history, row), min(bound, int(now.times[row])))

    def _worth(self, ticks: int) -> int:
        """Return the highest priced time at which a choice within the budget may still take fewer than ``ticks``."""
        return self.price.of * (ticks - 1) + self.price.ticks * self.budget

    def _extended(self, node: int, now: Labels) -> tuple[Labels, IntArray]:
        """Return every label extended by every choice of a node, and their least priced times over the whole graph."""
        frontier, following = self.frontiers[node], self.frontiers[node + 1]
        shape = tuple(self.graph.sizes[each] for each in frontier)
        met = dict(zip(frontier, np.unravel_index(now.state, shape), strict=True)) if frontier else {}
        times = now.times[:, None] + self.graph.times[node]
        for edge in self.into[node]:
            times = times + edge.times[met[edge.source]]
        kept = now.kept[:, None] + self.graph.kept[node]
        state = np.zeros_like(times)
        for each in following:
            own = np.arange(self.graph.sizes[node]) if each == node else met[each][:, None]
            state = state * self.graph.sizes[each] + own
        extended = Labels(state.ravel(), times.ravel(), kept.ravel())
        priced = self.price.of * extended.times + self.price.ticks * extended.kept
        return extended, priced + self.ahead[node + 1].ravel()[extended.state]


def _spread(table: IntArray, scope: tuple[int, ...], joined: tuple[int, ...]) -> IntArray:
    result: IntArray = table[tuple(slice(None) if node in scope else None for node in joined)]
    return result


def _traced(history: list[tuple[IntArray, IntArray]], row: int) -> tuple[int, ...]:
    choice: list[int] = []
    for parents, choices in reversed(history):
        choice.append(int(choices[row]))
        row = int(parents[row])
    return tuple(reversed(choice))
