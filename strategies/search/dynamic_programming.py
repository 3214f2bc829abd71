"""MindSpore's dynamic programming over shardings of operators, by eliminations."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.cost_model import CostModel
from strategies.operators.cost_graph import Shortfall, Solution
from strategies.operators.costs import OperatorCosts
from strategies.operators.elimination import eliminate
from strategies.problem import Problem
from strategies.search.driver import Proposals
from strategies.search.operators import operator_search
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class DynamicProgramming:
    """A sharding for every operator by eliminations of operators and edges.

    Parameters
    ----------
    faithful
        As published, with its defects.
    """

    name: ClassVar[str] = "dynamic_programming"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return operator_search(problem, space, costs, self._solve)

    def _solve(self, table: OperatorCosts, limit: int) -> Solution | Shortfall:
        return eliminate(table.graph, limit, faithful=self.faithful)
