"""The beginning of a search: the best of the plans that people know, and the descent from it.

A good plan at the start lets bounds drop most of a space at once, and is an answer when time is short. `GroupMembers`
lists the members of a group by their bounds.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.evaluation import CostModel, Evaluation, FloatArray
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.schedules.rule import list_no_pairs
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.space import Space, groups_near
from meshwise.strategies.search.starts import count_passes, known_groups, known_layouts, sort_known_plans


class GroupMembers:
    """The members of a group that may fit, the lowest bound first.

    Parameters
    ----------
    bounds
        Lower bounds of all rows and columns of the group, in seconds; infinite where no member can fit.
    """

    def __init__(self, group: Group, bounds: FloatArray) -> None:
        self.group, self.position = group, 0
        cells: IntArray = np.flatnonzero(bounds < inf)
        seconds = bounds.ravel()[cells]
        order = np.argsort(seconds, kind="stable")
        self.cells, self.seconds = cells[order], seconds[order]

    @property
    def bound(self) -> float:
        """The lower bound of the next member, in seconds; infinite where no member is left."""
        return float(self.seconds[self.position]) if self.position < len(self.cells) else inf

    def take_next(self) -> Layout:
        """Return the next member, the one with the lowest bound of those left, and move past it."""
        row, column = divmod(int(self.cells[self.position]), len(self.group.states))
        self.position += 1
        return self.group.build_layout(row, column)


def memory_depends_on_timing(layout: Layout) -> bool:
    """Return whether peak memory depends on when passes run; it then takes longer to compute than the longest path."""
    return find_rule(layout.schedule).pairs is not list_no_pairs or layout.offload.moves_in_passes


@dataclass(slots=True)
class Incumbent:
    """The fastest evaluated plan of a search: its step time in seconds, infinite without one, and its layout."""

    time: float = inf
    layout: Layout | None = None

    def evaluate(self, problem: Problem, layout: Layout) -> Generator[Plan, Evaluation, None]:
        """Yield the plan of a layout, which becomes the incumbent where it is faster."""
        step_time = (yield complete(problem, layout)).step_time
        if step_time < self.time:
            self.time, self.layout = step_time, layout


def propose_first_known(
    problem: Problem, space: Space, costs: CostModel, incumbent: Incumbent
) -> Generator[Plan, Evaluation, Layout | None]:
    """Yield the known plan that fits and is simulated soonest, so that even a short search has a result.

    Return its layout, ``None`` where no known plan fits.
    """
    layout = next((layout for plan, layout in sort_known_plans(problem, space) if costs.fits(plan)), None)
    if layout is not None:
        yield from incumbent.evaluate(problem, layout)
    return layout


RisingBounds = Iterator[tuple[float, Layout | None]]
"""Rising lower bounds in seconds of all known plans not yet yielded; with a layout, the bound is its longest path."""


def propose_best_known(
    problem: Problem, rising_bounds: RisingBounds, incumbent: Incumbent
) -> Generator[Plan, Evaluation, None]:
    """Yield the known plans that may be faster than the incumbent."""
    for bound, candidate in rising_bounds:
        if bound >= incumbent.time:
            break
        if candidate is not None:
            yield from incumbent.evaluate(problem, candidate)


def find_shortest_known(rising_bounds: RisingBounds, limit: float) -> tuple[float, Layout] | None:
    """Return the shortest longest path of a known plan, if it is below ``limit`` seconds, and the layout."""
    for bound, candidate in rising_bounds:
        if bound >= limit:
            break
        if candidate is not None:
            return bound, candidate
    return None


def rank_known_plans(problem: Problem, space: Space, costs: CostModel) -> RisingBounds:
    """Yield known plans that fit with their longest paths, by rising path, and between them the bound reached so far.

    For the group of a known plan, its member with the lowest bound of those that fit counts as known too. The entry
    with the lowest bound is refined one level at a time: the bound of its family, the bound of the plan, whether it
    fits, its longest path. Nothing is computed beyond the bound at which a caller stops.
    """
    queue: list[tuple[float, int, int, Layout | Group | GroupMembers]] = []
    layouts = known_layouts(problem, space)
    nodes: list[Layout | Group] = [*layouts, *known_groups(problem, space)]
    for number, node in enumerate(nodes):
        layout = node.layout if isinstance(node, Group) else node
        # a family has one size of microbatches: there is no bound for others
        family_bound = costs.family_bound(find_family(layout)) if isinstance(layout.microbatch, int) else 0.0
        heappush(queue, (family_bound, _FAMILY_BOUND, number, node))
    known_plans = set(layouts)
    while queue:
        bound, level, number, entry = heappop(queue)
        yield bound, None
        if isinstance(entry, Group):
            members = GroupMembers(entry, costs.group_bounds(entry))
            if members.bound < inf:
                heappush(queue, (max(bound, members.bound), _FAMILY_BOUND, number, members))
            continue
        if isinstance(entry, GroupMembers):
            members, entry = entry, entry.take_next()
            # where memory needs timing, whether the member fits is asked after its longest path, which is cheaper
            is_late = memory_depends_on_timing(entry)
            if is_late or costs.fits(complete(problem, entry)):
                if entry not in known_plans:
                    heappush(
                        queue, (max(bound, costs.plan_bound(complete(problem, entry))), _PLAN_BOUND, number, entry)
                    )
            elif members.bound < inf:
                heappush(queue, (max(bound, members.bound), _FAMILY_BOUND, number, members))
            continue
        plan = complete(problem, entry)
        if level == _FAMILY_BOUND:
            heappush(queue, (max(bound, costs.plan_bound(plan)), _PLAN_BOUND, number, entry))
        elif level == _PLAN_BOUND:
            if memory_depends_on_timing(entry) or costs.fits(plan):
                heappush(queue, (max(bound, *costs.longest_paths([plan])), _PATH_BOUND, number, entry))
        elif not memory_depends_on_timing(entry) or costs.fits(plan):
            yield bound, entry


_FAMILY_BOUND, _PLAN_BOUND, _PATH_BOUND = range(3)
"""The level of a plan's lower bound in the queue: the bound of its family, its own bound, or its longest path."""


