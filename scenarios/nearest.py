"""Why a plan does not fit in memory, and the plan nearest to it that does."""

from dataclasses import replace

from scenarios.nothing_fits import lacking_in_words
from strategies.completion import complete
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

    Decisions are those of the search space: a field, or a factor traded between two degrees.
    None where no plan within the first `MAX_CHECKED` fits. Where there is one that ``accepts`` plans, among those.
    """
    from strategies.cost_model import SimulatedCost
    from strategies.search import Space, neighbours

    costs, space = SimulatedCost(problem), Space()
    start = _in_space(problem, plan)
    seen, level, checked = {start}, [start], 0
    while level:
        fitting: list[Plan] = []
        following: list[Layout] = []
        for layout in (near for origin in level for near in neighbours(problem, space, origin)):
            if layout in seen or checked >= MAX_CHECKED:
                continue
            seen.add(layout)
            checked += 1
            candidate = _complete_near(problem, plan, layout)
            if candidate is not None and costs.fits(candidate) and not _refuses(accepts, problem, candidate):
                fitting.append(candidate)
            following.append(layout)
        if fitting:
            return min(fitting, key=costs.bound)
        level = following if checked < MAX_CHECKED else []
    return None


def _refuses(accepts: Accepts | None, problem: Problem, plan: Plan) -> bool:
    return accepts is not None and bool(accepts.refusals(problem, plan))


def _complete_near(problem: Problem, plan: Plan, layout: Layout) -> Plan | None:
    """Return the completion of a layout near ``plan``, which overlaps tensor communication as that does if it may.

    None where the layout breaks a rule.
    """
    for overlap in dict.fromkeys((plan.overlap_tensor, False)):
        candidate = replace(layout, overlap_tensor=overlap)
        if next(violations(problem, candidate), None) is None:
            return complete(problem, candidate)
    return None


def _in_space(problem: Problem, plan: Plan) -> Layout:
    """Return the layout of ``plan`` as a space has it: stages by word, states shared over all data ranks."""
    layout = layout_of(problem, plan)
    stages = "balanced" if len(set(_counts(layout))) > 1 else "even"
    return replace(layout, stages=stages, zero_shards=0, reshard_after_forward=True, overlap_tensor=False)


def _counts(layout: Layout) -> tuple[int, ...]:
    return layout.stages if isinstance(layout.stages, tuple) else ()
