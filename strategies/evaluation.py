"""What searches ask about plans, as a `CostModel`, and the answers: evaluations, trials and the times of resources."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.program import TaskKind
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from meshwise.simulator.timeline import Timeline

FloatArray = NDArray[np.float64]


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


class CostModel(Protocol):
    """What searches ask about plans, families of plans and groups of plans."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the peak memory in bytes of the fullest device."""

    def fits(self, plan: Plan) -> bool:
        """Return whether every device and every host has the memory that the plan needs there."""

    def plan_bound(self, plan: Plan) -> float:
        """Return a lower bound of the step time in seconds."""

    def family_bound(self, family: Layout) -> float:
        """Return a lower bound in seconds of all plans of a family; at most ``plan_bound`` of any of them."""

    def busy_bound(self, family: Layout) -> float:
        """Return a lower bound in seconds of the plans of a family whose schedules run one pass at a time."""

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        """Return for every row and column of a group a lower bound in seconds, at most ``plan_bound`` of the member.

        It is infinite where there is no member, where the member cannot fit, and where it takes ``limit`` or more.
        """

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return for every plan a tighter lower bound of its step time in seconds, at least ``plan_bound``."""

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory by simulation."""

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes."""

    def check_time(self) -> None:
        """Raise, to end the search, where its time for looking at plans is over."""


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
