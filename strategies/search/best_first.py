"""The proven optimum: the cheapest bound known is made sharper, until it is a step time.

References
----------
.. [1] Land, Doig, "An automatic method of solving discrete programming problems",
   Econometrica 28(3), 1960.
.. [2] Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost
   paths", IEEE Transactions on Systems Science and Cybernetics 4(2), 1968: why the first whose
   exact cost leads the queue is the cheapest of all.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import ClassVar, NamedTuple

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.layout import Layout
from strategies.problem import Problem
from strategies.search.driver import OutOfTime, Proof, Proposals
from strategies.search.habits import by_habit
from strategies.search.space import Space

GLANCES = frozenset(10**power for power in range(3, 9))
"""After how many plans looked at the most promising one is evaluated, though others have no bound yet."""


class _Waiting(NamedTuple):
    """A layout that fits in the queue: the cheapest first, of equals those with the sharper bound.

    Parameters
    ----------
    bound
        Seconds that its step takes at least.
    rough
        Whether its longest path is not known yet.
    number
        Its place in the order in which layouts are looked at.
    """

    bound: float
    rough: bool
    number: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Proven optimum by branch and bound, the cheapest bound first (Land and Doig 1960).

    Plans that do not fit are dropped, and the rest wait in a queue by their lower bound. The first one's bound
    becomes the longest path of its program; when a longest path is first, the plan is simulated. The search ends
    when no bound left is below the best step time: no other plan can be faster. In a large space plans are simulated
    now and then before all have a bound, so that there is a best so far. Where a budget ends it, the lower bound is
    that of the first plan in the queue. Where the time is up before every plan has a bound, or at Ctrl-C, the best
    so far stands, or else the most promising plan is evaluated, and nothing is proven.
    """

    name: ClassVar[str] = "best_first"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising plan again and again, and how fast any plan can be; return the last proof."""
        queue: list[_Waiting] = []
        best = inf
        try:
            for number, layout in enumerate(by_habit(problem, space), 1):
                plan = complete(problem, layout)  # completed again when it is proposed: few are, and plans are large
                if costs.fits(plan) and (bound := costs.bound(plan)) < best:
                    heappush(queue, _Waiting(bound, True, number, layout))
                if number in GLANCES and queue and queue[0].bound < best:
                    best = min(best, (yield complete(problem, heappop(queue).layout)).step_time)
            while queue and queue[0].bound < best:
                yield Proof(queue[0].bound)
                plan = complete(problem, queue[0].layout)
                if queue[0].rough:
                    (path,) = costs.longest_paths([plan])
                    heappush(queue, heappop(queue)._replace(bound=path, rough=False))
                else:
                    heappop(queue)
                    best = min(best, (yield plan).step_time)
        except (OutOfTime, KeyboardInterrupt) as stop:
            if best == inf and queue:
                yield complete(problem, queue[0].layout)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return None
        return Proof(best) if best < inf else None
