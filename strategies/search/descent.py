"""Where a search begins: plans that people know, and the way down from the best of them.

A good plan before the first bound is divided drops most of a space at once, and is there when time is short.
"""

from collections.abc import Generator
from dataclasses import replace
from math import inf

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.evaluation import Evaluation
from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.space import Space, neighbours
from strategies.search.starts import engineer_layouts

Known = Generator[Plan, Evaluation, tuple[float, Layout | None]]
"""Yields plans; returns the least step time in seconds, infinite where none fitted, and the layout that has it."""


def known_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the plans that a search knows before it looks: recipes, and what an engineer types first.

    Those that break a rule of the problem or a limit of the space are left out, and what the space does not accept.
    """
    typed = (layout for _, layout in engineer_layouts(problem))
    layouts = dict.fromkeys(_within(space, layout) for layout in (*space.starts, *typed))
    legal = (each for each in layouts if space.allows(each) and next(violations(problem, each), None) is None)
    return tuple(layout for layout in legal if _is_accepted(problem, space, layout))


def _is_accepted(problem: Problem, space: Space, layout: Layout) -> bool:
    return space.accepts is None or not space.accepts.refusals(problem, complete(problem, layout))


def _within(space: Space, layout: Layout) -> Layout:
    """Return the same plan with values that a space has, in fields which mean nothing for it."""
    unused = {"attention": layout.context == 1, "schedule": layout.pipeline == 1}
    limits = ((name, getattr(space, name)) for name, without in unused.items() if without)
    others = {name: limit[0] for name, limit in limits if limit is not None and getattr(layout, name) not in limit}
    return replace(layout, **others) if others else layout


def soonest_known(problem: Problem, space: Space) -> list[tuple[Plan, Layout]]:
    """Return the known plans with their layouts, those that are simulated soonest first: by their passes."""
    plans = [(complete(problem, layout), layout) for layout in known_layouts(problem, space)]
    return sorted(plans, key=lambda row: row[0].num_microbatches * len(row[0].stages))


def first_known(problem: Problem, space: Space, costs: CostModel) -> Known:
    """Yield the known plan that fits and is simulated soonest, by its passes: whatever the time is, there is a plan."""
    for plan, layout in soonest_known(problem, space):
        if costs.fits(plan):
            return (yield plan).step_time, layout
    return inf, None


def best_known(problem: Problem, space: Space, costs: CostModel, best: float, layout: Layout | None) -> Known:
    """Yield the known plans that fit and may be faster than ``best`` seconds, which ``layout`` takes."""
    bounds = []
    for number, known in enumerate(known_layouts(problem, space)):
        plan = complete(problem, known)
        if costs.fits(plan) and (bound := costs.bound(plan)) < best:
            bounds.append((bound, number, known, plan))
    paths: list[tuple[float, int, Layout, Plan]] = []
    for bound, number, known, plan in sorted(bounds, key=lambda row: row[:2]):
        if bound < min(best, *(path for path, *_ in paths), inf):
            paths.append((costs.longest_paths([plan])[0], number, known, plan))
        else:
            paths.append((bound, number, known, plan))
    for path, _, known, plan in sorted(paths, key=lambda row: row[:2]):
        if path < best and (step_time := (yield plan).step_time) < best:
            best, layout = step_time, known
    return best, layout


def descend(problem: Problem, space: Space, costs: CostModel, best: float, layout: Layout) -> Known:
    """Yield the best neighbour of ``layout``, which takes ``best`` seconds, of that again, and so on."""
    chosen, lowest = layout, costs.longest_paths([complete(problem, layout)])[0]
    after: Layout | None = layout
    while after is not None:
        layout, after = after, None
        plans = [(complete(problem, neighbour), neighbour) for neighbour in neighbours(problem, space, layout)]
        bounds = ((costs.bound(plan), number, plan, neighbour) for number, (plan, neighbour) in enumerate(plans))
        for bound, _, plan, neighbour in sorted(bounds):
            if bound >= lowest:
                break
            if costs.fits(plan) and (path := costs.longest_paths([plan])[0]) < lowest:
                lowest, after = path, neighbour
        if after is not None and lowest < best and (step_time := (yield complete(problem, after)).step_time) < best:
            best, chosen = step_time, after
    return best, chosen
