"""The cost graph of a problem: ticks and bytes of every sharding of every operator, and of every redistribution.

All costs come from the lowering of whole plans. The ticks of a choice are those of its compute and its own
collectives, forward and backward, for all microbatches, with its part of the end of a step. The ticks of a pair of
choices are the redistributions between them, of the tensor forward and of its gradient backward. Their sum is the step
time of the plan on an idle network, with two exceptions that are no sums:

* two readers that ask for a tensor in the same layout share one redistribution, but it is counted for each;
* gradients of all operators are summed along an axis together, once a step. They are counted at the rate of all
  parameters together, which leaves out part of the collective's latency where fewer parameters are summed.

The kept bytes of a choice are its parameters, gradients and optimizer states and the tensors that it saves for
backward; a tensor that several operators save is counted with the first of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, restrict_choices
from meshwise.strategies.operators.operator_plan import Degrees, build_operator_plan, merge_shardings
from meshwise.strategies.operators.pass_costs import NodeCosts, Setting
from meshwise.strategies.operators.pass_table import ChoiceFilter, Node, compute_pass_table
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """The cost graph of a problem on a mesh, with the sharding that each choice stands for.

    ``microbatch`` are its sequences. ``choices`` are for every node its shardings, named by the block, and
    ``resident_bytes`` what no choice changes on a device: what the framework keeps.
    """

    problem: Problem
    degrees: Degrees
    microbatch: int
    nodes: tuple[Node, ...]
    choices: tuple[tuple[OperatorSharding, ...], ...]
    graph: CostGraph
    resident_bytes: int

    __repr__ = brief_repr()

    @property
    def limit(self) -> int:
        """Bytes on a device that are left for choices."""
        return int(self.problem.usable_memory(self.problem.cluster.accelerator)) - self.resident_bytes

    @cached_property
    def tied_users(self) -> tuple[tuple[tuple[int, str], tuple[int, str]], ...]:
        """Pairs of nodes that use one tied parameter, each with the parameter's name there."""

        def find_user(occurrence: str, parameter: str) -> tuple[int, str]:
            nodes = enumerate(self.nodes)
            users = (n for n, node in nodes if node.occurrence == occurrence and parameter in node.operator.parameters)
            return next(users), parameter

        return tuple(
            (find_user(*first_end), find_user(*second_end)) for first_end, second_end in self.problem.graph.tied
        )

    def find_kept_axes(self, node: int, choice: int, parameter: str) -> dict[str, tuple[str, ...]]:
        """Return the axes that cut each dim of a parameter as a choice of a node keeps it."""
        return dict(self.choices[node][choice].find_kept_spec(self.nodes[node].block.tensor[parameter]).cuts)

    def restrict_choices(self, allowed_choices: Mapping[int, Sequence[int]]) -> "OperatorCosts":
        """Return the costs where the nodes of ``allowed_choices`` have only those choices; they are no copies then."""
        indices = {node: np.array(options, np.int64) for node, options in allowed_choices.items()}
        choices = tuple(
            tuple(shardings[i] for i in indices[node]) if node in indices else shardings
            for node, shardings in enumerate(self.choices)
        )
        return replace(self, choices=choices, graph=restrict_choices(self.graph, indices))

    def build_plan(self, choices: Iterable[int]) -> Plan:
        """Return the plan in which every node has one of its choices, given by index."""
        shardings = {
            node.name: replace(options[choice], operator=node.name)
            for node, options, choice in zip(self.nodes, self.choices, choices, strict=True)
        }
        return build_operator_plan(
            self.problem, self.degrees, self.microbatch, merge_shardings(self.problem, shardings)
        )


def compute_operator_costs(
    problem: Problem,
    degrees: Degrees,
    microbatch: int,
    *,
    costs: StageCosts | None = None,
    choice_filter: ChoiceFilter | None = None,
) -> OperatorCosts:
    """Return the costs of all choices of all operators, on a mesh of operator axes only.

    A microbatch has ``microbatch`` sequences on all ranks together. ``costs`` are stage costs already known for the
    problem; ``choice_filter`` says which legal shardings may be chosen, by default all.
    """
    plan = build_operator_plan(problem, degrees, microbatch)
    setting = Setting(problem, plan, costs or StageCosts(problem))
    table, node_costs, num_microbatches = (
        compute_pass_table(setting, choice_filter),
        NodeCosts(setting),
        plan.num_microbatches,
    )
    times = [column.passes * num_microbatches + column.ending for column in table.passes]
    times[0] = times[0] + node_costs.fixed_ticks
    kept_bytes = [column.states + sum(column.saved.values()) for column in table.passes]
    transient_bytes = [column.transient for column in table.passes]
    edges = tuple(
        Edge(source, target, passes * num_microbatches) for source, target, passes, _ in table.redistributions
    )
    numbered_nodes = zip(table.classes, table.nodes, strict=True)
    copies = tuple(number if node.block.repeat > 1 else -1 for number, node in numbered_nodes)
    graph = CostGraph(tuple(times), tuple(kept_bytes), tuple(transient_bytes), edges, copies)
    resident_bytes = node_costs.resident_bytes
    return OperatorCosts(problem, degrees, plan.sequences, table.nodes, table.choices, graph, resident_bytes)
