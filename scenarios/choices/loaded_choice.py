"""The plan with the shortest step at a quantile of the steps that loads make differ, of plans near the fastest.

An ordinary search ranks plans of full sequences. The fastest of them, a few of each mesh and microbatch, are compared
under a few of the draws, the best of these under all. A plan that pads more, or waits more for other ranks, loses.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.ranking import fits, ranking
from meshwise.strategies.loads.loaded_step import LoadedStep
from meshwise.strategies.operators.operator_plan import cuts_operators
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.search.proposals import OutOfTime

MOST_SCREENED = 16
"""Most plans that are compared under a few draws."""
MOST_ALIKE = 2
"""Most of them with the same mesh and microbatch."""
MOST_SLOWER = 1.5
"""The step time of full sequences up to which plans are compared, over that of the fastest."""
MOST_WEIGHED = 4
"""Most plans that are compared under all draws."""
FEW_DRAWS = 8
WEIGHING_SHARE = 0.5
"""The part of the time left that is kept for the comparison under all draws."""


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan with its evaluation of full sequences, and its steps under drawn loads."""

    trial: Trial
    loads: LoadedStep

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class LoadedChoice:
    """The best plan under loads that vary.

    Parameters
    ----------
    quantile
        The quantile of step times that is made least.
    draws
        Steps that were drawn.
    ranked
        Plans under all draws, the best first.
    num_screened
        Plans that were compared under a few draws.
    is_finished
        Whether there was time to compare all of them.
    """

    quantile: float
    draws: int
    ranked: tuple[LoadedPlan, ...]
    num_screened: int
    is_finished: bool

    __repr__ = brief_repr()

    @property
    def best(self) -> LoadedPlan | None:
        """The chosen plan; None where none of the fastest ones has a flush."""
        return next(iter(self.ranked), None)

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON-ready data."""
        return {
            "quantile": self.quantile,
            "draws": self.draws,
            "screened": self.num_screened,
            "finished": self.is_finished,
            "ranked": [
                {
                    "plan": plan.trial.plan.describe(),
                    "step_time": plan.trial.evaluation.step_time,
                    "peak_memory": plan.trial.evaluation.peak_memory,
                    "loads": plan.loads.to_json(),
                }
                for plan in self.ranked
            ],
        }


def choose_loaded(scenario: Scenario, best: Trial, time_left: TimeLeft = unlimited_seconds) -> LoadedChoice:
    """Return the best plan under a scenario's loads, of the ``best`` of a search and plans near it.

    Where ``time_left`` returns 0, the choice is among the plans compared until then.

    Raises
    ------
    ValueError
        Where nothing varies.
    """
    costs, loads = scenario.make_loaded_costs(), scenario.loads
    assert loads is not None  # else there are no costs
    screened, weighed, is_finished = list[tuple[float, int, Trial]](), list[LoadedPlan](), True
    seconds = time_left()
    reserve = 0.0 if seconds == inf else WEIGHING_SHARE * seconds
    try:
        for trial in _list_candidates(scenario, best, lambda: time_left() - reserve):
            if costs.can_weigh(trial.plan):
                screened.append((costs.weigh(trial.plan, FEW_DRAWS).high, len(screened), trial))
    except OutOfTime:
        is_finished = False
    for _, _, trial in sorted(screened, key=lambda row: row[:2])[:MOST_WEIGHED]:
        if weighed and time_left() <= 0:
            is_finished = False
            break
        weighed.append(LoadedPlan(trial, costs.weigh(trial.plan)))
    ranked = sorted(weighed, key=lambda plan: plan.loads.high)
    return LoadedChoice(loads.quantile, loads.draws, tuple(ranked), len(screened), is_finished)


def _list_candidates(scenario: Scenario, best: Trial, time_left: TimeLeft) -> Iterator[Trial]:
    """Yield the best plan of a search, and other fast plans of its space, at most `MOST_ALIKE` of a kind.

    Raises
    ------
    OutOfTime
        Where no time is left.
    """
    yield best
    layouts = () if cuts_operators(scenario.problem, best.plan) else (recover_layout(scenario.problem, best.plan),)
    space = scenario.with_starts(scenario.make_space())
    plan_ranking = ranking(SimulatedCost(scenario.problem), space, layouts, seconds=time_left)
    limit, counts, num_listed = MOST_SLOWER * best.evaluation.step_time, Counter[Hashable](), 1
    counts[best.plan.mesh, best.plan.microbatch] = 1
    for trial in plan_ranking.list_ascending(fits, limit):
        kind = trial.plan.mesh, trial.plan.microbatch
        if trial.plan == best.plan or counts[kind] >= MOST_ALIKE:
            continue
        counts[kind] += 1
        num_listed += 1
        yield trial
        if num_listed >= MOST_SCREENED:
            return
