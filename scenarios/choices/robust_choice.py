"""The plan with the shortest step time at a quantile of its uncertainty, not only as predicted."""

from dataclasses import asdict, dataclass
from typing import Any

from meshwise.scenarios.intervals import find_uncertainty, with_margin
from meshwise.scenarios.memory_forecast import forecast_memory
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.alternatives import Prospect, build_prospect, list_prospects
from meshwise.strategies.explanation.ranking import RankedPlans, ranking
from meshwise.strategies.operators.operator_plan import cuts_operators
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.proposals import OutOfTime


@dataclass(frozen=True, slots=True)
class RobustChoice:
    """The best plan at a quantile of step time, of those that lack memory with a small enough probability.

    ``max_risk`` is the largest allowed probability of lacking memory, and ``best_prospect`` None where no plan is
    allowed. ``ranked_prospects`` are the compared plans in the order in which they were compared, and ``ranked_plans``
    says which plans these are; None where there was no time to list them. ``is_finished`` says whether there was time
    to compare all of them.
    """

    quantile: float
    max_risk: float
    best_prospect: Prospect | None
    ranked_prospects: tuple[Prospect, ...]
    ranked_plans: RankedPlans | None
    is_finished: bool

    __repr__ = brief_repr()

    @property
    def plan(self) -> Plan | None:
        """The chosen plan."""
        return self.best_prospect.trial.plan if self.best_prospect else None

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON-ready data."""
        return {
            "quantile": self.quantile,
            "most_out_of_memory": self.max_risk,
            "best": build_prospect_document(self.best_prospect) if self.best_prospect else None,
            "ranked": [build_prospect_document(prospect) for prospect in self.ranked_prospects],
            "among": asdict(self.ranked_plans) if self.ranked_plans else None,
            "finished": self.is_finished,
        }


def check_robust(quantile: float | None, max_risk: float) -> None:
    """Raise ``ValueError`` where a quantile or a probability is out of its range."""
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"--robust: a quantile lies between 0 and 1, met {quantile:g}; nearest: 0.95")
    if not 0 <= max_risk <= 1:
        raise ValueError(f"--out-of-memory: a probability lies in [0, 1], met {max_risk:g}; nearest: 0.05")


def choose_robust(
    scenario: Scenario,
    quantile: float,
    max_risk: float,
    time_left: TimeLeft = unlimited_seconds,
    plan: Plan | None = None,
) -> RobustChoice:
    """Return the plan of a scenario's space with the shortest step time at a quantile, and the plans compared with it.

    Of a large space, known plans, ``plan`` and the neighbours of the best are compared. Where ``time_left`` returns 0,
    the choice is among the plans compared until then.
    """
    problem = scenario.problem
    uncertainty, costs = find_uncertainty(problem, scenario.assumptions), SimulatedCost(problem)

    def estimate_risk(trial: Trial) -> float:
        return forecast_memory(costs, trial.plan).out_of_memory

    # no layout means a plan that cuts operators apart: it is a prospect of its own
    is_apart = plan is not None and cuts_operators(problem, plan)
    start_layouts = () if plan is None or is_apart else (recover_layout(problem, plan),)
    own_prospects = []
    if plan is not None and is_apart:
        trial = Trial(plan, costs.evaluate(plan), 0.0)
        own_prospects.append(build_prospect(trial, estimate_risk, uncertainty, quantile, max_risk))
    known_prospects: list[Prospect] = []
    ranked_plans = None
    try:
        space_ranking = ranking(
            SimulatedCost(with_margin(scenario.problem, max_risk)),
            scenario.with_starts(scenario.make_space()),
            start_layouts,
            seconds=time_left,
        )
        while True:
            ranked_plans = space_ranking.ranked_plans
            new_prospects = list[Prospect]()
            for next_prospect in list_prospects(space_ranking, estimate_risk, uncertainty, quantile, max_risk):
                new_prospects.append(next_prospect)
                known_prospects = max(known_prospects, new_prospects, key=len)
            known_prospects, best_prospect = new_prospects, _find_best(new_prospects)
            if best_prospect is None:
                break
            if not space_ranking.add_neighbours(recover_layout(scenario.problem, best_prospect.trial.plan)):
                break
        is_finished = True
    except OutOfTime:
        is_finished = False
    known_prospects = [*own_prospects, *known_prospects]
    best_prospect = _find_best(known_prospects)
    return RobustChoice(quantile, max_risk, best_prospect, tuple(known_prospects), ranked_plans, is_finished)


def _find_best(candidates: list[Prospect]) -> Prospect | None:
    allowed_prospects = (candidate for candidate in candidates if candidate.is_allowed)
    return min(allowed_prospects, key=lambda candidate: candidate.quantile, default=None)


def build_prospect_document(prospect: Prospect) -> dict[str, Any]:
    """Return the prospect of a plan as JSON-ready data: predicted, at the quantile, and its memory risk."""
    return {
        "plan": prospect.trial.plan.describe(),
        "step_time": prospect.trial.evaluation.step_time,
        "quantile": prospect.quantile,
        "peak_memory": prospect.trial.evaluation.peak_memory,
        "out_of_memory": prospect.out_of_memory,
        "allowed": prospect.is_allowed,
    }
