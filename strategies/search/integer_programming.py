"""Alpa's integer program over shardings of operators."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.cost_model import CostModel
from strategies.operators.cost_graph import Shortfall, Solution
from strategies.operators.costs import OperatorCosts
from strategies.operators.integer_programming import integer_programming
from strategies.problem import Problem
from strategies.search.driver import Proposals
from strategies.search.operators import operator_search
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class IntegerProgramming:
    """A sharding for every operator by Alpa's integer program, on HiGHS.

    Parameters
    ----------
    gap
        Fraction by which the sum of operators' and redistributions' times may be above the least.
    seconds
        Time for one program, after which its best solution so far is taken; ``None`` for no limit.
    tie
        Whether layers that are copies of one another are cut alike.
    """

    name: ClassVar[str] = "integer_programming"

    gap: float = 0.01
    seconds: float | None = None
    tie: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"integer_programming: gap is at least 0 and less than 1, met {self.gap}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"integer_programming: seconds are more than 0, met {self.seconds}")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return operator_search(problem, space, costs, self._solve, among="layers cut alike" if self.tie else "")

    def _solve(self, table: OperatorCosts, limit: int) -> Solution | Shortfall:
        return integer_programming(table.graph, limit, gap=self.gap, seconds=self.seconds, tie=self.tie)
