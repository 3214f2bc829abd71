"""Breadth-first search over plan rewrites.

References
----------
.. [1] Moore, "The shortest path through a maze", Proceedings of the International Symposium on
   the Theory of Switching, 1959.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.ahead import ahead
from strategies.search.driver import Proof, Proposals
from strategies.search.habits import by_habit
from strategies.search.space import MOST_LISTED, Space, neighbours


@dataclass(frozen=True, slots=True)
class BreadthFirst:
    """Rewrites of the first plan that fits, then rewrites of those, and so on (Moore 1959).

    A rewrite changes one decision (`strategies.search.space.neighbours`); plans that do not fit are not rewritten.
    When no rewrite is new it goes on from the next plan that fits, in the order in which an expert would try them:
    at its end it has evaluated all, and the best is proven.
    """

    name: ClassVar[str] = "breadth_first"
    most_plans: ClassVar[int] = MOST_LISTED

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit by rising number of rewrites from the first one; return the last proof."""
        best = yield from ahead(_by_rewrites(problem, space, costs))
        return Proof(best)


def _by_rewrites(problem: Problem, space: Space, costs: CostModel) -> Iterator[Plan]:
    """Yield the plans that fit by rising number of rewrites from the first one."""
    seen: set[Layout] = set()
    for start in by_habit(problem, space):
        waiting = deque([start])
        while waiting:
            layout = waiting.popleft()
            if layout in seen:
                continue
            seen.add(layout)
            plan = complete(problem, layout)
            if costs.fits(plan):
                yield plan
                waiting.extend(neighbours(problem, space, layout))
