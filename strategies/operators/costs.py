"""What every choice of every operator costs, taken from the lowering of whole plans.

The ticks of a choice are those of its compute and its own collectives, forward and backward, for all
microbatches, with its part of what ends a step; those of a pair of choices are the redistributions between
them, of the tensor forward and of its gradient backward. Their sum is the step of the plan on an idle network,
but for what is not a sum:

* two readers of a tensor that want it in one layout share a redistribution, which is counted for each;
* gradients that ranks along an axis sum are summed together once a step, and counted at the rate of all
  parameters together, which leaves out part of a collective's latency where they are fewer.

The bytes that a choice keeps are its parameters, gradients and optimizer states and what it saves for all
microbatches under way; a tensor that several operators save is counted with the first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from simulator.brief import brief
from simulator.deadline import check_deadline
from simulator.operator_graph import Block, Operator
from strategies.lowering.stage import StageCosts
from strategies.operators.choices import choices
from strategies.operators.complete import Degrees, operator_plan, shared
from strategies.operators.cost_graph import CostGraph, IntArray
from strategies.operators.edge_costs import EdgeCosts
from strategies.operators.node_costs import NodeCosts
from strategies.operators.setting import Setting
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.sharding import OperatorSharding

Allowed = Callable[[str, tuple[OperatorSharding, ...]], tuple[OperatorSharding, ...]]
"""Which of the legal shardings of an operator, named by the occurrence of its block, may be chosen."""


class Node(NamedTuple):
    """An operator of one occurrence of a block."""

    occurrence: str
    block: Block
    operator: Operator

    @property
    def name(self) -> str:
        """The name by which a plan means this operator alone."""
        return f"{self.occurrence}.{self.operator.name}"


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """The costs of every choice, and what each means.

    Parameters
    ----------
    choices
        For every node its shardings, by the block's name.
    resident
        Bytes on a device whatever is chosen: what the framework keeps.
    """

    problem: Problem
    degrees: Degrees
    microbatch: int
    nodes: tuple[Node, ...]
    choices: tuple[tuple[OperatorSharding, ...], ...]
    graph: CostGraph
    resident: int

    __repr__ = brief()

    @property
    def limit(self) -> int:
        """Bytes that choices may take on a device."""
        return int(self.problem.usable(self.problem.cluster.accelerator)) - self.resident

    @cached_property
    def tied(self) -> tuple[tuple[tuple[int, str], tuple[int, str]], ...]:
        """The nodes that use one parameter, each with its name there."""

        def user(end: tuple[str, str]) -> tuple[int, str]:
            users = (n for n, o in enumerate(self.nodes) if o.occurrence == end[0] and end[1] in o.operator.parameters)
            return next(users), end[1]

        return tuple((user(first), user(second)) for first, second in self.problem.graph.tied)

    def keeps(self, node: int, choice: int, parameter: str) -> dict[str, tuple[str, ...]]:
        """Return how a choice keeps a parameter: the axes of each dim."""
        return dict(self.choices[node][choice].of_kept(self.nodes[node].block.tensor[parameter]).cuts)

    def only(self, allowed: Mapping[int, Sequence[int]]) -> "OperatorCosts":
        """Return the costs where some nodes have only some of their choices."""
        graph = self.graph
        index = [np.array(allowed.get(n, range(size)), np.int64) for n, size in enumerate(graph.sizes)]

        def some(columns: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
            return tuple(each[index[n]] if n in allowed else each for n, each in enumerate(columns))

        edges = (
            edge._replace(times=edge.times[np.ix_(index[edge.source], index[edge.target])])
            if edge.source in allowed or edge.target in allowed
            else edge
            for edge in graph.edges
        )
        copies = tuple(-1 if n in allowed else number for n, number in enumerate(graph.copies))
        columns = some(graph.times), some(graph.kept), some(graph.transient)
        choices = tuple(tuple(own[i] for i in index[n]) for n, own in enumerate(self.choices))
        return replace(self, choices=choices, graph=CostGraph(*columns, tuple(edges), copies))

    def plan(self, chosen: Iterable[int]) -> Plan:
        """Return the plan of one choice a node."""
        found = {
            node.name: replace(options[choice], operator=node.name)
            for node, options, choice in zip(self.nodes, self.choices, chosen, strict=True)
        }
        return operator_plan(self.problem, self.degrees, self.microbatch, shared(self.problem, found))


def operator_costs(
    problem: Problem,
    degrees: Degrees,
    microbatch: int,
    *,
    costs: StageCosts | None = None,
    allowed: Allowed | None = None,
) -> OperatorCosts:
    """Return the costs of all choices of all operators on the operator axes of a mesh that has no others."""
    plan = operator_plan(problem, degrees, microbatch)
    return _Table(Setting(problem, plan, costs or StageCosts(problem)), degrees, allowed).costs()


@dataclass(frozen=True, eq=False)
class _Table:
    """The costs of all choices while they are taken."""

    setting: Setting
    degrees: Degrees
    allowed: Allowed | None
    _choices: dict[str, tuple[OperatorSharding, ...]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every operator of every occurrence, in execution order."""
        graph = self.setting.problem.graph
        return tuple(Node(name, block, operator) for name, block in graph.occurrences for operator in block.operators)

    def costs(self) -> OperatorCosts:
        """Return all costs."""
        options, own = tuple(map(self._options, self.nodes)), NodeCosts(self.setting)
        columns = [own.of(node.block, node.operator, each) for node, each in zip(self.nodes, options, strict=True)]
        times, kept, transient = ([each[of] for each in columns] for of in range(3))
        times[0] = times[0] + own.once
        edges = tuple(EdgeCosts(self.setting).all(options))
        graph = CostGraph(tuple(times), tuple(kept), tuple(transient), edges, self._copies(options))
        problem, microbatch = self.setting.problem, self.setting.plan.sequences
        return OperatorCosts(problem, self.degrees, microbatch, self.nodes, options, graph, own.resident)

    def _options(self, node: Node) -> tuple[OperatorSharding, ...]:
        check_deadline()
        key = f"{node.block.name}.{node.operator.name}"
        if key not in self._choices:
            sequences = self.setting.plan.sequences
            self._choices[key] = choices(node.block.name, node.block, node.operator, self.degrees, sequences)
        legal = self._choices[key]
        return legal if self.allowed is None else self.allowed(node.name, legal)

    def _copies(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> tuple[int, ...]:
        classes: dict[tuple[str, str, tuple[OperatorSharding, ...]], int] = {}
        keys = ((node.block.name, node.operator.name, own) for node, own in zip(self.nodes, options, strict=True))
        numbers = [classes.setdefault(key, len(classes)) for key in keys]
        return tuple(n if node.block.repeat > 1 else -1 for node, n in zip(self.nodes, numbers, strict=True))
