"""Simulated annealing over the space.

References
----------
.. [1] Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220(4598), 1983.
.. [2] Johnson, Aragon, McGeoch, Schevon, "Optimization by simulated annealing: an experimental evaluation; part I,
   graph partitioning", Operations Research 37(6), 1989: a temperature at which a given fraction of moves is accepted,
   geometric cooling.
.. [3] Metropolis et al., "Equation of state calculations by fast computing machines", Journal of Chemical Physics
   21(6), 1953: the acceptance.
.. [4] Osman, "Metastrategy simulated annealing and tabu search algorithms for the vehicle routing problem", Annals of
   Operations Research 41, 1993: reheating of a frozen system, from the best solution.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import exp, inf, log
from random import Random
from statistics import fmean
from typing import ClassVar, NamedTuple

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space, list_by_habit, neighbours

RESTART_DRAWS = 100
"""Random layouts that a restart tries before it goes back to the best layout."""

MOST_REFUSED = 100
"""Moves in a row that do not fit, after which a walk restarts."""

LEAST_CHANGE = 1e-6
"""Change of energy that counts as one: where all measured plans are as fast, the temperature is still more than 0."""


class _State(NamedTuple):
    """A layout that fits and its energy, the logarithm of its step time in seconds."""

    layout: Layout
    energy: float


_Visit = Generator[Plan, Evaluation, _State | None]


@dataclass(frozen=True, slots=True)
class SimulatedAnnealing:
    """A walk that takes worse neighbours ever more seldom (Kirkpatrick et al., Science 1983).

    The state is a layout that fits, and its energy the logarithm of its step time, so that a temperature is a relative
    change of the step time and nothing depends on its unit. The walk starts from what an expert would try first. A move
    is a uniformly drawn neighbour (`meshwise.strategies.search.space.neighbours`); one that does not fit is refused
    without an evaluation. A slower one is accepted with probability ``exp(-(new - energy) / temperature)`` [3]_, which
    is ``(time / new_time)**(1 / temperature)``.

    The first ``measured`` moves are all accepted. The initial temperature is the mean of their changes of energy, up or
    down, over ``log(1 / acceptance)``, so that such a rise is accepted with probability ``acceptance`` [2]_. Then the
    temperature is multiplied by ``cooling`` after every ``moves`` moves that fit [1]_ [2]_. Below ``frozen`` times the
    initial temperature the walk is frozen. If it has found a new best since it was heated, it goes back there and is
    reheated to ``reheating`` times the initial temperature [4]_. If not, or where no move fits any more, it restarts
    from a random layout at the initial temperature.

    It differs from `mcmc`, which walks on at one given temperature and corrects for the number of neighbours.
    Difference from [1]_: the temperature changes long before equilibrium, because a move is a simulation.

    Parameters
    ----------
    steps
        Moves in all, those refused or repeated included.
    acceptance
        Probability of accepting the mean rise at the initial temperature.
    measured
        Moves that fit from which the initial temperature is measured.
    reheating
        Fraction of the initial temperature; 1 for all of it.
    """

    name: ClassVar[str] = "simulated_annealing"
    most_plans: ClassVar[int] = MOST_LISTED

    seed: int = 0
    steps: int = 10_000
    acceptance: float = 0.3
    measured: int = 4
    cooling: float = 0.8
    moves: int = 1
    frozen: float = 0.02
    reheating: float = 0.5

    def __post_init__(self) -> None:
        for name in ("steps", "measured", "moves"):
            if getattr(self, name) < 1:
                raise ValueError(f"simulated_annealing: {name} is at least 1, met {getattr(self, name)}; nearest: 1")
        for name in ("acceptance", "cooling", "frozen"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"simulated_annealing: {name} is between 0 and 1, met {getattr(self, name)}")
        if not self.frozen < self.reheating <= 1:
            raise ValueError(
                f"simulated_annealing: reheating is more than frozen, which is {self.frozen}, and at most 1, "
                f"met {self.reheating}; nearest: 1"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of the walk that fit; prove nothing."""
        rng, layouts = Random(self.seed), list_by_habit(problem, space)
        list_neighbours = lru_cache(maxsize=1024)(partial(neighbours, problem, space))
        state = yield from _visit_first(problem, costs, layouts)
        if state is None:
            return None
        best_state, is_better = state, True
        changes: list[float] = []
        initial_temperature = temperature = inf  # at which every move is accepted
        num_moves = num_refused = 0
        for _ in range(self.steps):
            candidates = list_neighbours(state.layout)
            new_state = (yield from _visit_layout(problem, costs, rng.choice(candidates))) if candidates else None
            if new_state is not None:
                num_moves, num_refused, change = num_moves + 1, 0, new_state.energy - state.energy
                if new_state.energy < best_state.energy:
                    best_state, is_better = new_state, True
                if rng.random() < find_acceptance(change, temperature):
                    state = new_state
                if num_moves <= self.measured:
                    changes.append(abs(change))
                if num_moves == self.measured:
                    initial_temperature = temperature = self.find_initial_temperature(changes)
                elif num_moves > self.measured and (num_moves - self.measured) % self.moves == 0:
                    temperature *= self.cooling
            else:
                num_refused += 1
            is_stuck = not candidates or num_refused == MOST_REFUSED
            if is_stuck or temperature < self.frozen * initial_temperature:
                if is_better and not is_stuck:
                    state, temperature = best_state, self.reheating * initial_temperature
                else:
                    draws = rng.sample(layouts, min(RESTART_DRAWS, len(layouts)))
                    state = (yield from _visit_first(problem, costs, draws)) or best_state
                    temperature = initial_temperature
                num_refused, is_better = 0, state.energy < best_state.energy
                best_state = min(best_state, state, key=lambda place: place.energy)
        return None

    def find_initial_temperature(self, changes: Sequence[float]) -> float:
        """Return the temperature at which a rise of energy by the mean of ``changes`` has the wanted acceptance.

        >>> round(SimulatedAnnealing(acceptance=0.5).find_initial_temperature([0.1, 0.3]), 4)  # 0.2 / log(2)
        0.2885
        """
        return max(fmean(changes), LEAST_CHANGE) / -log(self.acceptance)


def find_acceptance(change: float, temperature: float) -> float:
    """Return the probability of a move by its change of energy ([3]_).

    >>> find_acceptance(-0.1, 0.2), round(find_acceptance(0.2, 0.2), 4)  # exp(-1)
    (1.0, 0.3679)
    """
    return exp(-max(change, 0.0) / temperature)


def _visit_first(problem: Problem, costs: CostModel, candidates: Iterable[Layout]) -> _Visit:
    for layout in candidates:
        state = yield from _visit_layout(problem, costs, layout)
        if state is not None:
            return state
    return None


def _visit_layout(problem: Problem, costs: CostModel, layout: Layout) -> _Visit:
    """Return the state of ``layout``, or ``None`` where its plan does not fit."""
    plan = complete(problem, layout)
    if not costs.fits(plan):
        return None
    evaluation = yield plan
    return _State(layout, log(evaluation.step_time)) if evaluation.fits else None
