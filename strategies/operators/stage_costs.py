"""The cost graphs of pipeline stages, each composed of the costs that its operators have for one microbatch.

A stage runs consecutive blocks. Its rank keeps what backward reads of as many microbatches as are in flight there, and
may compute some of it again. What crosses to the next stage is no part of a stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.operator_graph import Operator
from meshwise.strategies.lowering.costs.recompute import find_recomputed_operators
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray
from meshwise.strategies.operators.operator_plan import merge_shardings
from meshwise.strategies.operators.pass_costs import NodeCosts, Setting
from meshwise.strategies.operators.pass_table import Node, PassTable
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.plan.sharding import OperatorSharding


class Span(NamedTuple):
    """Consecutive blocks of a stage: the occurrences ``first`` to ``end``, which is not among them.

    Parameters
    ----------
    num_alive
        Microbatches of which the rank keeps what backward reads.
    recompute
        What backward computes again of the layers.
    """

    first: int
    end: int
    num_alive: int
    recompute: LayerRecompute


class StageGraph(NamedTuple):
    """The cost graph of a stage; its first ``num_outside`` nodes are of other stages, and cost nothing here."""

    graph: CostGraph
    num_outside: int


@dataclass(frozen=True, eq=False)
class StageOperators:
    """The operators of the stages of one plan: their choices, and the cost graph of any span of blocks.

    ``states`` are for every node the bytes of the states of each choice, under the data parallelism of ``plan``.
    """

    problem: Problem
    plan: Plan
    table: PassTable
    states: tuple[IntArray, ...]
    resident_bytes: int

    __repr__ = brief_repr()

    @property
    def limit(self) -> int:
        """Bytes on a device that are left for choices."""
        return int(self.problem.usable_memory(self.table.setting.rank.accelerator)) - self.resident_bytes

    def build_graph(self, spans: Sequence[Span], known_choices: Mapping[int, int] | None = None) -> StageGraph:
        """Return the cost graph of a rank that runs some spans: ticks are those of all microbatches, and of the end.

        ``known_choices`` has, by node, the choices of nodes of earlier stages. A tensor that comes from a node whose
        choice is not known comes in the layout that suits best.
        """
        outside_sources = [self._list_outside_sources(span) for span in spans]
        unknown_nodes = [
            (number, source)
            for number, sources in enumerate(outside_sources)
            for source in sources
            if known_choices is None or source not in known_choices
        ]
        times: list[IntArray] = [np.zeros(len(self.table.choices[source]), np.int64) for _, source in unknown_nodes]
        kept_bytes, transient_bytes = list(times), list(times)
        outside_indices = {key: index for index, key in enumerate(unknown_nodes)}
        edges: list[Edge] = []
        for span_number, span in enumerate(spans):
            first_node, end_node = self.table.starts[span.first], self.table.starts[span.end]
            offset = len(times) - first_node
            recomputed_nodes = self._find_recomputed(span)
            for number in range(first_node, end_node):
                operator_passes, remade_names = self.table.passes[number], recomputed_nodes.get(number)
                ticks, saved = operator_passes.passes, operator_passes.saved
                if remade_names is not None:
                    ticks = ticks + operator_passes.forward
                    saved = {name: size for name, size in saved.items() if name and name not in remade_names}
                for moves in self.table.redistributions_by_target[number]:
                    move_ticks = moves.passes if remade_names is None else moves.passes + moves.forward
                    key = span_number, moves.source
                    if moves.source < first_node and key not in outside_indices:
                        assert known_choices is not None
                        ticks = ticks + move_ticks[known_choices[moves.source]]
                        continue
                    source = moves.source + offset if moves.source >= first_node else outside_indices[key]
                    edges.append(Edge(source, number + offset, move_ticks * self.plan.num_microbatches))
                times.append(ticks * self.plan.num_microbatches + operator_passes.ending)
                kept_bytes.append(self.states[number] + span.num_alive * sum(saved.values(), _ZERO))
                transient_bytes.append(operator_passes.transient)
        copies = (-1,) * len(times)
        graph = CostGraph(tuple(times), tuple(kept_bytes), tuple(transient_bytes), tuple(edges), copies)
        return StageGraph(graph, len(unknown_nodes))

    def _list_outside_sources(self, span: Span) -> tuple[int, ...]:
        """Return the nodes before a span that make what its operators read."""
        first_node, end_node = self.table.starts[span.first], self.table.starts[span.end]
        moves = (
            move for number in range(first_node, end_node) for move in self.table.redistributions_by_target[number]
        )
        return tuple(sorted({move.source for move in moves if move.source < first_node}))

    def describe_span(self, span: Span) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return numbers that are equal for spans of equal operators and choices that read from equal operators."""
        classes = self.table.classes
        own_classes = classes[self.table.starts[span.first] : self.table.starts[span.end]]
        return own_classes, tuple(classes[source] for source in self._list_outside_sources(span))

    def count_bytes(self, span: Span, choice: Sequence[int]) -> int:
        """Return the bytes of a span without recomputation whose nodes have the given choices."""
        numbers = self.list_nodes((span,))
        kept_bytes = transient_bytes = 0
        for number, index in zip(numbers, choice, strict=True):
            operator_passes = self.table.passes[number]
            saved_bytes = sum(int(size[index]) for size in operator_passes.saved.values())
            kept_bytes += int(self.states[number][index]) + span.num_alive * saved_bytes
            transient_bytes = max(transient_bytes, int(operator_passes.transient[index]))
        return kept_bytes + transient_bytes

    def _find_recomputed(self, span: Span) -> dict[int, frozenset[str]]:
        """Return the nodes of a span that backward runs again, with the tensors that these nodes of a block make."""
        result: dict[int, frozenset[str]] = {}
        for occurrence in range(span.first, span.end):
            first_node = self.table.starts[occurrence]
            block = self.table.nodes[first_node].block
            operators = find_recomputed_operators(block, span.recompute)
            remade_names = frozenset(name for operator in operators for name in operator.outputs)
            names = {operator.name for operator in operators}
            for number, operator in enumerate(block.operators, first_node):
                if operator.name in names:
                    result[number] = remade_names
        return result

    def list_nodes(self, spans: Iterable[Span]) -> list[int]:
        """Return the numbers of the nodes of some spans, in the order of their cost graph."""
        starts = self.table.starts
        return [number for span in spans for number in range(starts[span.first], starts[span.end])]

    def build_shardings(self, choice_by_node: Sequence[int]) -> tuple[OperatorSharding, ...]:
        """Return the shardings of a plan in which every node has one of its choices, given by index."""
        shardings = {
            node.name: replace(options[choice], operator=node.name)
            for node, options, choice in zip(self.table.nodes, self.table.choices, choice_by_node, strict=True)
        }
        return merge_shardings(self.problem, shardings)


_ZERO = np.int64(0)


def compute_stage_operators(problem: Problem, plan: Plan, table: PassTable, costs: StageCosts) -> StageOperators:
    """Return the operators of the stages of a plan whose operator axes are those of a table.

    Only states depend on the degrees outside: on the stage of ZeRO, and the ranks that share states.
    """
    rank = table.setting.rank
    node_costs = NodeCosts(Setting(problem, plan, costs, rank))
    count_states = partial(_count_states, node_costs)
    states = tuple(map(count_states, table.nodes, table.choices))
    buffers = max(costs.buffers(plan))
    return StageOperators(problem, plan, table, states, int(rank.accelerator.reserved) + buffers)


def _count_states(node_costs: NodeCosts, node: Node, options: tuple[OperatorSharding, ...]) -> IntArray:
    operator: Operator = node.operator
    return node_costs.count_states(node.block.name, operator.name, options)
