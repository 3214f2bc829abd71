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
from meshwise.strategies.operators.choices import list_aliases, list_cuttable_dims
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray, merge_parallel_edges
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.plan.sharding import OperatorSharding

WEIGHT_GRADIENT_COST = 0.25
"""The cost of moving an element of a weight's gradient; one of an activation costs 1 [1]_ (``MATMUL_MEM_COEF``)."""
REDISTRIBUTION_COST = 16
"""The cost of moving an element of a tensor between operators whose cuts of it disagree [1]_ (``REDIS_COEF``)."""


class Level(NamedTuple):
    """A level of the machine: its axis, into how many parts it divides, and the ticks to all-reduce a byte along it."""

    axis: str
    num_parts: int
    rate: float = 1.0


class _Site(NamedTuple):
    """An operator of a block."""

    block: Block
    operator: Operator


class _TensorEdge(NamedTuple):
    """A tensor between the operator that makes it and one that reads it, by number, with its name at either end.

    ``num_transfers`` counts the pairs of occurrences of the two operators.
    """

    source: int
    target: int
    output_name: str
    input_name: str
    num_transfers: int


def recurse(
    graph: OperatorGraph, levels: Sequence[Level], microbatch: int, num_microbatches: int = 1, *, faithful: bool = False
) -> tuple[OperatorSharding, ...]:
    """Return a sharding for every operator of every block, at ``levels`` from the outermost to the innermost.

    ``microbatch`` are its sequences on all devices together. With ``faithful`` it chooses as published: one operator
    after another, the one with most to lose first, by the sizes of tensors whose cuts disagree with operators that are
    decided; all levels are taken as equally fast.
    """
    recursion = _Recursion(graph, microbatch, num_microbatches)
    choose_dims = recursion.choose_greedily if faithful else recursion.choose_exactly
    for level in levels:
        recursion.cut_operators(level, choose_dims(level))
    return recursion.build_shardings()


