"""The plan that is best at a quantile of what a run may take, not only as predicted."""

from dataclasses import dataclass
from typing import Any

from scenarios.prediction_interval import category, uncertainty
from scenarios.scenario import Scenario
from strategies.explanation.ranking import ranking
from strategies.explanation.robust import Prospect, prospects
from strategies.plan import Plan


@dataclass(frozen=True, slots=True)
class RobustChoice:
    """The plan that is best at a quantile, of those that may lack memory so seldom; ``None`` where there is none."""

    quantile: float
    most: float
    best: Prospect | None
    ranked: tuple[Prospect, ...]

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
        }


def check_robust(quantile: float | None, most: float) -> None:
    """Raise ``ValueError`` where a quantile or a probability is none."""
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"--robust: a quantile lies between 0 and 1, met {quantile:g}; nearest: 0.95")
    if not 0 <= most <= 1:
        raise ValueError(f"--out-of-memory: a probability lies in [0, 1], met {most:g}; nearest: 0.05")


def robust_choice(value: Scenario, quantile: float, most: float) -> RobustChoice:
    """Return the layout of a scenario's space whose step time is least at a quantile, and those that were compared."""
    ranked = ranking(value.problem, value.search_settings.make_space())
    doubt = uncertainty(category(value.problem.cluster, value.assumptions))
    found = tuple(prospects(ranked, doubt, quantile, most))
    allowed = [each for each in found if each.allowed]
    return RobustChoice(quantile, most, min(allowed, key=lambda each: each.quantile, default=None), found)


def prospect_document(found: Prospect) -> dict[str, Any]:
    """Return what a plan may take as JSON-ready data."""
    return {
        "plan": found.trial.plan.describe(),
        "step_time": found.trial.evaluation.step_time,
        "quantile": found.quantile,
        "peak_memory": found.trial.evaluation.peak_memory,
        "out_of_memory": found.out_of_memory,
        "allowed": found.allowed,
    }
