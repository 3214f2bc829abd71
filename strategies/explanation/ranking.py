"""Ranking of plans by step time, exact as far as a question needs.

Every layout has a lower bound of its step time, which is refined in levels: an inherited bound, the closed form, the
longest path, and last the simulation. The layout with the lowest bound is refined until the lowest bound is a step
time; then no other layout can be faster (A*, Hart, Nilsson and Raphael 1968). Later questions reuse these bounds.

A small space is ranked completely. Of a larger space the known plans are ranked, and the plans one decision away from
the best of them, then those one decision away from the new best, and so on, until no plan so near is better.

On another machine the same layouts begin with inherited bounds: where one part is ``f`` times as fast, no path through
a step is shorter than before divided by ``f``; where it is slower, none is shorter than before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from time import process_time
from typing import Protocol

from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.simulator.memo import memoise
from meshwise.strategies.evaluation import CostModel, Evaluation, Trial
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.driver import run_search
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.space import EVERYTHING, Space, count_layouts, groups, list_by_habit, neighbours
from meshwise.strategies.search.starts import known_layouts

SeenCallback = Callable[[int], None]
"""Called now and then with the number of layouts looked at so far."""

TELL_INTERVAL = 500
"""Layouts between two calls."""

MOST_RANKED = 5_000
"""The largest number of layouts of a space that is ranked completely, which takes some seconds."""


SEARCH_SHARE = 0.4
"""The fraction of the time left that a search may take before plans near its best are ranked."""

_ROUNDING = 1 - 1e-6
"""A factor on inherited bounds: rounding to whole ticks makes a scaled path up to a tick per task shorter, which is far
less than this for paths that matter."""

_INHERITED, _CLOSED_FORM, _LONGEST_PATH, _SIMULATED = range(4)


class RankingCosts(CostModel, Protocol):
    """What a ranking asks about the plans of a problem, besides what searches ask."""

    problem: Problem

    def step_time(self, plan: Plan) -> float:
        """Return the step time in seconds, whether the plan fits or not."""

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that the plan needs there, whatever devices need."""

    def memory_needs_simulation(self, plan: Plan) -> bool:
        """Return whether only a simulation tells the memory of a plan."""


class Candidate:
    """A layout with its peak memory and whether it fits, which are computed when they are first asked for.

    ``look`` is called before that. ``needs_simulation`` says whether only a simulation tells the memory of the plan.
    """

    __slots__ = ("_costs", "_look", "_memory", "layout", "needs_simulation")

    def __init__(self, layout: Layout, costs: RankingCosts, look: Callable[[], None]) -> None:
        self.layout, self._costs, self._look = layout, costs, look
        self._memory: tuple[float, bool] | None = None
        self.needs_simulation = costs.memory_needs_simulation(self.plan)

    def __repr__(self) -> str:
        """Return the plan in words."""
        return f"Candidate({self.plan.describe()})"

    @property
    def plan(self) -> Plan:
        """The complete plan."""
        return complete(self._costs.problem, self.layout)

    @property
    def peak(self) -> float:
        """Peak memory of the fullest device, in bytes."""
        return self._measure()[0]

    @property
    def fits(self) -> bool:
        """Whether the plan fits in the memory of every device and host."""
        return self._measure()[1]

    @property
    def hosts_fit(self) -> bool:
        """Whether the plan fits in the memory of every host."""
        self._look()
        return self._costs.hosts_fit(self.plan)

    def _measure(self) -> tuple[float, bool]:
        if self._memory is None:
            self._look()
            plan = self.plan
            self._memory = self._costs.peak_memory(plan), self._costs.fits(plan)
        return self._memory


CandidateFilter = Callable[[Candidate], bool]


@dataclass(frozen=True, slots=True)
class RankedPlans:
    """The plans that are ranked: their number, the number in the space, and whether they are the whole space.

    Otherwise they are known plans and those one decision away from the best of them.
    """

    plans: int
    space: int
    whole: bool


