"""The proven optimum: the cheapest bound known is made sharper, until it is a step time.

References
----------
.. [1] Land, Doig, "An automatic method of solving discrete programming problems",
   Econometrica 28(3), 1960.
.. [2] Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost
   paths", IEEE Transactions on Systems Science and Cybernetics 4(2), 1968: why the first whose
   exact cost leads the queue is the cheapest of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import ClassVar

from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import offloadings
from meshwise.strategies.search.descent import (
    GroupMembers,
    best_known,
    descend,
    first_known,
    is_simulated_soon,
    known_by_path,
    memory_depends_on_timing,
    shortest_known,
)
from meshwise.strategies.search.driver import Considered, OutOfTime, Proof, Proposals
from meshwise.strategies.search.space import Space, choices_of


@dataclass(frozen=True, slots=True)
class _Plan:
    """A layout that fits; ``rough`` where its longest path is not known yet."""

    layout: Layout
    rough: bool


@dataclass(frozen=True, slots=True)
class _Family:
    """Layouts of a family whose passes run in pairs, if ``pairs``, or one at a time; ``None`` for both."""

    layout: Layout
    pairs: bool | None = None


_Node = _Family | GroupMembers | _Plan
"""What waits: a family, the members of a group, or one plan."""


@dataclass(slots=True)
class _Queue:
    """What waits by its bound: the cheapest first, of equals the one with the sharper bound, then the earlier."""

    waiting: list[tuple[float, int, int, _Node]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def bound(self) -> float:
        """Seconds that all that waits takes at least."""
        return self.waiting[0][0] if self.waiting else inf

    def push(self, bound: float, node: _Node) -> None:
        """Add what takes at least ``bound``, if it is finite."""
        if bound < inf:
            level = 3 if isinstance(node, _Family) else 2 if isinstance(node, GroupMembers) else int(node.rough)
            heappush(self.waiting, (bound, level, next(self.numbers), node))

    @property
    def first_plan(self) -> Layout | None:
        """The plan with the cheapest bound of those that wait."""
        plans = {(bound, number): node.layout for bound, _, number, node in self.waiting if isinstance(node, _Plan)}
        return plans[min(plans)] if plans else None

    def pop(self) -> _Node:
        """Take out the first."""
        return heappop(self.waiting)[-1]


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Proven optimum by branch and bound over groups of plans, the cheapest bound first (Land and Doig 1960).

    Families of plans that share degrees and microbatch wait in a queue by what their devices compute. The first one is
    divided by schedule into groups, whose members have bounds of time and of memory, all at once and none completed.
    The cheapest member left of a group is completed when it is first: if it fits, it waits by its own bound, which
    then becomes the longest path of its program; when a longest path is first, the plan is simulated. The search ends
    when no bound left is below the best step time: no other plan can be faster. Where a budget ends it, the lower
    bound is that of the first in the queue. Where the time is up, or at Ctrl-C, the best so far stands, or else the
    most promising plan is evaluated.

    Parameters
    ----------
    starts
        Whether it begins with the plans that people know (`meshwise.strategies.search.starts`, and those of the space)
        and goes down from the best of them: a good plan drops most of a space at once.
    """

    name: ClassVar[str] = "best_first"

    starts: bool = True

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising plan again and again, and how fast any plan can be; return the last proof."""
        return (yield from Run(problem, costs).search(space, starts=self.starts))


@dataclass(slots=True)
class Run:
    """One search: the best step time so far and its layout, what waits, and whether some plan is known to fit."""

    problem: Problem
    costs: CostModel
    best: float = inf
    layout: Layout | None = None
    queue: "_Queue" = field(default_factory=_Queue)
    fits: bool = False

    def search(self, space: Space, *, starts: bool = True) -> Proposals:
        """Yield known plans, if ``starts``, then those of a space; return the last proof, ``None`` out of time."""
        proven = None
        try:
            if starts:
                yield from self.begin(space)
            yield from self.best_of(space)
            moved = self.layout is None or bool(self.layout.offload)  # then nothing fits that keeps all on devices
            if moved and space.offload is None and not (space.core or space.wide):
                proven = space.with_limits(offload=offloadings())
                if starts and self.layout is not None:
                    start = self.best, self.layout
                    self.best, self.layout = yield from descend(self.problem, proven, self.costs, *start)
                yield from self.best_of(proven, proven)
        except (OutOfTime, KeyboardInterrupt) as stop:
            if self.best == inf and (layout := self.queue.first_plan) is not None:
                yield from self._evaluate(layout)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return None
        return Proof(self.best, proven)

    def _evaluate(self, layout: Layout) -> Proposals:
        step_time = (yield complete(self.problem, layout)).step_time
        if step_time < self.best:
            self.best, self.layout = step_time, layout
        return None

    def begin(self, space: Space) -> Proposals:
        """Yield a plan at once and what no plan can be below, then the best known plan and what is down from it."""
        problem, costs = self.problem, self.costs
        self.best, self.layout = yield from first_known(problem, space, costs)
        self.fits = self.best < inf
        if self.fits:
            yield Proof(least_step_time(problem))
        known = known_by_path(problem, space, costs)
        shortest = shortest_known(known, self.best)
        if shortest is None:
            if self.layout is not None:
                self.best, self.layout = yield from descend(problem, space, costs, self.best, self.layout)
            return None
        left, start = chain([shortest], known), shortest[1]
        if not is_simulated_soon(problem, start):  # what is down from it may make its simulation needless
            self.best, self.layout = yield from descend(problem, space, costs, self.best, self.layout, start)
            self.best, self.layout = yield from best_known(problem, left, self.best, self.layout)
            return None
        self.best, self.layout = yield from best_known(problem, left, self.best, self.layout)
        if self.layout is not None:
            self.best, self.layout = yield from descend(problem, space, costs, self.best, self.layout)
        return None

    def best_of(self, space: Space, proven: Space | None = None) -> Proposals:
        """Yield the plans of a space that may be better than the best so far, and what is proven of all of it.

        ``proven`` says of which space that is, where it is not the one that is searched.
        """
        choices, queue = choices_of(self.problem, space), _Queue()
        self.queue = queue
        total = 0
        for family in choices.families():
            total += choices.count(family)
            queue.push(self.costs.floor(family), _Family(family))
        while queue.bound < self.best:
            if self.fits and queue.bound > 0:
                yield Proof(queue.bound, proven)
            bound, node = queue.bound, queue.pop()
            if isinstance(node, _Family) and node.pairs is None:
                queue.push(bound, _Family(node.layout, pairs=True))
                queue.push(max(self.costs.reach(node.layout), bound), _Family(node.layout, pairs=False))
            elif isinstance(node, _Family):
                for group in choices.groups(node.layout, pairs=bool(node.pairs)):
                    members = GroupMembers(group, self.costs.table(group, self.best))
                    queue.push(max(members.bound, bound), members)
            elif isinstance(node, GroupMembers):
                layout = node.next()
                queue.push(node.bound, node)
                self._consider(queue, layout, bound)
            elif node.rough:
                plan = complete(self.problem, node.layout)
                (path,) = self.costs.longest_paths([plan])
                if path >= self.best or (memory_depends_on_timing(node.layout) and not self.costs.fits(plan)):
                    continue
                queue.push(path, _Plan(node.layout, rough=False))
            else:
                yield from self._evaluate(node.layout)
        yield Considered(total)
        return None

    def _consider(self, queue: _Queue, layout: Layout, bound: float) -> None:
        """Put a layout into the queue with its own bound, if it fits."""
        plan = complete(self.problem, layout)
        if memory_depends_on_timing(layout) or self.costs.fits(plan):
            self.fits = self.fits or not memory_depends_on_timing(layout)
            queue.push(max(self.costs.bound(plan), bound), _Plan(layout, rough=True))