class _Recursion:
    """The operators of all blocks, each with its cuts at the levels so far."""

    def __init__(self, graph: OperatorGraph, microbatch: int, num_microbatches: int) -> None:
        self.graph, self.microbatch, self.num_microbatches = graph, microbatch, num_microbatches
        self.sites = [_Site(block, operator) for block in graph.blocks for operator in block.operators]
        self.cuts: list[dict[str, tuple[str, ...]]] = [{} for _ in self.sites]
        self.num_parts: list[dict[str, int]] = [{} for _ in self.sites]
        self.dims = [list_cuttable_dims(site.block, site.operator) for site in self.sites]
        self.tensor_edges = list(_list_tensor_edges(graph))

    def cut_operators(self, level: Level, chosen_dims: Sequence[str | None]) -> None:
        """Cut every operator along the dim that is chosen for it at a level."""
        for number, dim in enumerate(chosen_dims):
            if dim is not None:
                site = self.sites[number]
                for dim_name in (dim, *list_aliases(site.block, site.operator, dim)):
                    self.cuts[number][dim_name] = (*self.cuts[number].get(dim_name, ()), level.axis)
                    self.num_parts[number][dim_name] = self.num_parts[number].get(dim_name, 1) * level.num_parts

    def build_shardings(self) -> tuple[OperatorSharding, ...]:
        """Return the sharding of every operator."""
        shardings = []
        for site, cuts in zip(self.sites, self.cuts, strict=True):
            order = [dim for dim, _ in site.operator.dims]
            dims = sorted(cuts, key=lambda dim: order.index(dim) if dim in order else len(order))
            name = f"{site.block.name}.{site.operator.name}"
            shardings.append(OperatorSharding(name, tuple((dim, cuts[dim]) for dim in dims)))
        return tuple(shardings)

    def list_options(self, level: Level) -> list[list[str | None]]:
        """Return for every operator the dims whose remaining size a level divides; ``None`` where there are none."""
        result: list[list[str | None]] = []
        for site, dims, num_parts in zip(self.sites, self.dims, self.num_parts, strict=True):
            sizes = dict(site.operator.dims)
            sizes[BATCH] = sizes.get(BATCH, 1) * self.microbatch
            divided_dims = [dim for dim in dims if sizes[dim] // num_parts.get(dim, 1) % level.num_parts == 0]
            result.append([*divided_dims] or [None])  # every operator that can be cut is cut
        return result

    def count_elements(self, number: int, name: str) -> float:
        """Return the elements of an operator's tensor on one rank, at the levels so far."""
        tensor = self.sites[number].block.tensor[name]
        batch = self.microbatch if BATCH in tensor.dims else 1
        return batch * tensor.size / prod(self.num_parts[number].get(dim, 1) for dim in tensor.dims)

    # as published

    def choose_greedily(self, level: Level) -> list[str | None]:
        """Return a dim for every operator: the heaviest operator decides first, and later ones see its decision."""
        options = self.list_options(level)
        costs = [
            {dim: self._compute_published_cost(number, dim, level) for dim in operator_dims}
            for number, operator_dims in enumerate(options)
        ]
        chosen_dims: list[str | None] = [None] * len(self.sites)
        decided_operators: set[int] = set()
        for number in sorted(range(len(self.sites)), key=lambda index: -self._compute_weight(index, costs[index])):
            total_costs = {
                dim: cost + self._count_disagreement(number, dim, chosen_dims, decided_operators)
                for dim, cost in costs[number].items()
            }
            chosen_dims[number] = min(total_costs, key=total_costs.__getitem__)
            decided_operators.add(number)
        return chosen_dims

    def _compute_weight(self, number: int, costs: Mapping[str | None, float]) -> float:
        """Return how much an operator has to lose: the ratio of its highest cost to its least; norms decide first."""
        if self.sites[number].operator.kind in (OperatorKind.NORM, OperatorKind.SOFTMAX):
            return float("inf")
        min_cost, max_cost = min(costs.values()), max(costs.values())
        return max_cost / min_cost if min_cost else max_cost

    def _compute_published_cost(self, number: int, dim: str | None, level: Level) -> float:
        """Return the elements that a cut product moves; others move none, and norms are cut along the batch."""
        site = self.sites[number]
        if site.operator.kind in (OperatorKind.NORM, OperatorKind.SOFTMAX):
            return 0.0 if dim == BATCH else float("inf") if dim is not None else 1.0
        if site.operator.kind not in PRODUCTS or dim is None:
            return 0.0
        second_name = (site.operator.parameters or site.operator.inputs[1:])[0]
        if dim in site.operator.reduced:
            return self.count_elements(number, site.operator.outputs[0]) / level.num_parts
        if dim in site.block.tensor[second_name].dims:
            return self.count_elements(number, site.operator.inputs[0]) / level.num_parts
        return self.count_elements(number, second_name) / level.num_parts * WEIGHT_GRADIENT_COST

    def _count_disagreement(
        self, number: int, dim: str | None, chosen_dims: Sequence[str | None], decided_operators: set[int]
    ) -> float:
        """Return the cost of tensors between an operator and decided neighbours whose cuts disagree."""
        total = 0.0
        for edge in self.tensor_edges:
            near_end, far_end = (edge.source, edge.target) if edge.source == number else (edge.target, edge.source)
            if number == near_end and far_end in decided_operators and far_end != number:
                ends = (dim, chosen_dims[far_end]) if near_end == edge.source else (chosen_dims[far_end], dim)
                if self._find_output_dim(edge, ends[0]) != self._find_input_dim(edge, ends[1]):
                    total += self.count_elements(edge.source, edge.output_name) * REDISTRIBUTION_COST
        return total

    # corrected

    def choose_exactly(self, level: Level) -> list[str | None]:
        """Return a dim for every operator: those that together take least time at a level."""
        options = self.list_options(level)
        times = tuple(self._compute_times(number, operator_dims, level) for number, operator_dims in enumerate(options))
        no_bytes = tuple(np.zeros(len(operator_dims), np.int64) for operator_dims in options)
        edges = []
        for tensor_edge in self.tensor_edges:
            rows = (
                [self._count_transfer_ticks(tensor_edge, source_dim, dim, level) for dim in options[tensor_edge.target]]
                for source_dim in options[tensor_edge.source]
            )
            table = np.array(list(rows), np.int64)
            if tensor_edge.source == tensor_edge.target:
                times[tensor_edge.source][:] += table.diagonal()
            elif tensor_edge.source < tensor_edge.target:
                edges.append(Edge(tensor_edge.source, tensor_edge.target, table))
            else:  # from the end of a layer to the start of the next: a cost graph has forward edges only
                edges.append(Edge(tensor_edge.target, tensor_edge.source, table.T.copy()))
        solution = frontier(CostGraph(times, no_bytes, no_bytes, tuple(edges), (-1,) * len(options)))
        return [operator_dims[choice] for operator_dims, choice in zip(options, solution.choice, strict=True)]

    def _compute_times(self, number: int, options: Sequence[str | None], level: Level) -> IntArray:
        """Return the ticks of the collectives of an operator's own, in all its occurrences, for each dim.

        Partial results are summed for every microbatch, as are gradients of inputs that all ranks read; gradients of
        parameters are summed once a step.
        """
        site = self.sites[number]
        operator, tensor = site.operator, site.block.tensor
        ticks = []
        for dim in options:
            if dim is None:
                ticks.append(0)
                continue
            uncut_names = [name for name in operator.inputs if dim not in self._list_dim_names(number, name, dim)]
            summed_names = [name for name in uncut_names if tensor[name].has_gradient]
            summed_names += operator.outputs if dim in operator.reduced else ()
            parameter_names = [name for name in operator.parameters if dim not in tensor[name].dims]
            parameter_bytes = sum(self._count_bytes(number, name) for name in parameter_names)
            num_bytes = sum(self._count_bytes(number, name) for name in summed_names)
            num_bytes += parameter_bytes / self.num_microbatches
            ticks.append(round(num_bytes * level.rate) * site.block.repeat)
        return np.array(ticks, np.int64)

    def _list_dim_names(self, number: int, name: str, dim: str) -> tuple[str, ...]:
        """Return the dims of an operator's tensor, with ``dim`` in place of an alias that the tensor uses for it."""
        site = self.sites[number]
        aliases = list_aliases(site.block, site.operator, dim)
        return tuple(dim if dim_name in aliases else dim_name for dim_name in site.block.tensor[name].dims)

    def _count_transfer_ticks(
        self, edge: _TensorEdge, source_dim: str | None, target_dim: str | None, level: Level
    ) -> int:
        """Return the ticks of moving a tensor from its source to its reader, and its gradient back.

        A tensor that is cut alike at both ends does not move. One that is cut at one end only is gathered in one of
        the two passes, for half the time of an all-reduce. One that is cut along different dims goes through an
        all-to-all of a rank's part in both passes.
        """
        source_index, target_index = self._find_output_dim(edge, source_dim), self._find_input_dim(edge, target_dim)
        if source_index == target_index:
            return 0
        part = 1.0 / level.num_parts if source_index is not None and target_index is not None else 0.5
        return round(part * self._count_bytes(edge.source, edge.output_name) * level.rate) * edge.num_transfers

    def _count_bytes(self, number: int, name: str) -> float:
        return self.count_elements(number, name) * ITEMSIZE[self.sites[number].block.tensor[name].dtype]

    # tensors

    def _find_output_dim(self, edge: _TensorEdge, dim: str | None) -> int | None:
        """Return the index of the dim of a tensor that its source leaves cut; none where it is summed."""
        site = self.sites[edge.source]
        is_whole = dim is None or (dim in site.operator.reduced and edge.output_name in site.operator.outputs)
        return None if is_whole else self._find_dim_index(edge.source, edge.output_name, dim)

    def _find_input_dim(self, edge: _TensorEdge, dim: str | None) -> int | None:
        """Return the index of the dim of a tensor that a reader asks to be cut."""
        return None if dim is None else self._find_dim_index(edge.target, edge.input_name, dim)

    def _find_dim_index(self, number: int, name: str, dim: str | None) -> int | None:
        names = self._list_dim_names(number, name, dim or "")
        return names.index(dim) if dim in names else None


def _list_tensor_edges(graph: OperatorGraph) -> Iterator[_TensorEdge]:
    """Yield the tensors between operators; those of a repeated block once, with the number of transfers."""
    first_number = 0
    block_sources: list[tuple[int, str] | None] = []
    for block in graph.blocks:
        arrivals = dict(zip(block.inputs, block_sources, strict=False))
        sources = {name: source for name, source in arrivals.items() if source is not None}
        inner_sources = {
            output: (first_number + index, output)
            for index, producer in enumerate(block.operators)
            for output in producer.outputs
        }
        loop_sources = {
            name: inner_sources.get(output_name) for name, output_name in zip(block.inputs, block.outputs, strict=False)
        }
        for index, operator in enumerate(block.operators):
            for name in dict.fromkeys(operator.inputs):
                # inside a block, from another block, and from the occurrence before
                is_inner = name in inner_sources
                ends = (
                    (inner_sources.get(name), block.repeat),
                    (None if is_inner else sources.get(name), 1),
                    (None if is_inner else loop_sources.get(name), block.repeat - 1),
                )
                for source, num_transfers in ends:
                    if source is not None and num_transfers:
                        yield _TensorEdge(source[0], first_number + index, source[1], name, num_transfers)
        block_sources = [inner_sources.get(name) or sources.get(name) for name in block.outputs]
        first_number += len(block.operators)


def propagate(graph: CostGraph, seeds: Mapping[int, int]) -> tuple[int, ...]:
    """Return a choice for every node, given those of some: breadth first from each seed, in order of the seeds [2]_.

    A neighbour takes the choice with the least ticks on the edge by which it is reached; of equal ones that with the
    fewest ticks of its own, then the first. A node with several producers is reached from them only when all of them
    have chosen, and the edges to the others do not count. Nodes that no seed reaches take their first choice.
    """
    edges = merge_parallel_edges(graph).edges
    consumers: dict[int, list[tuple[int, IntArray]]] = {}
    producers: dict[int, list[tuple[int, IntArray]]] = {}
    for source, target, times in edges:
        consumers.setdefault(source, []).append((target, times))
        producers.setdefault(target, []).append((source, times))
    choices = dict(seeds)
    for seed in seeds:
        queue = deque([seed])
        while queue:
            node = queue.popleft()
            neighbours = [(neighbour, times[choices[node]], True) for neighbour, times in consumers.get(node, ())]
            neighbours += [(neighbour, times[:, choices[node]], False) for neighbour, times in producers.get(node, ())]
            for neighbour, edge_times, is_consumer in neighbours:
                is_ready = not is_consumer or all(producer in choices for producer, _ in producers[neighbour])
                if neighbour not in choices and is_ready:
                    node_times = graph.times[neighbour]
                    choices[neighbour] = min(
                        range(len(node_times)), key=lambda index: (int(edge_times[index]), int(node_times[index]))
                    )
                    queue.append(neighbour)
    return tuple(choices.get(node, 0) for node in range(len(graph.times)))