SOON = 4096
"""The number of passes of all stages up to which a plan is simulated in a second or two."""


def is_simulated_soon(problem: Problem, layout: Layout) -> bool:
    """Return whether a plan is simulated in no more time than a descent from it takes."""
    return count_passes(problem, layout) <= SOON


FIRST_PATIENCE = 4
"""Longest paths after which a descent evaluates a plan that takes long to simulate; doubled after every evaluation."""

NEAR_FACTOR = 1.01
"""A plan that is simulated sooner is evaluated instead, if its longest path is at most this many times the shortest."""

MAX_MEMBERS = 64
"""Members of the groups near a plan that a descent looks at before it goes farther, or ends."""


def descend(
    problem: Problem, space: Space, costs: CostModel, incumbent: Incumbent, start_layout: Layout | None = None
) -> Generator[Plan, Evaluation, None]:
    """Yield faster and faster plans, each found near the one before.

    The neighbourhood of a plan is first its group, which is cheapest to look at, then its family, then other families
    (`groups_near`). Its members are looked at by rising bound until one has a shorter longest path; the descent moves
    there. It ends, and evaluates its plan, where no member near has a shorter path. Before it looks at other
    families, it evaluates a plan that is simulated soon, so that there is an answer. While only plans that take long
    to simulate are on its way, it evaluates one after `FIRST_PATIENCE` longest paths, the next after twice as many,
    and so on: the plan that is simulated soonest of those with nearly the shortest path.

    Parameters
    ----------
    start_layout
        A layout to begin at that has not been evaluated; by default the descent begins at the incumbent.
    """
    layout = incumbent.layout if start_layout is None else start_layout
    assert layout is not None
    path = costs.longest_paths([complete(problem, layout)])[0]
    evaluated_path = path if start_layout is None else inf
    descent = _Descent(problem, costs, incumbent, layout, path, evaluated_path, (path, layout))
    has_moved = True
    while has_moved:
        has_moved = False
        for is_far, groups in groups_near(problem, space, descent.layout):
            if is_far and is_simulated_soon(problem, descent.layout):
                yield from descent.evaluate()
            if (yield from descent.move_to_shorter(groups)):
                has_moved = True
                break
    yield from descent.evaluate()


