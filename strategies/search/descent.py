"""The beginning of a search: plans that people know, and the descent from the best of them.

A good plan at the start lets bounds drop most of a space at once, and is an answer when time is short. `GroupMembers`
lists the members of a group by their bounds.
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
    """The members of a group that may fit, the lowest bound first.

    Parameters
    ----------
    bounds
        Lower bounds of all rows and columns of the group, in seconds; infinite where no member can fit.
    """

    def __init__(self, group: Group, bounds: FloatArray) -> None:
        self.group, self.at = group, 0
        cells: IntArray = np.flatnonzero(bounds < inf)
        seconds = bounds.ravel()[cells]
        order = np.argsort(seconds, kind="stable")
        self.cells, self.seconds = cells[order], seconds[order]

    @property
    def bound(self) -> float:
        """The lower bound of the next member, in seconds; infinite where no member is left."""
        return float(self.seconds[self.at]) if self.at < len(self.cells) else inf

    def next(self) -> Layout:
        """Return the next member, the one with the lowest bound of those left, and move past it."""
        row, column = divmod(int(self.cells[self.at]), len(self.group.states))
        self.at += 1
        return self.group.member(row, column)


def memory_depends_on_timing(layout: Layout) -> bool:
    """Return whether peak memory depends on when passes run; it then takes longer to compute than the longest path."""
    return rule_of(layout.schedule).pairs is not no_pairs or layout.offload.in_passes


Known = Generator[Plan, Evaluation, tuple[float, Layout | None]]
"""Yields plans; returns the least step time in seconds, infinite where no plan fitted, and its layout."""


def known_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the known plans of a search: recipes, and the layouts that an engineer tries first.

    Layouts that break a rule of the problem or a limit of the space are left out, as are layouts that the space does
    not accept and schedules without a flush, which train on older weights.
    """
    layouts = _stated_layouts(problem, space)
    legal = (each for each in layouts if space.allows(each) and next(violations(problem, each), None) is None)
    return tuple(layout for layout in legal if _is_accepted(problem, space, layout))


def _stated_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the known plans, written as the space writes them, whether the space has them or not."""
    typed = (layout for _, layout in engineer_layouts(problem))
    stated = (layout for layout in (*space.starts, *typed) if not rule_of(layout.schedule).asynchronous)
    choices = choices_of(problem, space)
    return tuple(dict.fromkeys(choices.in_words(_within(space, layout)) for layout in stated))


def known_groups(problem: Problem, space: Space) -> tuple[Group, ...]:
    """Return the groups of known plans, also where the plan itself is no member because of its states or recomputation.

    People who know the degrees and the schedule of a good plan seldom know what it must recompute to fit.
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
    """Return the layout with unused fields, such as the schedule of a single stage, set to values the space allows."""
    unused = {"attention": layout.context == 1, "schedule": layout.pipeline == 1}
    limits = ((name, getattr(space, name)) for name, without in unused.items() if without)
    others = {name: limit[0] for name, limit in limits if limit is not None and getattr(layout, name) not in limit}
    return replace(layout, **others) if others else layout


def soonest_known(problem: Problem, space: Space) -> list[tuple[Plan, Layout]]:
    """Return the known plans with their layouts, by rising number of passes: the soonest simulated first."""
    plans = [(complete(problem, layout), layout) for layout in known_layouts(problem, space)]
    return sorted(plans, key=lambda row: num_passes(problem, row[1]))


def first_known(problem: Problem, space: Space, costs: CostModel) -> Known:
    """Yield the known plan that fits and is simulated soonest, so that even a short search has a result."""
    for plan, layout in soonest_known(problem, space):
        if costs.fits(plan):
            return (yield plan).step_time, layout
    return inf, None


Rising = Iterator[tuple[float, Layout | None]]
"""Rising lower bounds in seconds of all known plans not yet yielded; with a layout, the bound is its longest path."""


def best_known(problem: Problem, known: Rising, best: float, layout: Layout | None) -> Known:
    """Yield the known plans that may be faster than ``best_time`` seconds, the step time of ``layout``."""
    for bound, candidate in known:
        if bound >= best:
            break
        if candidate is not None and (step_time := (yield complete(problem, candidate)).step_time) < best:
            best, layout = step_time, candidate
    return best, layout


def shortest_known(known: Rising, limit: float) -> tuple[float, Layout] | None:
    """Return the shortest longest path of a known plan, if it is below ``limit`` seconds, and the layout."""
    for bound, candidate in known:
        if bound >= limit:
            break
        if candidate is not None:
            return bound, candidate
    return None