class Ranking:
    """Candidates of one problem by step time, with lower bounds of their step times in seconds.

    ``costs`` is the cost model of the problem; ``seconds`` returns the number of seconds left.

    Raises
    ------
    OutOfTime
        By every method that looks at plans, where no seconds are left.
    """

    def __init__(
        self,
        costs: RankingCosts,
        candidates: Iterable[Candidate] = (),
        lower_bounds: Iterable[float] = (),
        seconds: TimeLeft = unlimited_seconds,
    ) -> None:
        self.costs, self.problem = costs, costs.problem
        self.candidates, self.seconds = list(candidates), seconds
        self.bounds = list(lower_bounds) or [0.0] * len(self.candidates)
        self._paths = list(self.bounds)
        self._levels = [_INHERITED] * len(self.bounds)
        self.num_simulated = 0

    def check_time(self) -> None:
        """Raise `OutOfTime` where no seconds are left; called before every plan that is looked at."""
        if self.seconds() <= 0:
            raise OutOfTime

    def add_layouts(self, layouts: Iterable[Layout]) -> None:
        """Add candidates."""
        for layout in layouts:
            self.check_time()
            self.candidates.append(Candidate(layout, self.costs, self.check_time))
            self.bounds.append(0.0)
            self._paths.append(0.0)
            self._levels.append(_INHERITED)

    def list_ascending(self, is_allowed: CandidateFilter, time_limit: float = inf) -> Iterator[Trial]:
        """Yield the allowed candidates that take less than ``time_limit`` seconds as trials, the fastest first."""
        return map(self._build_trial, self._order_indices(is_allowed, time_limit))

    def _order_indices(self, is_allowed: CandidateFilter, time_limit: float = inf) -> Iterator[int]:
        """Yield the indices of allowed candidates by rising step time.

        Where only a simulation tells a candidate's memory, whether it is allowed is asked last, for it takes longest.
        """
        queue = [
            (self.bounds[index], index)
            for index, candidate in enumerate(self.candidates)
            if candidate.needs_simulation or is_allowed(candidate)
        ]
        heapify(queue)
        while queue and queue[0][0] < time_limit:
            self.check_time()
            bound, index = heappop(queue)
            if bound < self.bounds[index]:  # another question has refined it since
                heappush(queue, (self.bounds[index], index))
            elif self._levels[index] < _LONGEST_PATH:
                self._sharpen_bound(index)
                heappush(queue, (self.bounds[index], index))
            elif self.candidates[index].needs_simulation and not is_allowed(self.candidates[index]):
                continue
            elif self._levels[index] == _SIMULATED:
                yield index
            else:
                self._sharpen_bound(index)
                heappush(queue, (self.bounds[index], index))

    def find_fastest(self, is_allowed: CandidateFilter, time_limit: float = inf) -> Trial | None:
        """Return the fastest allowed candidate as a trial; ``None`` where none takes less than ``time_limit``."""
        return next(self.list_ascending(is_allowed, time_limit), None)

    def find_fastest_candidate(self, is_allowed: CandidateFilter) -> Candidate | None:
        """Return the fastest allowed candidate; ``None`` where there is none."""
        return next((self.candidates[index] for index in self._order_indices(is_allowed)), None)

    def find_least_memory(self, is_allowed: CandidateFilter = lambda _: True) -> Candidate | None:
        """Return the allowed candidate with the least peak memory; ``None`` where there is none."""
        return min(filter(is_allowed, self.candidates), key=lambda candidate: candidate.peak, default=None)

    def complete_candidate(self, candidate: Candidate) -> Plan:
        """Return the complete plan of a candidate."""
        return complete(self.problem, candidate.layout)

    def find_layout(self, plan: Plan) -> Layout:
        """Return the layout of the first candidate whose complete plan is ``plan``."""
        return next(row.layout for row in self.candidates if self.complete_candidate(row) == plan)

    def with_costs(self, costs: RankingCosts, factor: float) -> "Ranking":
        """Return a ranking of the same candidates by ``costs``, on a machine with one part ``factor`` times as fast."""
        lower_bounds = [bound / max(factor, 1.0) * _ROUNDING for bound in self._paths]
        return Ranking(costs, self.candidates, lower_bounds, self.seconds)

    @memoise
    def step_time(self, plan: Plan) -> float:
        """Return the step time of a plan in seconds, whether it fits or not."""
        self.check_time()
        return self.costs.step_time(plan)

    def _sharpen_bound(self, index: int) -> None:
        plan, level = self.complete_candidate(self.candidates[index]), self._levels[index] + 1
        if level == _SIMULATED:
            self.num_simulated += 1
            self.bounds[index] = self.step_time(plan)
        else:
            (bound,) = [self.costs.plan_bound(plan)] if level == _CLOSED_FORM else self.costs.longest_paths([plan])
            self.bounds[index] = self._paths[index] = max(bound, self.bounds[index])
        self._levels[index] = level

    def _build_trial(self, index: int) -> Trial:
        candidate = self.candidates[index]
        evaluation = Evaluation(self.bounds[index], candidate.peak, candidate.fits)
        return Trial(self.complete_candidate(candidate), evaluation, 0.0)


