"""Communications of a plan's ranks in one step as the simulator has them: kind, group and bytes of each.

The executor is checked against them. A push to a parameter server is counted as a reduction to the first rank of its
group, and the pull as a broadcast from it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.contents import count_passes
from meshwise.strategies.lowering.costs.optimizer import norm_axes
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.step_shape import step_shape
from meshwise.strategies.lowering.tasks.data_parallel import reduction_bytes
from meshwise.strategies.lowering.tasks.skeleton import Role, Skeleton, TaskTemplate
from meshwise.strategies.lowering.tasks.step import build_step
from meshwise.strategies.lowering.tasks.variants import kind_of
from meshwise.strategies.lowering.volumes import Volumes
from meshwise.strategies.plan.mesh import GROUPS, NORM, PIPELINE
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

PUSH_KIND, PULL_KIND = "reduce", "broadcast"
"""Kinds of communication of which a push to and a pull from a parameter server consist."""


class Communication(NamedTuple):
    """A communication of one rank: its kind, the mesh axes along which the ranks of its group lie, and its bytes.

    The bytes are those of one rank's buffer; for gathers and scatters those of the full buffer.
    """

    kind: str
    axes: tuple[str, ...]
    size: float


def communications(problem: Problem, plan: Plan, ranks: Iterable[int]) -> dict[int, Counter[Communication]]:
    """Return, for each of the given ranks, how often it takes part in each communication of one step.

    Sends are counted at the sender alone.

    Raises
    ------
    ValueError
        Where the schedule has no flush: a step of it is no step of its own.
    """
    if plan.asynchronous:
        raise ValueError(f"the communications of a step need a schedule with a flush, met {plan.schedule}")
    counter = _CommunicationCounter(problem, plan)
    return {rank: counter.count_communications(rank) for rank in ranks}


class _CommunicationCounter:
    """Counts the communications of one plan; its passes and tasks are built once."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        costs = StageCosts(problem)
        cuts = Cuts(costs, plan, costs.machine(plan), Granularity.CHAIN)
        self.plan, self.cuts, self.volumes = plan, cuts, Volumes(costs, plan, cuts.sharing, cuts.buckets)
        self.table = cuts.machine.table
        shape = step_shape(cuts, self.volumes)
        self.tasks: Skeleton = build_step(shape)
        self.task_counts = np.bincount(self.tasks.template_of, minlength=len(self.tasks.templates)).tolist()

    def count_communications(self, rank: int) -> Counter[Communication]:
        """Return how often a rank takes part in each communication."""
        counts: Counter[Communication] = Counter()
        for communication, count in (*self._list_inside_passes(rank), *self._list_between_passes(rank)):
            if communication.size > 0:
                counts[communication] += count
        return counts

    def _list_inside_passes(self, rank: int) -> Iterator[tuple[Communication, int]]:
        """Yield the communications inside the passes of a rank, with how often each runs."""
        rank_class = int(self.table.class_of[rank])
        position, profile = self.table.positions[rank_class], self.cuts.machine.rank(rank_class)
        for stage in self.plan.stages_at(position):
            collectives = self.cuts.costs.stage_cost(self.plan, stage, profile).collectives
            for variant, count in count_passes(self.plan, stage):
                for (axis, collective, size), repeats in collectives[kind_of(variant)].items():
                    yield self._build_communication(collective, axis, size), repeats * count
                for segment in self.cuts.list_first_segments(stage, variant, profile):
                    if segment.collective is not None:
                        yield self._build_communication(segment.collective, segment.axis, segment.size), count

    def _list_between_passes(self, rank: int) -> Iterator[tuple[Communication, int]]:
        """Yield the sends of a rank, and its sums of gradients and gathers of parameters."""
        rank_class = int(self.table.class_of[rank])
        position, batch = self.table.positions[rank_class], self.cuts.machine.rank(rank_class).batch
        for template, count in zip(self.tasks.templates, self.task_counts, strict=True):
            if template.role == Role.SEND:
                stage, backward = template.key
                if self.cuts.positions[stage] == position:
                    collective, size = self.volumes.boundary_send(stage - backward, batch)
                    yield Communication(str(collective), (PIPELINE,), size), count
            elif template.role in _STATE_ROLES and self._takes_part(template, position):
                # Phases of one collective are tasks of their own: its first phase stands for the whole.
                _, phase, (collective, size), _ = self.volumes.describe_communication(template)
                if phase == 0 and collective is Collective.PUSH_PULL:
                    axes = self._list_axes(template.site.kind)
                    training = self.cuts.training
                    elements = size / reduction_bytes(training, self.plan)
                    yield Communication(PUSH_KIND, axes, elements * training.gradient_bytes), count
                    yield Communication(PULL_KIND, axes, elements * training.updated_bytes), count
                elif phase == 0:
                    yield self._build_communication(collective, template.site.kind, size), count

    def _takes_part(self, template: TaskTemplate, position: int) -> bool:
        """Return whether ranks of a pipeline position take part in the task of a template."""
        return template.site.kind == NORM or any(position == stream_position for stream_position, _ in template.streams)

    def _build_communication(self, collective: Collective, kind: str, size: float) -> Communication:
        """Return a communication of a collective by groups of a kind."""
        return Communication(str(collective), self._list_axes(kind), size)

    def _list_axes(self, kind: str) -> tuple[str, ...]:
        """Return the mesh axes of more than one rank along which groups of a kind lie."""
        names = norm_axes(self.cuts.training, self.plan) if kind == NORM else GROUPS.get(kind, (PIPELINE,))
        return tuple(axis.name for axis in self.plan.mesh.axes if axis.name in names and axis.size > 1)


_STATE_ROLES = (Role.UNSHARD, Role.REDUCE, Role.NORM, Role.REPLICATED, Role.GATHER, Role.TIED)
"""Roles of tasks that sum gradients or gather parameters."""
