"""Where a search begins: plans that people know, and the way down from the best of them.

A good plan before the first bound is divided drops most of a space at once, and is there when time is short.

The members of a group by their bounds, and what is asked of them first.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.group_bounds import FloatArray
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.rule import no_pairs
from meshwise.strategies.schedules.schedule import rule_of
from meshwise.strategies.search.choices import family_of
from meshwise.strategies.search.space import Space, choices_of, groups_near
from meshwise.strategies.search.starts import engineer_layouts


class GroupMembers:
    """The members of a group that may fit, the cheapest bound first.

    Parameters
    ----------
    bounds
        Of all rows and columns of the group, in seconds; infinite where there is no member that may fit.
    """

    def __init__(self, group: Group, bounds: FloatArray) -> None:
        self.group, self.at = group, 0
        cells: IntArray = np.flatnonzero(bounds < inf)
        seconds = bounds.ravel()[cells]
        order = np.argsort(seconds, kind="stable")
        self.cells, self.seconds = cells[order], seconds[order]

    @property
    def bound(self) -> float:
        """Seconds that the cheapest member left takes at least; infinite where none is left."""
        return float(self.seconds[self.at]) if self.at < len(self.cells) else inf

    def next(self) -> Layout:
        """Return the cheapest member left."""
        row, column = divmod(int(self.cells[self.at]), len(self.group.states))
        self.at += 1
        return self.group.member(row, column)


def memory_depends_on_timing(layout: Layout) -> bool:
    """Return whether peak memory depends on when passes run; then it costs more to compute than the longest path."""
    return rule_of(layout.schedule).pairs is not no_pairs or layout.offload.in_passes


Known = Generator[Plan, Evaluation, tuple[float, Layout | None]]
"""Yields plans; returns the least step time in seconds, infinite where none fitted, and the layout that has it."""


def known_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the plans that a search knows before it looks: recipes, and what an engineer types first.

    Those that break a rule of the problem or a limit of the space are left out, what the space does not accept, and
    schedules without a flush: they train on older weights.
    """
    layouts = _stated_layouts(problem, space)
    legal = (each for each in layouts if space.allows(each) and next(violations(problem, each), None) is None)
    return tuple(layout for layout in legal if _is_accepted(problem, space, layout))


