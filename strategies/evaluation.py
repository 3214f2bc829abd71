"""Evaluations and trials: what the search learns about a plan."""

from dataclasses import dataclass

from simulator.brief import brief
from strategies.plan import Plan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the simulator says of one plan: seconds, bytes of the fullest device, whether it fits on devices and hosts.

    ``step_time`` is infinite where the plan does not fit and was not simulated.
    """

    step_time: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan with its evaluation; ``elapsed`` seconds since the search began."""

    plan: Plan
    evaluation: Evaluation
    elapsed: float

    __repr__ = brief()
