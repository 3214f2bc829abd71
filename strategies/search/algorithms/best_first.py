"""The proven optimum: the lowest bound is refined until it is a step time.

References
----------
.. [1] Land, Doig, "An automatic method of solving discrete programming problems",
   Econometrica 28(3), 1960.
.. [2] Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost
   paths", IEEE Transactions on Systems Science and Cybernetics 4(2), 1968: why the first plan whose
   exact cost leads the queue is the cheapest of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import ClassVar

from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import list_offloadings
from meshwise.strategies.search.descent import (
    GroupMembers,
    Incumbent,
    descend,
    find_shortest_known,
    is_simulated_soon,
    memory_depends_on_timing,
    propose_best_known,
    propose_first_known,
    rank_known_plans,
)
from meshwise.strategies.search.proposals import ConsideredPlans, OutOfTime, Proof, Proposals
from meshwise.strategies.search.space import Space, find_choices


@dataclass(frozen=True, slots=True)
class _Plan:
    """A layout that fits; ``is_rough`` where its longest path has not been computed yet."""

    layout: Layout
    is_rough: bool


@dataclass(frozen=True, slots=True)
class _Family:
    """A family, or the part of it whose passes run in ``pairs``, or one at a time; ``None`` for the whole family."""

    layout: Layout
    pairs: bool | None = None


_Node = _Family | GroupMembers | _Plan
"""An entry of the queue: a family, the members of a group, or one plan."""


@dataclass(slots=True)
class _Queue:
    """Nodes by their lower bound, the lowest first; of equal bounds the more refined node, then the earlier."""

    entries: list[tuple[float, int, int, _Node]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def bound(self) -> float:
        """The lower bound of all nodes, in seconds."""
        return self.entries[0][0] if self.entries else inf

    def push(self, bound: float, node: _Node) -> None:
        """Add a node with its lower bound in seconds, unless it is infinite."""
        if bound < inf:
            level = 3 if isinstance(node, _Family) else 2 if isinstance(node, GroupMembers) else int(node.is_rough)
            heappush(self.entries, (bound, level, next(self.numbers), node))

    @property
    def first_plan(self) -> Layout | None:
        """The layout of the plan with the lowest bound; ``None`` where no plan is in the queue."""
        plans = {(bound, number): node.layout for bound, _, number, node in self.entries if isinstance(node, _Plan)}
        return plans[min(plans)] if plans else None

    def pop(self) -> _Node:
        """Remove the first node and return it."""
        return heappop(self.entries)[-1]


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Proven optimum by branch and bound over groups of plans, the cheapest bound first (Land and Doig 1960).

    Families of plans that share degrees and microbatch wait in a queue by the bound of what their devices compute. The
    first family is divided by schedule into groups, for whose members bounds of time and memory are computed all at
    once, without completing any plan. A group waits by its lowest member; when the group is first, this member is
    completed and, if it fits, waits by its own bound, and then by the longest path of its program. When a longest path
    is first, the plan is simulated. The search ends when no bound in the queue is below the best step time, so that no
    other plan can be faster. Where a budget ends it, the proven lower bound is that of the queue. Where the time is
    up, or at Ctrl-C, the best plan so far stands, or else the most promising plan is evaluated.

    Parameters
    ----------
    starts
        Whether the search begins with known plans (`meshwise.strategies.search.starts`, and those of the space) and a
        descent from the best of them: a good plan lets bounds drop most of a space at once.
    cutoff
        Step time in seconds from which plans are not looked for; ``None`` for none. Where no plan is faster, this is
        proven.
    """

    name: ClassVar[str] = "best_first"

    starts: bool = True
    cutoff: float | None = None

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising plans, and proofs of how fast any plan can be; return the last proof."""
        state = BestFirstSearch(problem, costs, Incumbent(inf if self.cutoff is None else self.cutoff))
        return (yield from state.search(space, starts=self.starts))


@dataclass(slots=True)
class BestFirstSearch:
    """The state of one search: the best plan so far, the queue, and whether any plan fits, and any on devices alone."""

    problem: Problem
    costs: CostModel
    incumbent: Incumbent = field(default_factory=Incumbent)
    queue: "_Queue" = field(default_factory=_Queue)
    has_fit: bool = False
    fits_on_devices: bool = False

    def search(self, space: Space, *, starts: bool = True) -> Proposals:
        """Yield known plans, if ``starts``, then the plans of a space; return the last proof, ``None`` out of time.

        Where nothing fits with everything on devices, the search goes on in the space with offload.
        """
        proven_space = None
        try:
            if starts:
                yield from self.begin_with_known(space)
            yield from self.search_space(space)
            # a best plan with offload can only be a known plan: the space of the first search has none
            layout = self.incumbent.layout
            # below a cutoff there may be no plan though some fit on devices: then none needs the host
            is_slow = layout is None and self.fits_on_devices and self.incumbent.time < inf
            needs_offload = not is_slow and (layout is None or bool(layout.offload))
            if needs_offload and space.offload is None and not (space.core or space.wide):
                proven_space = space.with_limits(offload=list_offloadings())
                if starts and self.incumbent.layout is not None:
                    yield from descend(self.problem, proven_space, self.costs, self.incumbent)
                yield from self.search_space(proven_space, proven_space)
        except (OutOfTime, KeyboardInterrupt) as error:
            if self.incumbent.layout is None and (layout := self.queue.first_plan) is not None:
                yield from self.incumbent.evaluate(self.problem, layout)
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        return Proof(self.incumbent.time, proven_space)

    def begin_with_known(self, space: Space) -> Proposals:
        """Yield a first plan at once and the bound of all plans, then the best known plan and a descent from it."""
        problem, costs, incumbent = self.problem, self.costs, self.incumbent
        first_layout = yield from propose_first_known(problem, space, costs, incumbent)
        self.has_fit = first_layout is not None
        self.fits_on_devices = first_layout is not None and not first_layout.offload
        if self.has_fit:
            yield Proof(least_step_time(problem))
        rising_bounds = rank_known_plans(problem, space, costs)
        shortest_plan = find_shortest_known(rising_bounds, incumbent.time)
        if shortest_plan is not None:
            bounds_left, start_layout = chain([shortest_plan], rising_bounds), shortest_plan[1]
            takes_long = not is_simulated_soon(problem, start_layout)
            if takes_long:  # a faster plan found on the descent may make its simulation needless
                yield from descend(problem, space, costs, incumbent, start_layout)
            yield from propose_best_known(problem, bounds_left, incumbent)
            if takes_long:
                return None
        if incumbent.layout is not None:
            yield from descend(problem, space, costs, incumbent)
        return None

    def search_space(self, space: Space, proven_space: Space | None = None) -> Proposals:
        """Yield the plans of a space that may be better than the best so far, and proofs about the space.

        ``proven_space`` is the space that proofs name, if it is not that of the search.
        """
        choices, queue = find_choices(self.problem, space), _Queue()
        self.queue = queue
        num_plans = 0
        # where only the host has room, the best plan is in the space with offload, of which this bound says nothing
        is_whole = proven_space is not None or space.offload is not None or space.core or space.wide
        for family in choices.families():
            num_plans += choices.count_layouts(family)
            queue.push(self.costs.family_bound(family), _Family(family))
        while queue.bound < self.incumbent.time:
            if (is_whole or self.fits_on_devices) and self.has_fit and queue.bound > 0:
                yield Proof(queue.bound, proven_space)
            bound, node = queue.bound, queue.pop()
            if isinstance(node, _Family) and node.pairs is None:
                # the bound of devices' busy time is sharper, but holds only where passes run one at a time
                queue.push(bound, _Family(node.layout, pairs=True))
                queue.push(max(self.costs.busy_bound(node.layout), bound), _Family(node.layout, pairs=False))
            elif isinstance(node, _Family):
                for group in choices.groups(node.layout, pairs=bool(node.pairs)):
                    members = GroupMembers(group, self.costs.group_bounds(group, self.incumbent.time))
                    queue.push(max(members.bound, bound), members)
            elif isinstance(node, GroupMembers):
                layout = node.take_next()
                queue.push(node.bound, node)
                self._queue_layout(queue, layout, bound)
            elif node.is_rough:
                plan = complete(self.problem, node.layout)
                (path,) = self.costs.longest_paths([plan])
                if path >= self.incumbent.time or (memory_depends_on_timing(node.layout) and not self.costs.fits(plan)):
                    continue
                queue.push(path, _Plan(node.layout, is_rough=False))
            else:
                yield from self.incumbent.evaluate(self.problem, node.layout)
        yield ConsideredPlans(num_plans)
        return None

    def _queue_layout(self, queue: _Queue, layout: Layout, bound: float) -> None:
        """Add a layout to the queue with its own bound, if it fits; whether it fits may have to wait for its path."""
        plan = complete(self.problem, layout)
        if memory_depends_on_timing(layout) or self.costs.fits(plan):
            is_sure = not memory_depends_on_timing(layout)
            self.has_fit |= is_sure
            self.fits_on_devices |= is_sure and not layout.offload
            queue.push(max(self.costs.plan_bound(plan), bound), _Plan(layout, is_rough=True))
