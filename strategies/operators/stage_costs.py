"""The cost graphs of pipeline stages, each composed of the costs that its operators have for one microbatch.

A stage runs consecutive blocks. Its rank keeps what backward reads of as many microbatches as are in flight there, and
may compute some of it again. What crosses to the next stage is no part of a stage.
"""

from collections.abc import Iterable, Sequence
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
        return int(self.problem.usable_memory(self.problem.cluster.accelerator)) - self.resident_bytes

    def build_graph(self, spans: Sequence[Span]) -> CostGraph:
        """Return the cost graph of a rank that runs some spans: ticks are those of all microbatches, and of the end.

        Its nodes are the operators of the spans in order.
        """
        times: list[IntArray] = []
        kept_bytes: list[IntArray] = []
        transient_bytes: list[IntArray] = []
        edges: list[Edge] = []
        for span in spans:
            first_node, end_node = self.table.starts[span.first], self.table.starts[span.end]
            offset = len(times) - first_node
            recomputed_nodes = self._find_recomputed(span)
            for number in range(first_node, end_node):
                operator_passes, remade_names = self.table.passes[number], recomputed_nodes.get(number)
                ticks = operator_passes.passes
                saved = operator_passes.saved
                if remade_names is not None:
                    ticks = ticks + operator_passes.forward
                    saved = {name: size for name, size in saved.items() if name and name not in remade_names}
                times.append(ticks * self.plan.num_microbatches + operator_passes.ending)
                kept_bytes.append(self.states[number] + span.num_alive * sum(saved.values(), _ZERO))
                transient_bytes.append(operator_passes.transient)
                for moves in self.table.redistributions_by_target[number]:
                    if moves.source >= first_node:
                        move_ticks = moves.passes if remade_names is None else moves.passes + moves.forward
                        edges.append(
                            Edge(moves.source + offset, number + offset, move_ticks * self.plan.num_microbatches)
                        )
        return CostGraph(tuple(times), tuple(kept_bytes), tuple(transient_bytes), tuple(edges), (-1,) * len(times))

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
    node_costs = NodeCosts(Setting(problem, plan, costs))
    count_states = partial(_count_states, node_costs)
    states = tuple(map(count_states, table.nodes, table.choices))
    buffers = max(costs.buffers(plan))
    return StageOperators(problem, plan, table, states, int(problem.cluster.accelerator.reserved) + buffers)


def _count_states(node_costs: NodeCosts, node: Node, options: tuple[OperatorSharding, ...]) -> IntArray:
    operator: Operator = node.operator
    return node_costs.count_states(node.block.name, operator.name, options)
