"""MindSpore's double recursion [1]_ and its sharding propagation [2]_.

Double recursion divides the machine level by level and cuts every operator along one dim at each level. The outer
recursion visits the levels of the machine, the outermost first; a level cuts the parts that earlier levels left. The
inner recursion chooses a dim for every operator at that level, by the data that would have to move. Occurrences of a
block are cut alike, and memory plays no part.

Sharding propagation starts from operators whose sharding is given and carries it along the edges of the graph.

References
----------
.. [1] MindSpore, ``frontend/parallel/auto_parallel/rec_core/``: ``rec_partition.cc`` (the recursion), ``rec_cost.cc``
   (costs), ``rec_cost.h`` (the coefficients), at commit 0abf4bb3.
.. [2] MindSpore, ``frontend/parallel/auto_parallel/graph_costmodel.cc`` (``StrategyPropagate``, ``BFS``) and
   ``edge_costmodel.cc``.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import BATCH, ITEMSIZE, Block, Operator, OperatorGraph, OperatorKind
from meshwise.strategies.operators.choices import cuttable, followers
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray, merge_parallel_edges
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.plan.sharding import OperatorSharding

WEIGHT_GRADIENT = 0.25
"""The cost of moving an element of a weight's gradient; one of an activation costs 1 [1]_ (``MATMUL_MEM_COEF``)."""
REDISTRIBUTION = 16
"""The cost of moving an element of a tensor between operators whose cuts of it disagree [1]_ (``REDIS_COEF``)."""


class Level(NamedTuple):
    """A level of the machine: its axis, into how many parts it divides, and the ticks to all-reduce a byte along it."""

    axis: str
    ways: int
    rate: float = 1.0


class _Place(NamedTuple):
    """An operator of a block; ``name`` is ``block.operator``."""

    block: Block
    operator: Operator
    name: str


class _Link(NamedTuple):
    """A tensor between the operator that makes it and one that reads it, by number, with its name at either end.

    ``num_transfers`` counts the pairs of occurrences of the two operators.
    """

    source: int
    target: int
    made: str
    read: str
    times: int


def recurse(
    graph: OperatorGraph, levels: Sequence[Level], microbatch: int, microbatches: int = 1, *, faithful: bool = False
) -> tuple[OperatorSharding, ...]:
    """Return a sharding for every operator of every block.

    Parameters
    ----------
    levels
        From the outermost to the innermost.
    microbatch, num_microbatches
        Sequences of a microbatch on all devices together, and the microbatches of a step.
    faithful
        Choose as published: one operator after another, the one with most to lose first, by the sizes of tensors whose
        cuts disagree with operators that are decided; all levels are taken as equally fast.
    """
    recursion = _Recursion(graph, microbatch, microbatches)
    for level in levels:
        recursion.divide(level, recursion.greedy(level) if faithful else recursion.exact(level))
    return recursion.shardings()


