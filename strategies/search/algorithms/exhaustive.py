"""Evaluation of every plan that fits: in the order of the space, or by rewrites of the first plan.

References
----------
.. [1] Moore, "The shortest path through a maze", Proceedings of the International Symposium on
   the Theory of Switching, 1959.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proof, Proposals, propose_ahead
from meshwise.strategies.search.space import MOST_LISTED, Space, layouts, list_by_habit, neighbours


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Evaluation of every plan that fits: what other searches are checked against."""

    name: ClassVar[str] = "exhaustive"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit in the order of the space; return the proof of the best one."""
        plans = (complete(problem, layout) for layout in layouts(problem, space))
        best_time = yield from propose_ahead(plan for plan in plans if costs.fits(plan))
        return Proof(best_time)


@dataclass(frozen=True, slots=True)
class BreadthFirst:
    """Rewrites of the first plan that fits, then rewrites of those, and so on (Moore 1959).

    A rewrite changes one decision (`meshwise.strategies.search.space.neighbours`); plans that do not fit are not
    rewritten. When no rewrite is new the search goes on from the next plan that fits, in the order in which an expert
    would try them. At its end all plans are evaluated and the best is proven.
    """

    name: ClassVar[str] = "breadth_first"
    most_plans: ClassVar[int] = MOST_LISTED

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit by rising number of rewrites from the first one; return the proof of the best."""
        best_time = yield from propose_ahead(_list_by_rewrites(problem, space, costs))
        return Proof(best_time)


def _list_by_rewrites(problem: Problem, space: Space, costs: CostModel) -> Iterator[Plan]:
    """Yield the plans that fit by rising number of rewrites from the first one."""
    seen_layouts: set[Layout] = set()
    for start in list_by_habit(problem, space):
        queue = deque([start])
        while queue:
            layout = queue.popleft()
            if layout in seen_layouts:
                continue
            seen_layouts.add(layout)
            plan = complete(problem, layout)
            if costs.fits(plan):
                yield plan
                queue.extend(neighbours(problem, space, layout))
