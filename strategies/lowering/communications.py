"""Communications of a plan's ranks in one step as the simulator has them: kind, group and bytes of each.

The executor is checked against them. A push to a parameter server is counted as a reduction to the first rank of its
group, and the pull as a broadcast from it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.costs.optimizer import norm_axes
from meshwise.strategies.lowering.costs.stage import StageCosts
from meshwise.strategies.lowering.rank_classes.placement import NORM
from meshwise.strategies.lowering.tasks.contents import passes_of
from meshwise.strategies.lowering.tasks.cuts import Cuts, Granularity
from meshwise.strategies.lowering.tasks.data_parallel import reduced_bytes
from meshwise.strategies.lowering.tasks.shape import Volumes, step_shape
from meshwise.strategies.lowering.tasks.skeleton import Skeleton, Slot
from meshwise.strategies.lowering.tasks.step import one_step
from meshwise.strategies.lowering.tasks.variants import kind_of
from meshwise.strategies.plan.mesh import GROUPS, PIPELINE
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

PUSHED, PULLED = "reduce", "broadcast"
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
    counted = _Counted(problem, plan)
    return {rank: counted.of(rank) for rank in ranks}


class _Counted:
    """Counts the communications of one plan; its passes and tasks are built once."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        costs = StageCosts(problem)
        one = Cuts(costs, plan, costs.machine(plan, folded=True), Granularity.CHAIN)
        self.plan, self.cuts, self.volumes = plan, one, Volumes(one)
        self.table = one.machine.table
        shape = step_shape(one, self.volumes)._replace(microbatches=plan.num_microbatches)
        self.tasks: Skeleton = one_step(shape)
        self.times = np.bincount(self.tasks.slot_of, minlength=len(self.tasks.slots)).tolist()

    def of(self, rank: int) -> Counter[Communication]:
        """Return how often a rank takes part in each communication."""
        found: Counter[Communication] = Counter()
        for each, count in (*self._inside(rank), *self._outside(rank)):
            if each.size > 0:
                found[each] += count
        return found

    def _inside(self, rank: int) -> Iterator[tuple[Communication, int]]:
        """Yield the communications inside the passes of a rank, with how often each runs."""
        rank_class = int(self.table.class_of[rank])
        position, own = self.table.positions[rank_class], self.cuts.machine.rank(rank_class)
        for stage in self.plan.stages_at(position):
            every = self.cuts.costs.stage(self.plan, stage, own).collectives
            for variant, count in passes_of(self.plan, stage):
                for (axis, collective, size), times in every[kind_of(variant)].items():
                    yield self._one(collective, axis, size), times * count
                for step in self.cuts.before(stage, variant, own):
                    if step.collective is not None:
                        yield self._one(step.collective, step.axis, step.size), count

    def _outside(self, rank: int) -> Iterator[tuple[Communication, int]]:
        """Yield the sends of a rank, and its sums of gradients and gathers of parameters."""
        rank_class = int(self.table.class_of[rank])
        position, batch = self.table.positions[rank_class], self.cuts.machine.rank(rank_class).batch
        for slot, count in zip(self.tasks.slots, self.times, strict=True):
            if slot.what == "send":
                stage, backward = slot.key
                if self.cuts.positions[stage] == position:
                    collective, size = self.volumes.boundary(stage - backward, batch)
                    yield Communication(str(collective), (PIPELINE,), size), count
            elif slot.what in _AT_THE_END and self._is_at(slot, position):
                # Phases of one collective are tasks of their own: its first phase stands for the whole.
                _, leg, (collective, size), _ = self.volumes.at_the_end(slot)
                if leg == 0 and collective is Collective.PUSH_PULL:
                    axes = self._axes(slot.site.kind)
                    training = self.cuts.training
                    elements = size / reduced_bytes(training, self.plan)
                    yield Communication(PUSHED, axes, elements * training.gradient_bytes), count
                    yield Communication(PULLED, axes, elements * training.updated_bytes), count
                elif leg == 0:
                    yield self._one(collective, slot.site.kind, size), count

    def _is_at(self, slot: Slot, position: int) -> bool:
        """Return whether ranks of a pipeline position take part in the task of a template."""
        return slot.site.kind == NORM or any(position == at for at, _ in slot.streams)

    def _one(self, collective: Collective, kind: str, size: float) -> Communication:
        """Return a communication of a collective by groups of a kind."""
        return Communication(str(collective), self._axes(kind), size)

    def _axes(self, kind: str) -> tuple[str, ...]:
        """Return the mesh axes of more than one rank along which groups of a kind lie."""
        names = norm_axes(self.cuts.training, self.plan) if kind == NORM else GROUPS.get(kind, (PIPELINE,))
        return tuple(axis.name for axis in self.plan.mesh.axes if axis.name in names and axis.size > 1)


_AT_THE_END = ("unshard", "reduce", "norm", "replicated", "gather", "tied")
"""Roles of tasks that sum gradients or gather parameters."""
