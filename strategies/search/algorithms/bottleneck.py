"""Search by relieving one bottleneck after another.

References
----------
.. [1] Liu et al., "Aceso: efficient parallel DNN training through iterative bottleneck
   alleviation", EuroSys 2024.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Resource
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.driver import Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space, by_habit, neighbours

_RELIEVES: dict[Resource, Callable[[Layout, Layout], bool]] = {
    Resource.COMPUTE: lambda old, new: new.microbatch > old.microbatch or new.tensor < old.tensor,  # type: ignore[operator]
    Resource.RECOMPUTE: lambda old, new: new.recompute != old.recompute,
    Resource.BUBBLE: lambda old, new: (
        new.pipeline < old.pipeline or new.chunks > old.chunks or new.microbatch < old.microbatch  # type: ignore[operator]
    ),
    Resource.TENSOR: lambda old, new: new.tensor < old.tensor or new.sequence_parallel != old.sequence_parallel,
    Resource.DATA: lambda old, new: new.data < old.data or new.zero != old.zero,
}
"""By resource, whether a rewrite of a layout may use less of it."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Rewrites that relieve what the best plan spends most time on (Aceso, EuroSys 2024).

    The search begins with the first plan that fits, in the order in which an expert would try them. It takes the best
    plan not yet relieved, and its resources by the seconds that they take. For each resource it evaluates the rewrites
    that relieve it, by rising bound, until one is faster, which is the next plan. Where a rewrite does not fit, its own
    rewrites that need less memory take its place. The search ends when no plan can be relieved.

    Differences from [1]_: rewrites change whole layouts instead of one stage, a bottleneck is a resource of the whole
    step, and rewrites whose bound is no better than the best plan are not evaluated.
    """

    name: ClassVar[str] = "bottleneck"
    most_plans: ClassVar[int] = MOST_LISTED

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the rewrites that may relieve a plan; prove nothing."""
        start = next((each for each in by_habit(problem, space) if costs.fits(complete(problem, each))), None)
        if start is None:
            return None
        seen = {start}
        best = (yield complete(problem, start)).step_time
        waiting = [(best, 0, start)]
        heaviest: dict[Layout, list[Resource]] = {}
        while waiting:
            time, _, layout = heappop(waiting)
            if layout not in heaviest:
                spent = costs.spent(complete(problem, layout))
                heaviest[layout] = sorted(spent, key=spent.__getitem__, reverse=True)
            for resource in heaviest[layout]:
                found = dict.fromkeys(_relieved(problem, space, costs, layout, resource))
                bounds = {each: costs.bound(complete(problem, each)) for each in found if each not in seen}
                faster = False
                for each in sorted(bounds, key=bounds.__getitem__):
                    if faster or bounds[each] >= best:
                        break
                    seen.add(each)
                    taken = (yield complete(problem, each)).step_time
                    heappush(waiting, (taken, len(seen), each))
                    faster, best = taken < time, min(best, taken)
                if faster:
                    heappush(waiting, (time, len(seen), layout))  # other rewrites may relieve it later
                    break
        return None


def _relieved(problem: Problem, space: Space, costs: CostModel, layout: Layout, resource: Resource) -> Iterator[Layout]:
    """Yield the rewrites of a layout that relieve a resource and fit, if needed after a second rewrite."""
    for rewrite in neighbours(problem, space, layout):
        if not _RELIEVES[resource](layout, rewrite):
            continue
        plan = complete(problem, rewrite)
        if resource is Resource.RECOMPUTE and not _recomputes_less(costs, plan, complete(problem, layout)):
            continue
        if costs.fits(plan):
            yield rewrite
            continue
        memory = costs.peak_memory(plan)
        for second in neighbours(problem, space, rewrite):
            saving = complete(problem, second)
            if costs.fits(saving) and costs.peak_memory(saving) < memory:
                yield second


def _recomputes_less(costs: CostModel, plan: Plan, other: Plan) -> bool:
    """Return whether a plan recomputes for less time than another: choices alone do not say which takes less."""
    return costs.spent(plan)[Resource.RECOMPUTE] < costs.spent(other)[Resource.RECOMPUTE]
