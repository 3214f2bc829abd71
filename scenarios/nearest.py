"""Why a plan does not fit in memory, and the plan nearest to it that does."""

from dataclasses import replace

from scenarios.nothing_fits import lacking_in_words
from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.explanation.shortfall import shortfall
from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.plan import Plan
from strategies.plan_layout import layout_of
from strategies.problem import Problem
from strategies.search.acceptance import Accepts

MAX_CHECKED = 400
"""Plans whose memory is looked at before giving up."""


def reason(problem: Problem, plan: Plan) -> str:
    """Return which stage or host needs how much memory for what, and what there is."""
    return f"the plan does not fit: {lacking_in_words(problem, shortfall(problem, plan))}"


def nearest_that_fits(problem: Problem, plan: Plan, accepts: Accepts | None = None) -> Plan | None:
    """Return a plan that fits and differs in as few decisions as possible, the one with the lowest bound of those.

    Decisions are those of the search space: a field, or a factor traded between two degrees. With ``accepts``, only
    plans that it accepts count. None where no plan within the first `MAX_CHECKED` does.
    """
    from strategies.cost_model import SimulatedCost
    from strategies.search import Space, neighbours

    costs, space = SimulatedCost(problem), Space()
    start = _in_space(problem, plan)
    seen, level = {start}, [start]
    fitting = _fitting(problem, plan, start, costs, accepts)  # where the space has the plan in other words
    while not fitting and level and len(seen) <= MAX_CHECKED:
        following: list[Layout] = []
        for layout in (near for origin in level for near in neighbours(problem, space, origin)):
            if len(seen) > MAX_CHECKED:
                break
            if layout not in seen:
                seen.add(layout)
                following.append(layout)
                fitting += _fitting(problem, plan, layout, costs, accepts)
        level = following
    return min(fitting, key=costs.bound, default=None)


def _fitting(problem: Problem, plan: Plan, layout: Layout, costs: CostModel, accepts: Accepts | None) -> list[Plan]:
    """Return the completion of a layout that is legal, accepted and fits, or none.

    It overlaps tensor communication as ``plan`` does, or else does not.
    """
    for overlap in dict.fromkeys((plan.overlap_tensor, False)):
        candidate = replace(layout, overlap_tensor=overlap)
        if next(violations(problem, candidate), None) is not None:
            continue
        found = complete(problem, candidate)
        if (accepts is None or not accepts.refusals(problem, found)) and costs.fits(found):
            return [found]
    return []


def _in_space(problem: Problem, plan: Plan) -> Layout:
    """Return the layout of ``plan`` as a space has it.

    Stages by word, states shared over all data ranks and gathered again in backward, no tensor communication beside
    products.
    """
    layout = layout_of(problem, plan)
    stages = "balanced" if len(set(_counts(layout))) > 1 else "even"
    return replace(layout, stages=stages, zero_shards=0, reshard_after_forward=True, overlap_tensor=False)


def _counts(layout: Layout) -> tuple[int, ...]:
    return layout.stages if isinstance(layout.stages, tuple) else ()