def _stated_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the plans that people know in the words of a space, also those that it does not have."""
    typed = (layout for _, layout in engineer_layouts(problem))
    stated = (layout for layout in (*space.starts, *typed) if not rule_of(layout.schedule).asynchronous)
    choices = choices_of(problem, space)
    return tuple(dict.fromkeys(choices.in_words(_within(space, layout)) for layout in stated))


def known_groups(problem: Problem, space: Space) -> tuple[Group, ...]:
    """Return the groups of a space in which known plans are, or would be if they shared states or recomputed otherwise.

    Who knows the degrees and the schedule of a good plan seldom knows what it should recompute to fit.
    """
    choices = choices_of(problem, space)
    groups = (
        choices.accepted(choices.group_of(layout))
        for layout in _stated_layouts(problem, space)
        if choices.has_family(family_of(layout)) and choices.has_group(layout)
    )
    return tuple({group.layout: group for group in groups if group.count}.values())


def _is_accepted(problem: Problem, space: Space, layout: Layout) -> bool:
    return space.accepts is None or not space.accepts.refusals(problem, complete(problem, layout))


def _within(space: Space, layout: Layout) -> Layout:
    """Return the layout with fields that it does not use, as the schedule of one stage, as a space allows them."""
    unused = {"attention": layout.context == 1, "schedule": layout.pipeline == 1}
    limits = ((name, getattr(space, name)) for name, without in unused.items() if without)
    others = {name: limit[0] for name, limit in limits if limit is not None and getattr(layout, name) not in limit}
    return replace(layout, **others) if others else layout


def soonest_known(problem: Problem, space: Space) -> list[tuple[Plan, Layout]]:
    """Return the known plans with their layouts, those that are simulated soonest first: by their passes."""
    plans = [(complete(problem, layout), layout) for layout in known_layouts(problem, space)]
    return sorted(plans, key=lambda row: num_passes(problem, row[1]))


def first_known(problem: Problem, space: Space, costs: CostModel) -> Known:
    """Yield the known plan that fits and is simulated soonest, so that a search has a result however short its time."""
    for plan, layout in soonest_known(problem, space):
        if costs.fits(plan):
            return (yield plan).step_time, layout
    return inf, None


Rising = Iterator[tuple[float, Layout | None]]
"""Bounds in seconds by rising value: no known plan that is left is faster; with a layout, it is its longest path."""


def best_known(problem: Problem, known: Rising, best: float, layout: Layout | None) -> Known:
    """Yield the known plans that may be faster than ``best`` seconds, which ``layout`` takes."""
    for bound, candidate in known:
        if bound >= best:
            break
        if candidate is not None and (step_time := (yield complete(problem, candidate)).step_time) < best:
            best, layout = step_time, candidate
    return best, layout


def shortest_known(known: Rising, limit: float) -> tuple[float, Layout] | None:
    """Return the least longest path of a known plan, if it is below ``limit`` seconds, and the layout."""
    for bound, candidate in known:
        if bound >= limit:
            break
        if candidate is not None:
            return bound, candidate
    return None


def known_by_path(problem: Problem, space: Space, costs: CostModel) -> Rising:
    """Yield known plans that fit with their longest paths by rising path, and between them how far bounds are.

    Of the group of each known plan it is also the member that has the least bound of those that fit. The plan with the
    least bound is looked at closer, one level at a time: what its devices compute, a path through its step, whether it
    fits, its longest path. Nothing is worked out beyond the bound at which a caller stops.
    """
    waiting: list[tuple[float, int, int, Layout | Group | GroupMembers]] = []
    layouts = known_layouts(problem, space)
    nodes: list[Layout | Group] = [*layouts, *known_groups(problem, space)]
    for number, node in enumerate(nodes):
        layout = node.layout if isinstance(node, Group) else node
        floor = costs.floor(family_of(layout)) if isinstance(layout.microbatch, int) else 0.0
        heappush(waiting, (floor, _FLOOR, number, node))
    found = set(layouts)
    while waiting:
        bound, level, number, known = heappop(waiting)
        yield bound, None
        if isinstance(known, Group):
            members = GroupMembers(known, costs.table(known))
            if members.bound < inf:
                heappush(waiting, (max(bound, members.bound), _FLOOR, number, members))
            continue
        if isinstance(known, GroupMembers):
            members, known = known, known.next()
            is_late = memory_depends_on_timing(known)
            if is_late or costs.fits(complete(problem, known)):
                if known not in found:
                    heappush(waiting, (max(bound, costs.bound(complete(problem, known))), _BOUND, number, known))
            elif members.bound < inf:
                heappush(waiting, (max(bound, members.bound), _FLOOR, number, members))
            continue
        plan = complete(problem, known)
        if level == _FLOOR:
            heappush(waiting, (max(bound, costs.bound(plan)), _BOUND, number, known))
        elif level == _BOUND:
            if memory_depends_on_timing(known) or costs.fits(plan):
                heappush(waiting, (max(bound, *costs.longest_paths([plan])), _PATH, number, known))
        elif not memory_depends_on_timing(known) or costs.fits(plan):
            yield bound, known


_FLOOR, _BOUND, _PATH = range(3)
"""Which lower bound of its step a plan waits with: that of its family, its own, or its longest path."""


SOON = 4096
"""Passes of all stages up to which a plan is simulated soon: in a second or two."""


def is_simulated_soon(problem: Problem, layout: Layout) -> bool:
    """Return whether discrete events of a plan take no longer than the way down from it."""
    return num_passes(problem, layout) <= SOON


def num_passes(problem: Problem, layout: Layout) -> int:
    """Return the passes of all stages in a step of a plan, to which the time of its simulation is in proportion."""
    plan = complete(problem, layout)
    return plan.num_microbatches * len(plan.stages)


FIRST_PATIENCE = 4
"""Longest paths after which a plan on the way is simulated though that takes long; doubled by every answer."""

NEARLY = 1.01
"""How many times the shortest path of a way a plan may have that is evaluated instead, for it is simulated sooner."""

MOST_MEMBERS = 64
"""Members of the groups near a plan that are looked at before a descent goes farther, or ends."""


def descend(
    problem: Problem,
    space: Space,
    costs: CostModel,
    best: float,
    chosen: Layout | None,
    start: Layout | None = None,
) -> Known:
    """Yield faster and faster plans, each found near the one before; ``chosen`` takes ``best`` seconds.

    Near a plan are the members of its group first, which cost least to look at, then those of its family, then those
    of other families (`groups_near`). The members with the least bounds are looked at until one has a shorter longest
    path. A plan is evaluated where no family has one of a shorter path and the way ends; where its own family has none,
    it is evaluated if that takes little time, so that there is an answer. One that takes long to evaluate is evaluated
    once `FIRST_PATIENCE` longest paths were asked for, the next after twice as many, and so on: there is an answer
    soon, and ever fewer of them a path. It is the plan that is simulated soonest of those nearly as short.

    Parameters
    ----------
    start
        A plan that is not evaluated yet, to begin at it; by default the way begins at ``chosen``.
    """
    layout = chosen if start is None else start
    assert layout is not None
    lowest = costs.longest_paths([complete(problem, layout)])[0]
    way = _Way(problem, costs, best, chosen, layout, lowest, lowest if start is None else inf, (lowest, layout))
    is_left = True
    while is_left:
        is_left = False
        for is_far, groups in groups_near(problem, space, way.layout):
            if is_far and is_simulated_soon(problem, way.layout):
                yield from way.evaluate()
            if (yield from way.move_to_shorter(groups)):
                is_left = True
                break
    yield from way.evaluate()
    return way.best, way.chosen


@dataclass(slots=True)
class _Way:
    """Where a descent is: at ``layout``, whose longest path is ``lowest``; ``chosen`` takes ``best`` seconds.

    ``evaluated`` is the longest path of the plan on the way that was evaluated last; ``quick`` the path and layout of
    the plan that is simulated soonest of those on the way that are nearly as short.
    """

    problem: Problem
    costs: CostModel
    best: float
    chosen: Layout | None
    layout: Layout
    lowest: float
    evaluated: float
    quick: tuple[float, Layout]
    asked: int = 0
    patience: int = FIRST_PATIENCE

    @property
    def is_open(self) -> bool:
        """Whether the plan where the way is has not been evaluated and may be the best."""
        return self.lowest < min(self.evaluated, self.best)

    def evaluate(self) -> Generator[Plan, Evaluation, None]:
        """Yield the plan where the way is, unless it is known or cannot be the best."""
        if self.is_open:
            yield from self._evaluate(self.lowest, self.layout)

    def evaluate_quick(self) -> Generator[Plan, Evaluation, None]:
        """Yield the plan that is simulated soonest, or where it is known or cannot be the best, that where the way is.

        The next is waited for twice as long.
        """
        path, layout = self.quick
        self.quick, self.patience = (self.lowest, self.layout), 2 * self.patience
        if path < min(self.evaluated, self.best):
            yield from self._evaluate(path, layout)
        else:
            yield from self.evaluate()

    def _evaluate(self, path: float, layout: Layout) -> Generator[Plan, Evaluation, None]:
        self.evaluated, self.asked = path, 0
        step_time = (yield complete(self.problem, layout)).step_time
        if step_time < self.best:
            self.best, self.chosen = step_time, layout

    def move_to_shorter(self, groups: Mapping[Layout, Iterable[Group]]) -> Generator[Plan, Evaluation, bool]:
        """Go to the first member that fits and has a shorter longest path; return whether there is one.

        The plan where the way is may be yielded before, where its answer has been waited for too long.
        """
        for candidate in islice(_least_members(self.costs, groups, self.lowest), MOST_MEMBERS):
            plan, late = complete(self.problem, candidate), memory_depends_on_timing(candidate)
            if self.costs.bound(plan) >= self.lowest or not (late or self.costs.fits(plan)):
                continue
            if self.is_open and self.asked >= self.patience and not is_simulated_soon(self.problem, self.layout):
                yield from self.evaluate_quick()
            self.asked += 1
            path = self.costs.longest_paths([plan])[0]
            if path < self.lowest and (not late or self.costs.fits(plan)):
                self.lowest, self.layout = path, candidate
                quick_path, quick = self.quick
                is_quicker = num_passes(self.problem, candidate) <= num_passes(self.problem, quick)
                if is_quicker or quick_path > NEARLY * path:
                    self.quick = path, candidate
                return True
        return False


def _least_members(costs: CostModel, groups: Mapping[Layout, Iterable[Group]], limit: float) -> Iterator[Layout]:
    """Yield the members of groups by family whose bounds are below ``limit`` seconds, by rising bound."""
    waiting: list[tuple[float, int, Layout | GroupMembers]] = []
    for family in groups:
        heappush(waiting, (costs.floor(family), len(waiting), family))
    number = len(waiting)
    while waiting and waiting[0][0] < limit:
        _, place, node = heappop(waiting)
        if isinstance(node, GroupMembers):
            yield node.next()
            heappush(waiting, (node.bound, place, node))
            continue
        for group in groups[node]:
            members, number = GroupMembers(group, costs.table(group, limit)), number + 1
            heappush(waiting, (members.bound, number, members))
