"""Evaluations and trials of plans, and the resources that take the time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.program import TaskKind
from meshwise.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from meshwise.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating a plan: step time in seconds, bytes of the fullest device, and whether it fits.

    A plan fits if all devices and hosts have its memory. ``step_time`` is infinite where it does not fit and was not
    simulated.
    """

    step_time: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan with its evaluation, ``elapsed`` seconds after the search began."""

    plan: Plan
    evaluation: Evaluation
    elapsed: float

    __repr__ = brief_repr()


class Resource(StrEnum):
    """What the time of a step is spent on."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    BUBBLE = "bubble"
    TENSOR = "tensor communication"
    DATA = "data communication"


def compute_resource_times(timeline: "Timeline") -> dict[Resource, float]:
    """Return the seconds of a step that every resource takes, averaged over rank classes; communication if exposed."""
    exposed_seconds, classes = timeline.exposed_communication(), range(len(timeline.rank_classes))
    compute_kinds = [kind for kind in TaskKind if kind.computes and kind is not TaskKind.RECOMPUTE]

    def average_busy(kinds: Sequence[TaskKind]) -> float:
        return sum(timeline.busy_time(rank_class, kinds) for rank_class in classes) / (len(classes) * timeline.steps)

    return {
        Resource.COMPUTE: average_busy(compute_kinds),
        Resource.RECOMPUTE: average_busy([TaskKind.RECOMPUTE]),
        Resource.BUBBLE: timeline.bubble * timeline.step_time,
        Resource.TENSOR: exposed_seconds[TaskKind.TENSOR_COMMUNICATION],
        Resource.DATA: exposed_seconds[TaskKind.DATA_COMMUNICATION],
    }
