"""Beam search over plan rewrites.

References
----------
.. [1] Lowerre, "The HARPY speech recognition system", Carnegie Mellon University, 1976.
"""

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proposals, Upcoming
from meshwise.strategies.search.space import MOST_LISTED, Space, list_by_habit, neighbours


@dataclass(frozen=True, slots=True)
class Beam:
    """Rewrites of the few best plans, again and again (beam search, Lowerre 1976).

    The beam begins with the first plan that fits, in the order in which an expert would try them. In every turn the new
    rewrites of its plans (`meshwise.strategies.search.space.neighbours`) that fit are ranked by their bounds, the
    first ``width`` are evaluated, and the beam becomes the best of old and new plans. The search ends when no rewrite
    can enter the beam by its bound.

    Parameters
    ----------
    width
        Plans in the beam.
    """

    name: ClassVar[str] = "beam"
    most_plans: ClassVar[int] = MOST_LISTED

    width: int = 8

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"beam: width is at least 1, met {self.width}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising rewrites of every turn; it proves nothing."""

        @cache
        def find_bound(layout: Layout) -> float:
            plan = complete(problem, layout)
            return costs.plan_bound(plan) if costs.fits(plan) else inf

        chosen_layouts = next(([layout] for layout in list_by_habit(problem, space) if find_bound(layout) < inf), [])
        times: dict[Layout, float] = {}
        beam: list[Layout] = []
        while chosen_layouts:
            yield Upcoming(tuple(complete(problem, layout) for layout in chosen_layouts))
            for layout in chosen_layouts:
                times[layout] = (yield complete(problem, layout)).step_time
            beam = sorted([*beam, *chosen_layouts], key=times.__getitem__)[: self.width]
            # while the beam is not full any rewrite can enter it
            limit = times[beam[-1]] if len(beam) == self.width else inf
            rewrites = dict.fromkeys(rewrite for layout in beam for rewrite in neighbours(problem, space, layout))
            able_rewrites = [rewrite for rewrite in rewrites if rewrite not in times and find_bound(rewrite) < limit]
            chosen_layouts = sorted(able_rewrites, key=find_bound)[: self.width]
        return None