def known_by_path(problem: Problem, space: Space, costs: CostModel) -> Rising:
    """Yield known plans that fit with their longest paths, by rising path, and between them the bound reached so far.

    For the group of a known plan, its member with the lowest bound of those that fit counts as known too. The entry
    with the lowest bound is refined one level at a time: the bound of its family, the bound of the plan, whether it
    fits, its longest path. Nothing is computed beyond the bound at which a caller stops.
    """
    waiting: list[tuple[float, int, int, Layout | Group | GroupMembers]] = []
    layouts = known_layouts(problem, space)
    nodes: list[Layout | Group] = [*layouts, *known_groups(problem, space)]
    for number, node in enumerate(nodes):
        layout = node.layout if isinstance(node, Group) else node
        # a family has one size of microbatches: there is no bound for others
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
            # where memory needs timing, whether the member fits is asked after its longest path, which is cheaper
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
"""The level of a plan's lower bound in the queue: the bound of its family, its own bound, or its longest path."""


SOON = 4096
"""The number of passes of all stages up to which a plan is simulated in a second or two."""


def is_simulated_soon(problem: Problem, layout: Layout) -> bool:
    """Return whether a plan is simulated in no more time than a descent from it takes."""
    return num_passes(problem, layout) <= SOON


def num_passes(problem: Problem, layout: Layout) -> int:
    """Return the number of passes of all stages in a step, to which the time of a simulation is in proportion."""
    plan = complete(problem, layout)
    return plan.num_microbatches * len(plan.stages)


FIRST_PATIENCE = 4
"""Longest paths after which a descent evaluates a plan that takes long to simulate; doubled after every evaluation."""

NEARLY = 1.01
"""A plan that is simulated sooner is evaluated instead, if its longest path is at most this many times the shortest."""

MOST_MEMBERS = 64
"""Members of the groups near a plan that a descent looks at before it goes farther, or ends."""


def descend(
    problem: Problem,
    space: Space,
    costs: CostModel,
    best: float,
    chosen: Layout | None,
    start: Layout | None = None,
) -> Known:
    """Yield faster and faster plans, each found near the one before; ``best_layout`` takes ``best_time`` seconds.

    The neighbourhood of a plan is first its group, which is cheapest to look at, then its family, then other families
    (`groups_near`). Its members are looked at by rising bound until one has a shorter longest path; the descent moves
    there. It ends, and evaluates its plan, where no member near has a shorter path. Before it looks at other
    families, it evaluates a plan that is simulated soon, so that there is an answer. While only plans that take long
    to simulate are on its way, it evaluates one after `FIRST_PATIENCE` longest paths, the next after twice as many,
    and so on: the plan that is simulated soonest of those with nearly the shortest path.

    Parameters
    ----------
    start_layout
        A layout to begin at that has not been evaluated; by default the descent begins at ``best_layout``.
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
    """The state of a descent.

    Parameters
    ----------
    best_time, best_layout
        The fastest evaluated plan: its step time in seconds, and its layout.
    layout, path
        The plan where the descent is, and its longest path in seconds.
    evaluated_path
        The longest path of the plan that the descent evaluated last.
    quick_plan
        The path and layout of the plan that is simulated soonest of those with nearly the shortest path.
    num_paths
        Longest paths computed since the last evaluation.
    patience
        The number of longest paths after which a plan is evaluated though that takes long.
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
        """Whether the current plan has not been evaluated and may be the best."""
        return self.lowest < min(self.evaluated, self.best)

    def evaluate(self) -> Generator[Plan, Evaluation, None]:
        """Yield the current plan, unless it has been evaluated or cannot be the best."""
        if self.is_open:
            yield from self._evaluate(self.lowest, self.layout)

    def evaluate_quick(self) -> Generator[Plan, Evaluation, None]:
        """Yield the quick plan, or the current plan where the quick one is evaluated or cannot be the best.

        The patience doubles.
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
        """Move to the first member that fits and has a shorter longest path; return whether there is one.

        A plan may be yielded before, where the patience is used up.
        """
        for candidate in islice(_least_members(self.costs, groups, self.lowest), MOST_MEMBERS):
            plan, late = complete(self.problem, candidate), memory_depends_on_timing(candidate)
            if self.costs.bound(plan) >= self.lowest or not (late or self.costs.fits(plan)):
                continue
            # a plan that is simulated soon is evaluated before the descent goes far, and needs no patience
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
    """Yield the members whose bounds are below ``limit`` seconds, by rising bound; ``groups`` are by family."""
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