@dataclass(slots=True)
class _Descent:
    """The state of a descent.

    Parameters
    ----------
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
    incumbent: Incumbent
    layout: Layout
    path: float
    evaluated_path: float
    quick_plan: tuple[float, Layout]
    num_paths: int = 0
    patience: int = FIRST_PATIENCE

    @property
    def is_open(self) -> bool:
        """Whether the current plan has not been evaluated and may be the best."""
        return self.path < min(self.evaluated_path, self.incumbent.time)

    def evaluate(self) -> Generator[Plan, Evaluation, None]:
        """Yield the current plan, unless it has been evaluated or cannot be the best."""
        if self.is_open:
            yield from self._evaluate(self.path, self.layout)

    def evaluate_quick(self) -> Generator[Plan, Evaluation, None]:
        """Yield the quick plan, or the current plan where the quick one is evaluated or cannot be the best.

        The patience doubles.
        """
        path, layout = self.quick_plan
        self.quick_plan, self.patience = (self.path, self.layout), 2 * self.patience
        if path < min(self.evaluated_path, self.incumbent.time):
            yield from self._evaluate(path, layout)
        else:
            yield from self.evaluate()

    def _evaluate(self, path: float, layout: Layout) -> Generator[Plan, Evaluation, None]:
        self.evaluated_path, self.num_paths = path, 0
        yield from self.incumbent.evaluate(self.problem, layout)

    def move_to_shorter(self, groups: Mapping[Layout, Iterable[Group]]) -> Generator[Plan, Evaluation, bool]:
        """Move to the first member that fits and has a shorter longest path; return whether there is one.

        A plan may be yielded before, where the patience is used up.
        """
        for candidate in islice(_list_least_members(self.costs, groups, self.path), MAX_MEMBERS):
            plan, is_late = complete(self.problem, candidate), memory_depends_on_timing(candidate)
            if self.costs.plan_bound(plan) >= self.path or not (is_late or self.costs.fits(plan)):
                continue
            # a plan that is simulated soon is evaluated before the descent goes far, and needs no patience
            if self.is_open and self.num_paths >= self.patience and not is_simulated_soon(self.problem, self.layout):
                yield from self.evaluate_quick()
            self.num_paths += 1
            path = self.costs.longest_paths([plan])[0]
            if path < self.path and (not is_late or self.costs.fits(plan)):
                self.path, self.layout = path, candidate
                quick_path, quick_layout = self.quick_plan
                is_quicker = count_passes(self.problem, candidate) <= count_passes(self.problem, quick_layout)
                if is_quicker or quick_path > NEAR_FACTOR * path:
                    self.quick_plan = path, candidate
                return True
        return False


def _list_least_members(costs: CostModel, groups: Mapping[Layout, Iterable[Group]], limit: float) -> Iterator[Layout]:
    """Yield the members whose bounds are below ``limit`` seconds, by rising bound; ``groups`` are by family."""
    queue: list[tuple[float, int, Layout | GroupMembers]] = []
    for family in groups:
        heappush(queue, (costs.family_bound(family), len(queue), family))
    number = len(queue)
    while queue and queue[0][0] < limit:
        _, index, node = heappop(queue)
        if isinstance(node, GroupMembers):
            yield node.take_next()
            heappush(queue, (node.bound, index, node))
            continue
        for group in groups[node]:
            members, number = GroupMembers(group, costs.group_bounds(group, limit)), number + 1
            heappush(queue, (members.bound, number, members))
