"""Choosing by what a run may take, not by what it is predicted to take.

A plan that runs out of memory takes for ever: with probability ``p`` of that, the ``q`` quantile of its step time is
the ``q / (1 - p)`` quantile of the times of runs that go through, and infinite for ``q`` above ``1 - p``.

References
----------
Ben-Tal, El Ghaoui and Nemirovski, "Robust optimization", 2009, section 2.1: constraints that hold with a probability.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from strategies.evaluation import Trial
from strategies.explanation.ranking import Ranking, fits
from strategies.explanation.uncertainty import Uncertainty
from strategies.problem import Problem


@dataclass(frozen=True, slots=True)
class Prospect:
    """A plan with what its run may take: seconds at a quantile, and the probability that it lacks memory."""

    trial: Trial
    quantile: float
    out_of_memory: float
    allowed: bool


def prospect(problem: Problem, trial: Trial, uncertainty: Uncertainty, quantile: float, most: float) -> Prospect:
    """Return what a plan's run may take; it is allowed where it lacks memory with probability ``most`` at most."""
    at = trial.evaluation
    lacks = uncertainty.lacks_memory(problem.cluster, at.peak_memory)
    through = uncertainty.step_time_quantile(at.step_time, quantile / (1 - lacks)) if lacks < 1 else inf
    return Prospect(trial, through, lacks, lacks <= most)


def prospects(ranking: Ranking, uncertainty: Uncertainty, quantile: float, most: float) -> Iterator[Prospect]:
    """Yield plans, the fastest first, until none can come that is better at ``quantile`` than one allowed before.

    A plan without any danger to lack memory has the quantile of its step time: no later one can have less.
    """
    best = inf
    for trial in ranking.ascending(fits):
        if uncertainty.step_time_quantile(trial.evaluation.step_time, quantile) >= best:
            return
        found = prospect(ranking.problem, trial, uncertainty, quantile, most)
        if found.allowed:
            best = min(best, found.quantile)
        yield found
