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

from meshwise.strategies.evaluation import CostModel, Resource
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space, list_by_habit, neighbours

_RELIEF_TESTS: dict[Resource, Callable[[Layout, Layout], bool]] = {
    Resource.COMPUTE: lambda layout, rewrite: rewrite.microbatch > layout.microbatch or rewrite.tensor < layout.tensor,  # type: ignore[operator]
    Resource.RECOMPUTE: lambda layout, rewrite: rewrite.recompute != layout.recompute,
    Resource.BUBBLE: lambda layout, rewrite: (
        rewrite.pipeline < layout.pipeline or rewrite.chunks > layout.chunks or rewrite.microbatch < layout.microbatch  # type: ignore[operator]
    ),
    Resource.TENSOR: lambda layout, rewrite: (
        rewrite.tensor < layout.tensor or rewrite.sequence_parallel != layout.sequence_parallel
    ),
    Resource.DATA: lambda layout, rewrite: rewrite.data < layout.data or rewrite.zero != layout.zero,
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
        start = next(
            (candidate for candidate in list_by_habit(problem, space) if costs.fits(complete(problem, candidate))), None
        )
        if start is None:
            return None
        seen_layouts = {start}
        best_time = (yield complete(problem, start)).step_time
        queue = [(best_time, 0, start)]
        heavy_resources: dict[Layout, list[Resource]] = {}
        while queue:
            time, _, layout = heappop(queue)
            if layout not in heavy_resources:
                resource_times = costs.resource_times(complete(problem, layout))
                heavy_resources[layout] = sorted(resource_times, key=resource_times.__getitem__, reverse=True)
            for resource in heavy_resources[layout]:
                rewrites = dict.fromkeys(_list_relieving(problem, space, costs, layout, resource))
                bounds = {
                    candidate: costs.plan_bound(complete(problem, candidate))
                    for candidate in rewrites
                    if candidate not in seen_layouts
                }
                is_faster = False
                for candidate in sorted(bounds, key=bounds.__getitem__):
                    if is_faster or bounds[candidate] >= best_time:
                        break
                    seen_layouts.add(candidate)
                    step_time = (yield complete(problem, candidate)).step_time
                    heappush(queue, (step_time, len(seen_layouts), candidate))
                    is_faster, best_time = step_time < time, min(best_time, step_time)
                if is_faster:
                    heappush(queue, (time, len(seen_layouts), layout))  # other rewrites may relieve it later
                    break
        return None


def _list_relieving(
    problem: Problem, space: Space, costs: CostModel, layout: Layout, resource: Resource
) -> Iterator[Layout]:
    """Yield the rewrites of a layout that relieve a resource and fit, if needed after a second rewrite."""
    for rewrite in neighbours(problem, space, layout):
        if not _RELIEF_TESTS[resource](layout, rewrite):
            continue
        plan = complete(problem, rewrite)
        # choices alone do not say which recomputes for less time
        if resource is Resource.RECOMPUTE and (
            costs.resource_times(plan)[resource] >= costs.resource_times(complete(problem, layout))[resource]
        ):
            continue
        if costs.fits(plan):
            yield rewrite
            continue
        memory = costs.peak_memory(plan)
        for second_rewrite in neighbours(problem, space, rewrite):
            saving_plan = complete(problem, second_rewrite)
            if costs.fits(saving_plan) and costs.peak_memory(saving_plan) < memory:
                yield second_rewrite
