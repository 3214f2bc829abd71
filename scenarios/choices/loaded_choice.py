"""The plan with the shortest step at a quantile of the steps that loads make differ, of plans near the fastest.

An ordinary search ranks plans of full sequences. The fastest of them and of sequences with the mean load, one of each
mesh and microbatch and then more of the best kinds, are compared under a few of the draws, and the best of these under
all. A plan that pads more, or waits more for other ranks, loses.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.ranking import Candidate, Ranking, fits, ranking
from meshwise.strategies.loads.loaded_costs import LoadedCosts
from meshwise.strategies.loads.loaded_step import LoadedStep
from meshwise.strategies.operators.operator_plan import cuts_operators
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.driver import INTERRUPTED, SearchResult
from meshwise.strategies.search.proposals import OutOfTime

MOST_KINDS = 16
"""Most kinds of plans that are compared under a few draws."""
BEST_KINDS, MOST_ALIKE = 3, 2
"""Best kinds of which more plans are compared, and how many more of each."""
MOST_SLOWER = 2.0
"""The step time up to which plans are compared, over that of the fastest."""
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
    seconds, weighed = time_left(), list[LoadedPlan]()
    reserve = 0.0 if seconds == inf else WEIGHING_SHARE * seconds
    screening = _Screening(costs)
    try:
        if costs.can_weigh(best.plan):
            screening.weigh(best)
        screening.compare_kinds(_rank_plans(scenario, costs, best, lambda: time_left() - reserve))
        is_finished = True
    except OutOfTime:
        is_finished = False
    for trial in screening.list_best(MOST_WEIGHED):
        if weighed and time_left() <= 0:
            is_finished = False
            break
        weighed.append(LoadedPlan(trial, costs.weigh(trial.plan)))
    ranked = sorted(weighed, key=lambda plan: plan.loads.high)
    return LoadedChoice(loads.quantile, loads.draws, tuple(ranked), len(screening.rows), is_finished)


def weigh_result(
    scenario: Scenario, result: SearchResult, time_left: TimeLeft = unlimited_seconds
) -> tuple[SearchResult, LoadedChoice | None]:
    """Return the result of a search with the best plan under a scenario's loads, and the choice; None without loads.

    Evaluation and gap of the plan are those of full sequences.
    """
    if scenario.loads is None or result.best is None or result.interrupted:
        return result, None
    try:
        choice = choose_loaded(scenario, result.best, time_left)
    except KeyboardInterrupt:  # the best plan of full sequences stays
        return replace(result, end=INTERRUPTED), None
    if choice.best is None:
        return result, choice
    trial, bound = choice.best.trial, result.lower_bound
    gap = None if not bound else max(trial.evaluation.step_time / bound - 1, 0.0)
    # a certificate is about one plan
    certificate = result.certificate if trial.plan == result.best.plan else None
    return replace(result, best=trial, gap=gap, certificate=certificate), choice


def _rank_plans(scenario: Scenario, costs: LoadedCosts, best: Trial, time_left: TimeLeft) -> list[Ranking]:
    """Return plans near the best one, ranked by the step of full sequences, and by that of typical ones if it differs.

    Raises
    ------
    OutOfTime
        Where no time is left.
    """
    problem, typical_problem = scenario.problem, costs.build_typical_problem()
    layouts = () if cuts_operators(problem, best.plan) else (recover_layout(problem, best.plan),)
    space = scenario.with_starts(scenario.make_space())
    problems = [problem] if typical_problem == problem else [problem, typical_problem]
    return [ranking(SimulatedCost(row), space, layouts, seconds=time_left) for row in problems]


class _Screening:
    """Plans under a few draws: the fastest of each kind, then more of the best kinds.

    Plans of one kind have the same degrees and microbatch, so that the same ranks compute the same sequences.
    """

    def __init__(self, costs: LoadedCosts) -> None:
        self.costs = costs
        self.rows: list[tuple[float, int, Trial]] = []
        self.plans: set[Plan] = set()

    def compare_kinds(self, rankings: list[Ranking]) -> None:
        """Compare plans of the rankings in turn."""
        limits = [_limit_time(plan_ranking) for plan_ranking in rankings]
        for plan_ranking, limit in MOST_KINDS // len(rankings) * list(zip(rankings, limits, strict=True)):
            known_kinds = {_find_kind(plan) for plan in self.plans}
            self._weigh_fastest(plan_ranking, limit, partial(_differs_from, known_kinds))
        for kind in dict.fromkeys(_find_kind(trial.plan) for trial in self.list_best(BEST_KINDS)):
            for plan_ranking in MOST_ALIKE // len(rankings) * rankings:
                self._weigh_fastest(plan_ranking, inf, partial(_is_of, kind))

    def _weigh_fastest(self, plan_ranking: Ranking, limit: float, is_wanted: Callable[[Plan], bool]) -> None:
        """Compare the fastest plan of a ranking that is wanted, new, and fits with full sequences."""

        def is_allowed(candidate: Candidate) -> bool:
            plan = candidate.plan
            is_new = plan not in self.plans and is_wanted(plan)
            return is_new and self.costs.can_weigh(plan) and self.costs.full_costs.fits(plan)

        trial = plan_ranking.find_fastest(is_allowed, limit)
        if trial is not None:
            self.weigh(Trial(trial.plan, self.costs.full_costs.evaluate(trial.plan), 0.0))

    def weigh(self, trial: Trial) -> None:
        """Compare a plan."""
        self.plans.add(trial.plan)
        self.rows.append((self.costs.weigh(trial.plan, FEW_DRAWS).high, len(self.rows), trial))

    def list_best(self, count: int) -> list[Trial]:
        """Return the best plans so far."""
        return [trial for _, _, trial in sorted(self.rows, key=lambda row: row[:2])[:count]]


def _find_kind(plan: Plan) -> Hashable:
    return tuple(map(plan.mesh.size, (PIPELINE, EXPERT, CONTEXT, TENSOR, TENSOR_ROWS))), plan.microbatch


def _differs_from(kinds: set[Hashable], plan: Plan) -> bool:
    return _find_kind(plan) not in kinds


def _is_of(kind: Hashable, plan: Plan) -> bool:
    return _find_kind(plan) == kind


def _limit_time(plan_ranking: Ranking) -> float:
    """Return the step time up to which plans of a ranking are compared."""
    fastest = plan_ranking.find_fastest(fits)
    return 0.0 if fastest is None else MOST_SLOWER * fastest.evaluation.step_time
