"""Embedding tables on devices and hosts, beside data-parallel layers."""

from dataclasses import dataclass
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.proposals import Proposals
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.table_search import propose_tables
from meshwise.strategies.tables.placement import MAX_NODES
from meshwise.strategies.tables.table import list_tables


@dataclass(frozen=True, slots=True)
class Tables:
    """The placement of all tables by a mixed integer program, and simple ones; of a model without tables as `auto`.

    Parameters
    ----------
    gap
        Fraction by which the seconds of the slowest device's tables may be above the least.
    nodes
        Nodes of the solver's tree, after which its best placement so far is taken.
    """

    name: ClassVar[str] = "tables"

    gap: float = 1e-3
    nodes: int = MAX_NODES

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"tables: gap is at least 0 and less than 1, met {self.gap}")
        if self.nodes < 1:
            raise ValueError(f"tables: nodes is at least 1, met {self.nodes}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield placements of tables, and prove nothing of simulated times."""
        if not list_tables(problem.graph):
            return (yield from Auto().propose(problem, space, costs))
        yield from propose_tables(problem, space, costs, gap=self.gap, max_nodes=self.nodes)
        return None
