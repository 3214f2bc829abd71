"""The plan with the shortest step time at a quantile of its uncertainty, not only as predicted."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.scenarios.intervals import uncertainty_of, with_margin
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief
from meshwise.strategies.explanation.alternatives import Prospect, prospects
from meshwise.strategies.explanation.ranking import Among, ranking, unlimited
from meshwise.strategies.plan.completion import layout_of
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.driver import OutOfTime


@dataclass(frozen=True, slots=True)
class RobustChoice:
    """The best plan at a quantile of step time, of those that lack memory with a small enough probability.

    Parameters
    ----------
    max_risk
        Largest allowed probability of lacking memory.
    best_prospect
        ``None`` where no plan is allowed.
    ranked_prospects
        The compared plans, in the order in which they were compared.
    ranked_plans
        Which plans were compared; ``None`` where there was no time to list them.
    is_finished
        Whether there was time to compare all of them.
    """

    quantile: float
    most: float
    best: Prospect | None
    ranked: tuple[Prospect, ...]
    among: Among | None
    finished: bool

    __repr__ = brief()

    @property
    def plan(self) -> Plan | None:
        """The chosen plan."""
        return self.best.trial.plan if self.best else None

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON-ready data."""
        return {
            "quantile": self.quantile,
            "most_out_of_memory": self.most,
            "best": prospect_document(self.best) if self.best else None,
            "ranked": [prospect_document(each) for each in self.ranked],
            "among": asdict(self.among) if self.among else None,
            "finished": self.finished,
        }


def check_robust(quantile: float | None, most: float) -> None:
    """Raise ``ValueError`` where a quantile or a probability is out of its range."""
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"--robust: a quantile lies between 0 and 1, met {quantile:g}; nearest: 0.95")
    if not 0 <= most <= 1:
        raise ValueError(f"--out-of-memory: a probability lies in [0, 1], met {most:g}; nearest: 0.05")


def robust_choice(
    value: Scenario,
    quantile: float,
    most: float,
    left: Callable[[], float] = unlimited,
    plan: Plan | None = None,
) -> RobustChoice:
    """Return the plan of a scenario's space with the shortest step time at a quantile, and the plans compared with it.

    Of a large space, known plans, ``plan`` and the neighbours of the best are compared. Where ``time_left`` returns 0,
    the choice is among the plans compared until then.
    """
    doubt = uncertainty_of(value.problem, value.assumptions)
    around = () if plan is None else (layout_of(value.problem, plan),)
    found: list[Prospect] = []
    among = None
    try:
        ranked = ranking(with_margin(value.problem, most), value.with_starts(value.make_space()), around, seconds=left)
        while True:
            among = ranked.among
            compared = list[Prospect]()
            for each in prospects(ranked, doubt, quantile, most):
                compared.append(each)
                found = max(found, compared, key=len)
            found, best = compared, _best(compared)
            if best is None or not ranked.surround(layout_of(value.problem, best.trial.plan)):
                return RobustChoice(quantile, most, best, tuple(found), among, finished=True)
    except OutOfTime:
        return RobustChoice(quantile, most, _best(found), tuple(found), among, finished=False)


def _best(found: list[Prospect]) -> Prospect | None:
    return min((each for each in found if each.allowed), key=lambda each: each.quantile, default=None)


def prospect_document(found: Prospect) -> dict[str, Any]:
    """Return the prospect of a plan as JSON-ready data: predicted, at the quantile, and its memory risk."""
    return {
        "plan": found.trial.plan.describe(),
        "step_time": found.trial.evaluation.step_time,
        "quantile": found.quantile,
        "peak_memory": found.trial.evaluation.peak_memory,
        "out_of_memory": found.out_of_memory,
        "allowed": found.allowed,
    }
