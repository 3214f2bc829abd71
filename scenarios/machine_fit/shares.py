"""Shares of a step's time by factor of the machine, with which steps of slower machines follow without a simulation.

If all times of a machine grow by a factor, so does the step: its time ``T`` is homogeneous of degree 1 in them. Its
derivatives by their logarithms, over ``T``, therefore sum to 1 (Euler's theorem on homogeneous functions): they are
shares of the step, what nothing hides of each part. As long as the same things stay hidden,

``T(factors) = T * other * (sum of shares * factors)``

A step is the longest of many chains of tasks, each a sum of times. The formula is that of one chain, a tangent that the
longest one never falls below. Where other chains become the longest it is too low; fits measure shares again where they
arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.scenarios.machine_fit.factored_machine import apply_factors
from meshwise.scenarios.published.estimates import estimate_step_time
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.factors import FACTORS, Factors
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

Vector = NDArray[np.float64]

PARTS = FACTORS[:-1]
"""The factors that have a share of their own; ``other`` is on all of them."""

DIFFERENCE = 0.05
"""Step of the finite differences in natural logarithms: wide enough for what 5 % more of a part uncovers to count."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step, its prediction with some factors, and its shares there.

    Parameters
    ----------
    name
        The row or file of the run.
    plan
        Equal for runs of one plan of one problem, and for no others.
    measured, predicted
        Seconds.
    shares
        Fractions of the predicted time by factor in `PARTS`; at least 0, and at most 1 together.
    origin
        Natural logarithms of the factors of the prediction, in the order of `FACTORS`.
    """

    name: str
    plan: object
    measured: float
    predicted: float
    shares: tuple[float, ...]
    origin: tuple[float, ...] = (0.0,) * len(FACTORS)

    __repr__ = brief_repr("name", "measured", "predicted", "shares")


def measure_shares(problem: Problem, plan: Plan, factors: Factors) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of a step on a machine with factors, and its shares, by a simulation for each part.

    Raises
    ------
    ValueError
        Where the plan cannot be simulated.
    """
    origin = factors.logarithms
    predicted = predict_time(problem, plan, origin)
    slopes = [
        log(predict_time(problem, plan, origin + step) / predicted) / DIFFERENCE
        for step in DIFFERENCE * np.eye(len(FACTORS))[: len(PARTS)]
    ]
    shares = np.clip(slopes, 0.0, None)
    return predicted, tuple((shares / max(1.0, float(shares.sum()))).tolist())


def predict_time(problem: Problem, plan: Plan, logarithms: Vector) -> float:
    """Return the seconds of a step on a machine whose factors have these logarithms, by simulation."""
    cluster = apply_factors(problem.cluster, Factors.from_logarithms(logarithms))
    return estimate_step_time(replace(problem, cluster=cluster), plan)


class StepTable(NamedTuple):
    """Steps as arrays.

    Attributes
    ----------
    ratios
        ln(measured / predicted), shape [steps].
    shares
        Shape [steps, parts].
    origins
        Shape [steps, factors].
    """

    ratios: Vector
    shares: Vector
    origins: Vector

    def extrapolate(self, logarithms: Vector) -> tuple[Vector, Vector]:
        """Return ln(predicted with factors / predicted), shape [steps], and its derivatives, shape [steps, factors].

        ``logarithms`` are those of the factors.
        """
        moves = logarithms - self.origins
        parts = self.shares * np.exp(moves[:, :-1])
        unmoved = 1.0 - self.shares.sum(axis=1)  # what no part has, such as pauses that a schedule fixes
        total = parts.sum(axis=1) + unmoved
        slopes = np.concatenate([parts / total[:, None], np.ones((len(total), 1))], axis=1)
        return moves[:, -1] + np.log(total), slopes


def build_table(steps: Sequence[MeasuredStep]) -> StepTable:
    """Return steps as arrays.

    Half of this step is arithmetic and half memory traffic; with arithmetic three times as slow it takes twice as long:

    >>> table = build_table([MeasuredStep("run", 0, 2.0, 1.0, (0.5, 0.5, 0, 0, 0, 0, 0))])
    >>> times, slopes = table.extrapolate(Factors(compute=3.0).logarithms)
    >>> np.exp(times).round(9).tolist(), slopes[0, [0, 1, 7]].round(9).tolist()
    ([2.0], [0.75, 0.25, 1.0])
    """
    return StepTable(
        np.array([log(step.measured / step.predicted) for step in steps]).reshape(len(steps)),
        np.array([step.shares for step in steps]).reshape(len(steps), len(PARTS)),
        np.array([step.origin for step in steps]).reshape(len(steps), len(FACTORS)),
    )
