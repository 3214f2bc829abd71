"""The order of all layouts of a space by step time, made exact only as far as a question needs.

A layout's step time is known by ever sharper lower bounds: one that is inherited, the closed form, the longest path,
and last the simulation. The layout with the least bound is looked at more closely, until the least is a step time;
then no other can be less (A*, Hart, Nilsson and Raphael 1968). Questions share what was computed for earlier ones.

On another machine, the same layouts begin with bounds that are inherited: where one part is ``f`` times as fast,
no path through a step is shorter than before divided by ``f``; where it is slower, none is shorter than before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from simulator.cluster import Cluster
from simulator.engine import step_time
from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.evaluation import Evaluation, Trial
from strategies.explanation.machine_part import with_memory
from strategies.layout import Layout
from strategies.lowering import lower
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.habits import by_habit
from strategies.search.space import EVERYTHING, Space

Seen = Callable[[int], None]
"""Called now and then with how many layouts have been looked at."""

TELL = 500
"""After how many layouts it is called again."""


def unlimited() -> float:
    """Return how many seconds are left where nothing limits them."""
    return inf


_ROUNDING = 1 - 1e-6
"""Whole ticks make a scaled path up to a tick a task shorter; far less than this, of paths that matter."""

_INHERITED, _CLOSED_FORM, _LONGEST_PATH, _SIMULATED = range(4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, the bytes of its fullest device, and whether it fits."""

    layout: Layout
    peak: float
    fits: bool


Allowed = Callable[[Candidate], bool]


class Ranking:
    """The candidates of one problem in order of step time.

    Parameters
    ----------
    floors
        Seconds that each candidate's step takes at least.
    """

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], floors: Sequence[float]) -> None:
        self.problem, self.candidates = problem, candidates
        self.costs = SimulatedCost(problem)
        self.bounds, self._paths = list(floors), list(floors)
        self._levels = [_INHERITED] * len(floors)
        self.simulated = 0

    def ascending(self, allowed: Allowed, below: float = inf) -> Iterator[Trial]:
        """Yield the candidates that are ``allowed`` as trials, the fastest first, those that take less than ``below``.

        ``below`` are seconds.
        """
        queue = [(bound, index) for index, bound in enumerate(self.bounds) if allowed(self.candidates[index])]
        heapify(queue)
        while queue and queue[0][0] < below:
            bound, index = heappop(queue)
            if bound < self.bounds[index]:  # another question has learnt more of it
                heappush(queue, (self.bounds[index], index))
            elif self._levels[index] == _SIMULATED:
                yield self._trial(index)
            else:
                self._sharpen(index)
                heappush(queue, (self.bounds[index], index))

    def fastest(self, allowed: Allowed, below: float = inf) -> Trial | None:
        """Return the fastest candidate of those that are ``allowed``; ``None`` where none takes less than ``below``."""
        return next(self.ascending(allowed, below), None)

    def first(self, count: int, allowed: Allowed) -> tuple[Trial, ...]:
        """Return the ``count`` fastest candidates of those that are ``allowed``."""
        return tuple(islice(self.ascending(allowed), count))

    def least_memory(self, allowed: Allowed = lambda _: True) -> Candidate | None:
        """Return the candidate whose fullest device holds least."""
        return min(filter(allowed, self.candidates), key=lambda each: each.peak, default=None)

    def plan(self, candidate: Candidate) -> Plan:
        """Return the complete plan of a candidate."""
        return complete(self.problem, candidate.layout)

    def on(self, cluster: Cluster, factor: float) -> "Ranking":
        """Return the same candidates on a machine of which one part is ``factor`` times as fast."""
        floors = [bound / max(factor, 1.0) * _ROUNDING for bound in self._paths]
        return Ranking(replace(self.problem, cluster=cluster), self.candidates, floors)

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of a step, whatever memory it needs."""
        return step_time_of(self.costs, plan)

    def _sharpen(self, index: int) -> None:
        plan, level = self.plan(self.candidates[index]), self._levels[index] + 1
        if level == _SIMULATED:
            self.simulated += 1
            self.bounds[index] = self.step_time(plan)
        else:
            (found,) = [self.costs.bound(plan)] if level == _CLOSED_FORM else self.costs.longest_paths([plan])
            self.bounds[index] = self._paths[index] = max(found, self.bounds[index])
        self._levels[index] = level

    def _trial(self, index: int) -> Trial:
        candidate = self.candidates[index]
        return Trial(self.plan(candidate), Evaluation(self.bounds[index], candidate.peak, candidate.fits), 0.0)


def ranking(
    problem: Problem,
    space: Space = EVERYTHING,
    *,
    seconds: Callable[[], float] = unlimited,
    seen: Seen | None = None,
) -> Ranking:
    """Return the ranking of all layouts of ``space``, or of those that were looked at before no ``seconds`` were left.

    Parameters
    ----------
    seconds
        How many are left.
    """
    costs = SimulatedCost(problem)
    candidates: list[Candidate] = []
    for layout in by_habit(problem, space):
        if len(candidates) % TELL == 0:
            if seconds() <= 0:
                break
            if seen is not None:
                seen(len(candidates))
        plan = complete(problem, layout)
        candidates.append(Candidate(layout, costs.peak_memory(plan), costs.fits(plan)))
    return Ranking(problem, candidates, [0.0] * len(candidates))


def fits(candidate: Candidate) -> bool:
    """Return whether a candidate fits."""
    return candidate.fits


def fits_with(problem: Problem, memory: Callable[[float], float]) -> Allowed:
    """Return whether a candidate would fit where a device that has some bytes had ``memory`` of them."""
    changed = replace(problem, cluster=with_memory(problem.cluster, memory))
    if len(changed.cluster.accelerators) == 1:
        capacity = changed.cluster.accelerator.memory
        return lambda candidate: candidate.peak <= capacity
    costs = SimulatedCost(changed)
    return lambda candidate: costs.fits(complete(changed, candidate.layout))


def step_time_of(costs: SimulatedCost, plan: Plan) -> float:
    """Return the seconds of a step, whatever memory it needs."""
    return step_time(lower(costs.problem, plan, costs=costs.costs), costs.engine)
