"""The exact search among shardings of operators: frontier dynamic programming with a price of memory."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.cost_model import CostModel
from strategies.operators.cost_graph import Shortfall, Solution
from strategies.operators.costs import OperatorCosts
from strategies.operators.frontier import frontier
from strategies.problem import Problem
from strategies.search.driver import Proposals
from strategies.search.operators import operator_search
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Frontier:
    """A sharding for every operator, proven best of their sums within a gap.

    Parameters
    ----------
    gap
        Fraction by which the sum of operators' and redistributions' times may be above the least.
    """

    name: ClassVar[str] = "frontier"

    gap: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"frontier: gap is at least 0 and less than 1, met {self.gap}")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return operator_search(problem, space, costs, self._solve)

    def _solve(self, table: OperatorCosts, limit: int) -> Solution | Shortfall:
        return frontier(table.graph, limit, gap=self.gap)
