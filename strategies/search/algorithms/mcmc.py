"""A Metropolis walk over the space, after FlexFlow.

References
----------
.. [1] Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks",
   MLSys 2019, section 6; ``FFModel::mcmc_optimize`` in the authors' source.
.. [2] Hastings, "Monte Carlo sampling methods using Markov chains and their applications",
   Biometrika 57(1), 1970.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import ClassVar, NamedTuple

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space, list_by_habit, neighbours

RESTART_DRAWS = 100
"""Random layouts that a restart tries before it goes back to the best place."""


class _Place(NamedTuple):
    """A place of the walk: a layout that fits, its step time in seconds, and its neighbours."""

    layout: Layout
    cost: float
    neighbour_layouts: tuple[Layout, ...]


_Visit = Generator[Plan, Evaluation, _Place | None]


@dataclass(frozen=True, slots=True)
class MCMC:
    """Random walk that takes better neighbours, and sometimes worse ones (FlexFlow, MLSys 2019).

    The walk starts from what an expert would try first: data parallelism, or else the least model
    parallelism that fits, tensor inside the node and pipeline across. A proposal is a uniformly
    drawn neighbour; one that does not fit is refused without an evaluation.

    Differences from [1]_: the step is accepted with probability
    ``min(1, (cost / new)**(1 / temperature) * neighbours / new_neighbours)``. For small changes
    the first factor is ``exp(-(new - cost) / (temperature * cost))``, so the walk does not depend
    on the unit or size of the step time; the second factor [2]_ corrects for layouts with many
    neighbours. Without restarts the walk visits a plan in proportion to
    ``step_time**(-1 / temperature)``. It restarts from a random layout when it finds nothing
    better for a while. The states are whole layouts instead of one configuration per operator.

    Parameters
    ----------
    steps
        Proposals in all, those refused or repeated included.
    temperature
        Relative change of the step time that is accepted with probability 1/e.
    patience
        Steps without a new best before a restart; ``None`` for never.
    faithful
        As published: accept with ``exp(-alpha * (new - cost))`` on times in ms, and go back to
        the best every ``steps / 100`` steps, at most 1000.
    alpha
        Used where ``faithful``.
    """

    name: ClassVar[str] = "mcmc"
    most_plans: ClassVar[int] = MOST_LISTED

    seed: int = 0
    steps: int = 10_000
    temperature: float = 0.05
    patience: int | None = 100
    faithful: bool = False
    alpha: float = 1.2

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.patience is not None and self.patience < 1):
            raise ValueError(f"mcmc: steps and patience are at least 1, met {self.steps} and {self.patience}")
        if not self.temperature > 0 or not self.alpha >= 0:
            raise ValueError(
                f"mcmc: temperature is more than 0 and alpha at least 0, met {self.temperature} and {self.alpha}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of the walk that fit; prove nothing."""
        rng = Random(self.seed)
        layouts = list_by_habit(problem, space)
        current_place = yield from _visit_first(problem, space, costs, layouts)
        if current_place is None:
            return None
        best_place, num_waited = current_place, 0
        restart_steps = min(max(self.steps // 100, 1), 1000) if self.faithful else self.patience
        for _ in range(self.steps):
            if num_waited == restart_steps:
                draws = () if self.faithful else rng.sample(layouts, min(RESTART_DRAWS, len(layouts)))
                current_place, num_waited = (yield from _visit_first(problem, space, costs, draws)) or best_place, 0
            num_waited += 1
            if not current_place.neighbour_layouts:
                continue  # a place without neighbours is left by a restart
            place = yield from _visit_layout(problem, space, costs, rng.choice(current_place.neighbour_layouts))
            if place is None:
                continue
            if place.cost < best_place.cost:
                best_place, num_waited = place, num_waited if self.faithful else 0
            if rng.random() < self._find_acceptance(current_place, place):
                current_place = place
        return None

    def _find_acceptance(self, current_place: _Place, place: _Place) -> float:
        """Return the probability of going from ``current_place`` to ``place``."""
        if self.faithful:
            return exp(min(0.0, -self.alpha * (place.cost - current_place.cost) * 1e3))  # alpha is for times in ms
        ratio = log(current_place.cost / place.cost) / self.temperature
        return exp(min(0.0, ratio + log(len(current_place.neighbour_layouts) / len(place.neighbour_layouts))))


def _visit_first(problem: Problem, space: Space, costs: CostModel, candidates: Sequence[Layout]) -> _Visit:
    for layout in candidates:
        place = yield from _visit_layout(problem, space, costs, layout)
        if place is not None:
            return place
    return None


def _visit_layout(problem: Problem, space: Space, costs: CostModel, layout: Layout) -> _Visit:
    """Return the place at ``layout``, or ``None`` where its plan does not fit."""
    plan = complete(problem, layout)
    if not costs.fits(plan):
        return None
    evaluation = yield plan
    if not evaluation.fits:
        return None
    return _Place(layout, evaluation.step_time, neighbours(problem, space, layout))
