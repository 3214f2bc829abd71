"""Minimum over all choices of a sum of tables, by eliminating one node after another.

Bucket elimination (Dechter, "Bucket elimination: a unifying framework for reasoning",
Artificial Intelligence 1999): all tables that mention a node are added up, and the node is
minimised out; what remains is a table over its neighbours. Exact for any graph, with tables
as large as the choices of a node and its neighbours together.

Equal tables get one number. An elimination whose tables have numbers met before, in the same
arrangement, has a result met before. So identical layers are eliminated once, and a row of
equal layers by doubling, without being told that there are layers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from strategies.operators.cost_graph import CostGraph, IntArray

MOST_ENTRIES = 2**25
MANY_ENTRIES = 2**16


class Factor(NamedTuple):
    """A table over the choices of the nodes in ``scope``, in that order; ``level`` eliminations went into it."""

    table: int
    scope: tuple[int, ...]
    level: int


class Step(NamedTuple):
    """A distinct elimination: the tables added, and for each the axes of the sum; the last axis is minimised out."""

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
    steps
        The distinct eliminations, in order.
    eliminated
        Per node its elimination: the node, the number of the step, the neighbours that the result depends on.
    constants
        Numbers of the tables that are left, over no node.
    """

    classes: tuple[int, ...]
    nodes: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    eliminated: tuple[tuple[int, int, tuple[int, ...]], ...]
    constants: tuple[int, ...]

    def minimum(self, costs: Sequence[IntArray], edges: Sequence[IntArray]) -> tuple[int, tuple[int, ...]]:
        """Return the least sum and a choice per node that has it.

        Parameters
        ----------
        costs
            Per distinct node table, in order of ``nodes``, the cost of each choice.
        edges
            Per distinct edge table, in order of ``edges``, the costs.
        """
        tables: dict[int, IntArray] = {number: each for (_, number), each in zip(self.nodes, costs, strict=True)}
        tables |= {number: each for (_, number), each in zip(self.edges, edges, strict=True)}
        best: list[IntArray] = []
        for step in self.steps:
            total = _added(step, tables)
            best.append(total.argmin(axis=-1))
            tables[step.output] = np.take_along_axis(total, best[-1][..., None], axis=-1)[..., 0]
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
    """Return the eliminations of a graph: smallest tables first, or least fill where that keeps tables smaller.

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
    if builder.most > MOST_ENTRIES:
        raise ValueError(f"a table of the elimination has at most {MOST_ENTRIES} entries, it needs {builder.most}")
    return builder.result()


class _Builder:
    """The factors left during elimination, and what each node costs to eliminate next."""

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
        """Return what to eliminate by, least first.

        A node of at most two neighbours never makes the tables of others wider. Among those, nodes far from past
        eliminations come first: this pairs equal layers, then pairs of pairs.
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
        """Eliminate a node and return the nodes whose elimination now costs something else."""
        around = self._around(node)
        joined = (*around, node)
        self.most = max(self.most, prod(self.sizes[other] for other in joined))
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
        second = {other for near in around for other in self._around(near)} if self.fill else set()
        return tuple(sorted({*around, *second}))

    def _step(self, inputs: tuple[tuple[int, tuple[int, ...]], ...], rank: int) -> tuple[int, Step]:
        met = self.steps.get(inputs)
        if met is None:
            met = len(self.steps), Step(inputs, rank, self._number(("step", inputs)))
            self.steps[inputs] = met
        return met


def _costs(graph: CostGraph, node: int) -> object:
    return graph.times[node].tobytes(), graph.kept[node].tobytes(), graph.transient[node].tobytes()