class SpaceRanking(Ranking):
    """Candidates of a space: all its layouts where they are few, otherwise known ones and their neighbours.

    ``on_seen`` is called with the number of layouts looked at so far.
    """

    def __init__(
        self,
        costs: RankingCosts,
        space: Space,
        seconds: TimeLeft = unlimited_seconds,
        on_seen: SeenCallback = lambda _: None,
    ) -> None:
        super().__init__(costs, seconds=seconds)
        self.space, self._on_seen = space, on_seen
        self._layouts, self._surrounded_layouts = set[Layout](), set[Layout]()
        self._num_layouts = count_layouts(self.problem, space)
        self.is_complete = self._num_layouts <= MOST_RANKED

    @property
    def ranked_plans(self) -> RankedPlans:
        """The plans that are ranked."""
        return RankedPlans(len(self.candidates), self._num_layouts, self.is_complete)

    def add_layouts(self, layouts: Iterable[Layout]) -> None:
        """Add the layouts that are not candidates yet and that the space accepts."""
        for layout in layouts:
            if layout not in self._layouts and self._is_accepted(layout):
                if len(self._layouts) % TELL_INTERVAL == 0:
                    self._on_seen(len(self._layouts))
                self._layouts.add(layout)
                super().add_layouts([layout])

    def add_neighbours(self, layout: Layout) -> bool:
        """Add the layouts one decision away from ``layout``; return whether they were added for the first time.

        In a space that is ranked completely all layouts are candidates already, and the result is false.
        """
        if self.is_complete or layout in self._surrounded_layouts:
            return False
        self._surrounded_layouts.add(layout)
        self.check_time()
        self.add_layouts(neighbours(self.problem, self.space, layout))
        return True

    def descend(self) -> None:
        """Add the layouts one decision away from the best candidate, until no plan so near is better.

        The best candidate is the fastest that fits, or where none fits the one with the least peak memory.
        """
        while (best_candidate := self.find_fastest_candidate(fits) or self.find_least_memory()) is not None:
            if not self.add_neighbours(best_candidate.layout):
                return

    def _is_accepted(self, layout: Layout) -> bool:
        accepts = self.space.accepts
        if self.is_complete or accepts is None:
            return True
        return not accepts.list_refusals(self.problem, complete(self.problem, layout))


def ranking(
    costs: RankingCosts,
    space: Space = EVERYTHING,
    nearby_layouts: Sequence[Layout] = (),
    *,
    seconds: TimeLeft = unlimited_seconds,
    on_seen: SeenCallback = lambda _: None,
) -> SpaceRanking:
    """Return the ranking of a space: of all its layouts up to `MOST_RANKED`, otherwise of layouts near known ones.

    ``costs`` is the cost model of the problem. ``nearby_layouts`` are added to the known ones of a larger space, if
    they keep its limits, with their neighbours. ``seconds`` returns the number of seconds left.

    Raises
    ------
    OutOfTime
        Where no seconds are left.
    """
    plan_ranking, problem = SpaceRanking(costs, space, seconds, on_seen), costs.problem
    plan_ranking.check_time()
    if plan_ranking.is_complete:
        plan_ranking.add_layouts(list_by_habit(problem, space))
        return plan_ranking
    plan_ranking.add_layouts(known_layouts(problem, replace(space, starts=(*nearby_layouts, *space.starts))))
    for layout in nearby_layouts:
        plan_ranking.add_neighbours(layout)
    if not plan_ranking.candidates:  # no known plan keeps the limits
        plan_ranking.add_layouts(_list_representatives(problem, space))
    plan_ranking.descend()
    return plan_ranking


def search_best(costs: RankingCosts, space: Space, seconds: TimeLeft = unlimited_seconds) -> tuple[Layout, ...]:
    """Return the best plan that a search finds in part of the time, for a space that is not ranked completely.

    The descent of a ranking ends where no plan one decision away is better; a search looks farther.
    """
    seconds_left, problem = seconds(), costs.problem
    if seconds_left <= 0 or count_layouts(problem, space) <= MOST_RANKED:
        return ()
    limit = None if seconds_left == inf else SEARCH_SHARE * seconds_left
    best_trial = run_search(BestFirst(), problem, space, costs=costs, seconds=limit, clock=process_time).best
    return () if best_trial is None else (recover_layout(problem, best_trial.plan),)


def _list_representatives(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield the first layout of every family of a space."""
    families: set[Layout] = set()
    for group in groups(problem, space):
        family = find_family(group.layout)
        if group.num_members and family not in families:
            families.add(family)
            yield next(iter(group))


def fits(candidate: Candidate) -> bool:
    """Return whether a candidate fits."""
    return candidate.fits