class _Recursion:
    """The operators of all blocks, each with its cuts at the levels so far."""

    def __init__(self, graph: OperatorGraph, microbatch: int, microbatches: int) -> None:
        self.graph, self.microbatch, self.microbatches = graph, microbatch, microbatches
        self.places = [_Place(b, o, f"{b.name}.{o.name}") for b in graph.blocks for o in b.operators]
        self.cuts: list[dict[str, tuple[str, ...]]] = [{} for _ in self.places]
        self.ways: list[dict[str, int]] = [{} for _ in self.places]
        self.dims = [(None, *cuttable(place.block, place.operator)) for place in self.places]
        self.links = list(_links(graph))

    def divide(self, level: Level, chosen: Sequence[str | None]) -> None:
        """Cut every operator along the dim that is chosen for it at a level."""
        for number, dim in enumerate(chosen):
            if dim is not None:
                place = self.places[number]
                for each in (dim, *followers(place.block, place.operator, dim)):
                    self.cuts[number][each] = (*self.cuts[number].get(each, ()), level.axis)
                    self.ways[number][each] = self.ways[number].get(each, 1) * level.ways

    def shardings(self) -> tuple[OperatorSharding, ...]:
        """Return the sharding of every operator."""
        found = []
        for place, cuts in zip(self.places, self.cuts, strict=True):
            order = [dim for dim, _ in place.operator.dims]
            dims = sorted(cuts, key=lambda dim: order.index(dim) if dim in order else len(order))
            found.append(OperatorSharding(place.name, tuple((dim, cuts[dim]) for dim in dims)))
        return tuple(found)

    def options(self, number: int, level: Level) -> list[str | None]:
        """Return the dims of an operator whose remaining size a level divides, and ``None`` for no cut."""
        sizes = dict(self.places[number].operator.dims)
        sizes[BATCH] = sizes.get(BATCH, 1) * self.microbatch
        left = {dim: size // self.ways[number].get(dim, 1) for dim, size in sizes.items()}
        return [dim for dim in self.dims[number] if dim is None or left[dim] % level.ways == 0]

    def size(self, number: int, name: str) -> float:
        """Return the elements of an operator's tensor on one rank, at the levels so far."""
        tensor = self.places[number].block.tensor[name]
        batch = self.microbatch if BATCH in tensor.dims else 1
        return batch * tensor.size / prod(self.ways[number].get(dim, 1) for dim in tensor.dims)

    # as published

    def greedy(self, level: Level) -> list[str | None]:
        """Return a dim for every operator: the heaviest operator decides first, and later ones see its decision."""
        options = [self.options(number, level) for number in range(len(self.places))]
        options = [own[1:] or own for own in options]  # every operator that can be cut is cut
        costs = [{dim: self._published(number, dim, level) for dim in own} for number, own in enumerate(options)]
        chosen: list[str | None] = [None] * len(self.places)
        decided: set[int] = set()
        for number in sorted(range(len(self.places)), key=lambda each: -self._weight(each, costs[each])):
            moved = {
                dim: costs[number][dim] + self._disagreeing(number, dim, chosen, decided) for dim in options[number]
            }
            chosen[number] = min(options[number], key=moved.__getitem__)
            decided.add(number)
        return chosen

    def _weight(self, number: int, costs: Mapping[str | None, float]) -> float:
        """Return how much an operator has to lose: the ratio of its highest cost to its least; norms decide first."""
        if self.places[number].operator.kind in (OperatorKind.NORM, OperatorKind.SOFTMAX):
            return float("inf")
        least, most = min(costs.values()), max(costs.values())
        return most / least if least else most

    def _published(self, number: int, dim: str | None, level: Level) -> float:
        """Return the elements that a cut product moves; others move none, and norms are cut along the batch."""
        place = self.places[number]
        if place.operator.kind in (OperatorKind.NORM, OperatorKind.SOFTMAX):
            return 0.0 if dim == BATCH else float("inf") if dim is not None else 1.0
        if place.operator.kind not in PRODUCTS or dim is None:
            return 0.0
        second = (place.operator.parameters or place.operator.inputs[1:])[0]
        if dim in place.operator.reduced:
            return self.size(number, place.operator.outputs[0]) / level.ways
        if dim in place.block.tensor[second].dims:
            return self.size(number, place.operator.inputs[0]) / level.ways
        return self.size(number, second) / level.ways * WEIGHT_GRADIENT

    def _disagreeing(self, number: int, dim: str | None, chosen: Sequence[str | None], decided: set[int]) -> float:
        """Return the cost of tensors between an operator and decided neighbours whose cuts disagree."""
        total = 0.0
        for link in self.links:
            here, there = (link.source, link.target) if link.source == number else (link.target, link.source)
            if number == here and there in decided and there != number:
                ends = (dim, chosen[there]) if here == link.source else (chosen[there], dim)
                if self._as_made(link, ends[0]) != self._as_read(link, ends[1]):
                    total += self.size(link.source, link.made) * REDISTRIBUTION
        return total

    # corrected

    def exact(self, level: Level) -> list[str | None]:
        """Return a dim for every operator: those that together take least time at a level."""
        options = [self.options(number, level) for number in range(len(self.places))]
        options = [own[1:] or own for own in options]  # every operator that can be cut is cut
        times = tuple(self._times(number, own, level) for number, own in enumerate(options))
        none = tuple(np.zeros(len(own), np.int64) for own in options)
        edges = []
        for link in self.links:
            one, other = options[link.source], options[link.target]
            table = np.array([[self._between(link, made, read, level) for read in other] for made in one], np.int64)
            if link.source == link.target:
                times[link.source][:] += table.diagonal()
            elif link.source < link.target:
                edges.append(Edge(link.source, link.target, table))
            else:  # from the end of a layer to the start of the next: a cost graph has forward edges only
                edges.append(Edge(link.target, link.source, table.T.copy()))
        solution = frontier(CostGraph(times, none, none, tuple(edges), (-1,) * len(options)))
        return [own[choice] for own, choice in zip(options, solution.choice, strict=True)]

    def _times(self, number: int, options: Sequence[str | None], level: Level) -> IntArray:
        """Return the ticks of the collectives of an operator's own, in all its occurrences, for each dim.

        Partial results are summed for every microbatch, as are gradients of inputs that all ranks read; gradients of
        parameters are summed once a step.
        """
        place = self.places[number]
        operator, tensor = place.operator, place.block.tensor
        found = []
        for dim in options:
            lacking = [
                name for name in operator.inputs if dim is not None and dim not in self._names(number, name, dim)
            ]
            summed = [name for name in lacking if tensor[name].has_gradient]
            summed += operator.outputs if dim in operator.reduced else ()
            once = [name for name in operator.parameters if dim is not None and dim not in tensor[name].dims]
            size = (
                sum(self._bytes(number, name) for name in summed)
                + sum(self._bytes(number, name) for name in once) / self.microbatches
            )
            found.append(round(size * level.rate) * place.block.repeat)
        return np.array(found, np.int64)

    def _names(self, number: int, name: str, dim: str) -> tuple[str, ...]:
        """Return the dims of an operator's tensor, with ``dim`` in place of an alias that the tensor uses for it."""
        place = self.places[number]
        own = followers(place.block, place.operator, dim)
        return tuple(dim if each in own else each for each in place.block.tensor[name].dims)

    def _between(self, link: _Link, made: str | None, read: str | None, level: Level) -> int:
        """Return the ticks of moving a tensor from its source to its reader, and its gradient back.

        A tensor that is cut alike at both ends does not move. One that is cut at one end only is gathered in one of
        the two passes, for half the time of an all-reduce. One that is cut along different dims goes through an
        all-to-all of a rank's part in both passes.
        """
        have, want = self._as_made(link, made), self._as_read(link, read)
        if have == want:
            return 0
        part = 1.0 / level.ways if have is not None and want is not None else 0.5
        return round(part * self._bytes(link.source, link.made) * level.rate) * link.times

    def _bytes(self, number: int, name: str) -> float:
        return self.size(number, name) * ITEMSIZE[self.places[number].block.tensor[name].dtype]

    # tensors

    def _as_made(self, link: _Link, dim: str | None) -> int | None:
        """Return the index of the dim of a tensor that its source leaves cut; none where it is summed."""
        place = self.places[link.source]
        summed = dim is None or (dim in place.operator.reduced and link.made in place.operator.outputs)
        return None if summed else self._index(link.source, link.made, dim)

    def _as_read(self, link: _Link, dim: str | None) -> int | None:
        """Return the index of the dim of a tensor that a reader asks to be cut."""
        return None if dim is None else self._index(link.target, link.read, dim)

    def _index(self, number: int, name: str, dim: str | None) -> int | None:
        names = self._names(number, name, dim or "")
        return names.index(dim) if dim in names else None


def _links(graph: OperatorGraph) -> Iterator[_Link]:
    """Yield the tensors between operators; those of a repeated block once, with the number of transfers."""
    first = 0
    crossing: list[tuple[int, str] | None] = []
    for block in graph.blocks:
        arriving = dict(zip(block.inputs, crossing, strict=False))
        sources = {name: each for name, each in arriving.items() if each is not None}
        inner = {n: (first + index, n) for index, o in enumerate(block.operators) for n in o.outputs}
        again = {name: inner.get(made) for name, made in zip(block.inputs, block.outputs, strict=False)}
        for index, operator in enumerate(block.operators):
            for name in dict.fromkeys(operator.inputs):
                if name in inner:
                    yield _Link(*_from(inner[name], first + index), name, block.repeat)
                    continue
                if name in sources:
                    yield _Link(*_from(sources[name], first + index), name, 1)
                looped = again.get(name)
                if looped is not None and block.repeat > 1:
                    yield _Link(*_from(looped, first + index), name, block.repeat - 1)
        crossing = [inner.get(name) or sources.get(name) for name in block.outputs]
        first += len(block.operators)


def _from(source: tuple[int, str], target: int) -> tuple[int, int, str]:
    return source[0], target, source[1]


def propagate(graph: CostGraph, seeds: Mapping[int, int]) -> tuple[int, ...]:
    """Return a choice for every node, given those of some: breadth first from each seed, in order of the seeds [2]_.

    A neighbour takes the choice with the least ticks on the edge by which it is reached; of equal ones that with the
    fewest ticks of its own, then the first. A node with several producers is reached from them only when all of them
    have chosen, and the edges to the others do not count. Nodes that no seed reaches take their first choice.
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
                    chosen[other] = min(range(len(own)), key=lambda index: (int(moved[index]), int(own[index])))
                    waiting.append(other)
    return tuple(chosen.get(node, 0) for node in range(len(graph.times)))
