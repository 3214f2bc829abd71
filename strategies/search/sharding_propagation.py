"""MindSpore's sharding propagation: the user decides some operators, and the rest follows."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from simulator.operator_graph import BATCH
from strategies.cost_model import CostModel
from strategies.operators.cost_graph import Shortfall, Solution
from strategies.operators.costs import OperatorCosts
from strategies.operators.frontier import frontier
from strategies.operators.pins import resolved
from strategies.operators.propagation import propagate
from strategies.problem import Problem
from strategies.search.driver import Proposals
from strategies.search.operators import operator_search
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class ShardingPropagation:
    """Shardings that follow from those of the operators that the user has pinned.

    What differs from the published form: the rest is chosen together, exactly and within memory, instead of one
    operator after another.

    Parameters
    ----------
    faithful
        As published: breadth first from the pinned operators, by the least redistribution. Where nothing is pinned
        the first operator that can be is cut along its batch.
    """

    name: ClassVar[str] = "sharding_propagation"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plan of every arrangement of the devices on which the pins hold."""
        pinned = frozenset(resolved(problem.graph, space.pin))
        return operator_search(problem, space, costs, partial(self._solve, pinned))

    def _solve(self, pinned: frozenset[str], table: OperatorCosts, limit: int) -> Solution | Shortfall:
        if not self.faithful:
            return frontier(table.graph, limit)
        names = (node.name for node in table.nodes)
        seeds = {number: 0 for number, name in enumerate(names) if name in pinned} or _first_batch(table)
        choice = propagate(table.graph, seeds)
        time, memory = table.graph.time(choice), table.graph.memory(choice)
        return Solution(choice, time, memory, 0) if memory <= limit else Shortfall(choice, memory, limit)


def _first_batch(table: OperatorCosts) -> dict[int, int]:
    """Return the first operator that all axes can cut along its batch, and that choice."""
    axes = tuple(axis for axis, ranks in table.degrees.items() if ranks > 1)
    for number, own in enumerate(table.choices):
        for choice, sharding in enumerate(own):
            if sharding.cuts == ((BATCH, axes),):
                return {number: choice}
    return {}
