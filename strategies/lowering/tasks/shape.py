"""The shape of a plan's step: what its skeleton depends on, and no more.

A shape has the parts of passes, what is gathered and reduced after which part, and how a step ends. Volumes are the
collectives outside passes with their bytes.
"""

from collections.abc import Callable, Iterator
from math import ceil
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.costs.offload import Update, update
from meshwise.strategies.lowering.costs.optimizer import SQUARES, Parameters
from meshwise.strategies.lowering.costs.weights import summed_share
from meshwise.strategies.lowering.rank_classes.placement import NORM, tied_kind
from meshwise.strategies.lowering.tasks.activation_copies import KeptShape
from meshwise.strategies.lowering.tasks.cuts import Cuts, Part, Passes
from meshwise.strategies.lowering.tasks.data_parallel import SHARED, reduced_bytes, reduction, replica_sum
from meshwise.strategies.lowering.tasks.fully_sharded import Sharing
from meshwise.strategies.lowering.tasks.skeleton import Slot
from meshwise.strategies.lowering.tasks.variants import (
    FORWARD_PASS,
    INPUTS,
    JOINED,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    SPLIT,
    WHOLE,
)
from meshwise.strategies.plan.mesh import EXPERT_DATA, OPERATOR_AXES, REPLICA, TENSOR
from meshwise.strategies.plan.offloading import FROM_HOST
from meshwise.strategies.plan.plan import blocks_on_host
from meshwise.strategies.schedules.schedule import KINDS, MAKES_GRADIENTS, ActionKind


class PartShape(NamedTuple):
    """The shape of one part of a pass.

    Parameters
    ----------
    num_phases
        Phases of a collective of the groups along ``axis``; 0 for a rank's own work.
    runs_as_group
        Whether the ranks of a tensor group run a rank's own work as one.
    has_launch
        Whether the host launches kernels before it.
    overlaps_next
        Whether it starts with the next part.
    """

    legs: int
    together: bool
    launched: bool
    along: str = TENSOR
    beside: bool = False


class Leaving(NamedTuple):
    """A bucket of gradients that leaves after a part of a pass, and how it is reduced.

    Parameters
    ----------
    number
        The number of the bucket in its stage.
    parts
        The part after which it leaves in a whole backward, and in the gradients of weights where they are apart.
    kind, num_phases
        Kind of the groups that reduce it, and phases of that reduction.
    num_replica_phases
        Phases of the sum of a stage's last gradients over replicas.
    is_copied
        Whether it is then copied to the host.
    """

    number: int
    parts: tuple[int, ...]
    kind: str
    legs: int
    replicas: int
    copied: bool = False

    def after(self, kind: ActionKind) -> int:
        """Return the part of a pass of a kind after which the bucket leaves."""
        return self.parts[MAKES_GRADIENTS.index(kind)]


class UnitShape(NamedTuple):
    """A unit of a pass whose parameters are gathered: the first part that reads them, its block, and its gathers.

    ``gathers`` are kinds of groups, each with the number of its phases.
    """

    first: int
    block: int
    gathers: tuple[tuple[str, int], ...]


class StageShape(NamedTuple):
    """The parts of a stage's passes, its buckets and units.

    Parameters
    ----------
    forward, backward, last_backward
        Parts of the passes; those of the last gradients may be cut more finely than the others of their kind.
    split_passes
        Parts of the `SPLIT_VARIANTS`, where the schedule splits backward.
    units
        Units whose parameters are gathered for a forward, a backward and the gradients of inputs, in the order of the
        pass; none without ZeRO 3 or offload.
    forward_offloads, backward_offloads
        Blocks whose activations go to the host; none without offload.
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last: tuple[PartShape, ...]
    buckets: tuple[Leaving, ...]
    split: tuple[tuple[PartShape, ...], ...] = ()
    units: tuple[tuple[UnitShape, ...], ...] = ()
    forward_kept: tuple[KeptShape, ...] = ()
    backward_kept: tuple[KeptShape, ...] = ()

    def parts(self, variant: int) -> tuple[PartShape, ...]:
        """Return the parts of one variant of a pass."""
        return (self.forward, self.backward, self.last, *self.split)[variant % JOINED]

    def gathered(self, kind: ActionKind) -> tuple[UnitShape, ...]:
        """Return the units that a pass of a kind reads: gradients of weights need no parameters."""
        return () if kind is ActionKind.WEIGHT else self.units[KINDS.index(kind)]


class StepShape(NamedTuple):
    """Everything that a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the reductions of all gradients after the last backward: kinds of groups, with phases of each.
    gathers
        Per position the gathers of updated parameters, in the same form.
    replicated_sums
        Per position the operator axes along which gradients of replicated parameters are summed, with phases of each.
    tied_sums
        Pairs of positions that keep one parameter, with the phases of the sum of its gradients.
    updates
        Per position how parameters are updated.
    replica_sums
        Per position the sums over replicas of what ``reductions`` left: index of the kind in `SHARING_KINDS`, and
        phases.
    sharing
        What data ranks share besides the optimizer's states.
    norm_phases
        Phases of the sum of the norm of gradients over all positions; ``None`` without clipping.
    hosts_wait
        Whether hosts launch nothing of a pass before its inputs have arrived and all earlier work has ended.
    hosts_wait_inside
        Whether hosts launch nothing before a collective inside a pass has ended.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages: tuple[StageShape, ...]
    reductions: tuple[tuple[tuple[str, int], ...], ...]
    gathers: tuple[tuple[tuple[str, int], ...], ...]
    replicated: tuple[tuple[tuple[str, int], ...], ...]
    tied: tuple[tuple[int, int, int], ...]
    updates: tuple[Update, ...]
    replicas: tuple[tuple[tuple[int, int], ...], ...]
    sharing: Sharing
    norm: int | None
    hosts_wait: bool
    hosts_wait_inside: bool


Volume = tuple[Collective, float]
"""A collective, and its bytes."""


class Volumes:
    """The collectives of one plan outside its passes, with their bytes."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts, self.plan, self.costs = cuts, cuts.plan, cuts.costs
        self.training = cuts.training
        self._boundaries: dict[tuple[int, int], Volume] = {}

    def gradients(self, stage: int, bucket: int) -> Volume:
        """Return the reduction of a bucket of a stage."""
        size = reduced_bytes(self.training, self.plan)
        return reduction(self.plan), float(self.cuts.buckets(stage)[bucket].parameters * size)

    def all_gradients(self, kind: str, position: int) -> Volume:
        """Return the reduction of all gradients of a position that the groups of a kind share."""
        return reduction(self.plan), float(self.shared(kind, position) * reduced_bytes(self.training, self.plan))

    def updated(self, kind: str, position: int) -> Volume:
        """Return the gather of the parameters that the optimizer has updated as shards."""
        return Collective.ALL_GATHER, float(self.shared(kind, position) * self.training.updated_bytes)

    def replica_sum(self, kind: str, elements: int) -> Volume:
        """Return the sum over replicas of a rank's share of ``elements`` gradients."""
        return replica_sum(self.training, self.plan, kind, elements)

    def unit(self, kind: str, stage: int, block: int) -> Volume:
        """Return the gather of the parameters of a block by the groups of a kind."""
        cost = self.cuts.plan_costs.stages[stage].blocks[block]
        elements = cost.experts if kind == EXPERT_DATA else cost.parameters - cost.experts
        return Collective.ALL_GATHER, float(elements * self.training.parameter_bytes)

    def boundary(self, stage: int, batch: int) -> Volume:
        """Return the send of one microbatch from a stage to the next; ``batch`` is that of a `RankProfile`."""
        if (stage, batch) not in self._boundaries:
            size = self.plan.boundary_part(self.costs.boundary_bytes(self.costs.seen(self.plan, batch), stage))
            self._boundaries[stage, batch] = Collective.SEND, size
        return self._boundaries[stage, batch]

    def replicated(self, axis: str, position: int) -> Volume:
        """Return the sum of the gradients at a position of parameters that ranks along an axis have whole."""
        elements = summed_share(self.plan, self.held(position).replicated[OPERATOR_AXES.index(axis)])
        return Collective.ALL_REDUCE, float(elements * self.training.gradient_bytes)

    def tied_sum(self, elements: int) -> Volume:
        """Return the sum of the gradients of a tied parameter."""
        share = ceil(elements / self.plan.shards) if self.cuts.sharing.gradients else elements
        return Collective.ALL_REDUCE, float(share * self.training.gradient_bytes)

    def shared(self, kind: str, position: int) -> int:
        """Return the number of parameters of a position that the groups of a kind share."""
        held = self.held(position)
        return held.experts if kind == EXPERT_DATA else held.elements - held.experts

    def held(self, position: int) -> Parameters:
        """Return the parameters on a rank of a position."""
        return self.cuts.plan_costs.held.positions[position]

    def at_the_end(self, slot: Slot) -> tuple[int, int, Volume, str]:
        """Return stage, phase, volume and name of a communication of states; stage -1 stands for all stages."""
        position, key = slot.site.position, slot.key
        if slot.what == "unshard":
            name = self.plan.stages[key[0]].blocks[key[1]]
            what = "experts" if slot.site.kind == EXPERT_DATA else "parameters"
            return key[0], key[2], self.unit(slot.site.kind, key[0], key[1]), f"{what} of {name}"
        over_replicas = slot.site.kind == REPLICA
        if slot.what == "reduce" and key[0] >= 0:
            bucket = self.cuts.buckets(key[0])[key[1]]
            sums = self.replica_sum(bucket.kind, bucket.parameters) if over_replicas else self.gradients(*key[:2])
            return key[0], key[2], sums, f"gradients of {bucket.blocks[-1]} .. {bucket.blocks[0]}"
        if slot.what == "reduce" and over_replicas:
            kind = SHARED[key[1]]
            return -1, key[2], self.replica_sum(kind, self.shared(kind, position)), "gradients of all blocks"
        if slot.what == "reduce":
            return -1, key[2], self.all_gradients(slot.site.kind, position), "gradients of all blocks"
        if slot.what == "norm":
            return -1, key[0], SQUARES, "norm of gradients"
        if slot.what == "replicated":
            return -1, key[0], self.replicated(slot.site.kind, position), "gradients of replicated parameters"
        if slot.what == "gather":
            return -1, key[0], self.updated(slot.site.kind, position), "parameters"
        return -1, key[1], self.tied_sum(self.cuts.tied[key[0]][2]), "tied gradients"


def step_shape(cuts: Cuts, volumes: Volumes) -> StepShape:
    """Return the shape of a plan's step, on which its skeleton depends."""
    return _Shape(cuts, volumes).step()


class _Shape:
    """Builds the shape of one plan's step."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training

    def step(self) -> StepShape:
        """Return the shape of the step."""
        plan, framework = self.plan, self.training.conventions
        positions = range(plan.pipeline)
        late = plan.replicas > 1 and not self.cuts.in_buckets
        return StepShape(
            schedule=plan.schedule,
            ranks=plan.pipeline,
            microbatches=plan.num_microbatches,
            chunks=plan.chunks,
            stages=tuple(self._stage_shape(stage) for stage in range(len(plan.stages))),
            reductions=tuple(self._ending(p, self.volumes.all_gradients) if late else () for p in positions),
            gathers=tuple(self._ending(p, self.volumes.updated) if plan.zero in (1, 2) else () for p in positions),
            updates=tuple(self._update(position) for position in positions),
            replicated=tuple(self._replicated(p) for p in positions),
            tied=tuple((a, b, self._legs(tied_kind(a, b), a, self.volumes.tied_sum(n))) for a, b, n in self.cuts.tied),
            replicas=tuple(self._late_replicas(p) if late else () for p in positions),
            sharing=self.cuts.sharing,
            norm=self._norm_legs(),
            hosts_wait=framework.waits_for_passes or (plan.pipeline > 1 and framework.waits_for_exchanges),
            hosts_wait_inside=framework.waits_for_collectives,
        )

    def _replicated(self, position: int) -> tuple[tuple[str, int], ...]:
        """Return the operator axes along which gradients are summed at the end of the step, with phases of each."""
        found = ((axis, self._legs(axis, position, self.volumes.replicated(axis, position))) for axis in OPERATOR_AXES)
        return tuple((axis, legs) for axis, legs in found if legs)

    def _norm_legs(self) -> int | None:
        """Return the phases of the sum of the norm of gradients; ``None`` without clipping."""
        if not self.training.gradient_clipping:
            return None
        return self._legs(NORM, 0, SQUARES) if NORM in self.table.tables else 0

    def _stage_shape(self, stage: int) -> StageShape:
        # Ranks with larger microbatches may need more phases; tasks of phases that a rank lacks take no ticks.
        """Return the shape of a stage."""
        first, *others = self._sized(self.cuts.positions[stage])
        used = WHOLE + SPLIT if self.plan.splits_backward else WHOLE
        variants = [self.cuts.parts(stage, variant, first) for variant in used]
        shapes = [self._pass_shape(stage, parts) for parts in variants]
        for rank_class in others:
            more = [self._pass_shape(stage, self.cuts.parts(stage, variant, rank_class)) for variant in used]
            shapes = [_longest(*rows) for rows in zip(shapes, more, strict=True)]
        makes = [LAST_BACKWARD, LAST_WEIGHTS] if self.plan.splits_backward else [LAST_BACKWARD]
        leaving: list[Leaving] = []
        away = blocks_on_host(self.plan, stage)
        names = self.plan.stages[stage].blocks
        if self.cuts.in_buckets:
            ends = [{part.completes: index for index, part in enumerate(variants[variant])} for variant in makes]
            for number, bucket in enumerate(self.cuts.buckets(stage)):
                legs = self._legs(bucket.kind, self.cuts.positions[stage], self.volumes.gradients(stage, number))
                over = self._replica_legs(bucket.kind, self.cuts.positions[stage], bucket.parameters)
                copied = bucket.last in names[:away]
                if legs or over or copied:
                    parts = tuple(end_parts[bucket.last] for end_parts in ends)
                    leaving.append(Leaving(number, parts, bucket.kind, legs, over, copied))
        forward, backward, last, *split = shapes
        ways = variants[FORWARD_PASS], variants[LAST_BACKWARD]
        reading = (FORWARD_PASS, LAST_BACKWARD, INPUTS)
        units = tuple(self._units(stage, variants[variant]) for variant in reading if variant in used)
        kept = [self._kept(stage, pass_parts) for pass_parts in ways]
        return StageShape(forward, backward, last, tuple(leaving), tuple(split), units, kept[0], kept[1])

    def _sized(self, position: int) -> tuple[int, ...]:
        """Return, for every size of microbatches of the ranks at a position, one rank class."""
        classes = self.table.by_position[position]
        if not self.table.placed.batches:
            return classes[:1]
        return tuple({self.machine.rank(index).batch: index for index in reversed(classes)}.values())

    def _pass_shape(self, stage: int, parts: tuple[Part, ...]) -> tuple[PartShape, ...]:
        """Return the shapes of the parts of a pass."""
        return tuple(self._part_shape(stage, part) for part in parts)

    def _units(self, stage: int, parts: tuple[Part, ...]) -> tuple[UnitShape, ...]:
        """Return the units whose parameters are gathered, in the order of a pass."""
        if not self.cuts.sharing.parameters:
            return ()
        ended = [index for index, part in enumerate(parts) if part.ends_loss]
        units = []
        for start, end, block in self._blocks(stage, parts):
            after_loss = (index + 1 for index in ended if start <= index <= end)
            units.append(UnitShape(max(after_loss, default=start), block, self._gathers(stage, block)))
        return tuple(units)

    def _kept(self, stage: int, parts: tuple[Part, ...]) -> tuple[KeptShape, ...]:
        """Return the blocks of a pass whose activations are on the host between passes, in its order."""
        blocks = self.cuts.plan_costs.stages[stage].blocks
        if not any(block.away for block in blocks):
            return ()
        return tuple(KeptShape(*where) for where in self._blocks(stage, parts) if blocks[where[2]].away)

    def _blocks(self, stage: int, parts: tuple[Part, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield the first part, last part and number of every block of a pass, where passes are cut at blocks."""
        number = {name: index for index, name in enumerate(self.plan.stages[stage].blocks)}
        ends = [(index, number[part.completes]) for index, part in enumerate(parts) if part.completes is not None]
        starts = [0, *(index + 1 for index, _ in ends)]
        yield from ((start, end, block) for start, (end, block) in zip(starts, ends, strict=False))

    def _update(self, position: int) -> Update:
        """Return how the ranks of a position update their parameters."""
        return update(self.training, self.plan, self.volumes.held(position), self.cuts.on_host[position])

    def _gathers(self, stage: int, block: int) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that gather a unit, with phases of each; first its copy from the host."""
        found = (
            (kind, self._legs(kind, self.cuts.positions[stage], self.volumes.unit(kind, stage, block)))
            for kind in SHARED
        )
        first = ((FROM_HOST, 1),) if block < blocks_on_host(self.plan, stage) else ()
        return (*first, *((kind, legs) for kind, legs in found if legs))

    def _part_shape(self, stage: int, part: Part) -> PartShape:
        """Return the shape of a part."""
        step, legs = part.collective, 0
        if step is not None and step.collective is not None:
            legs = self._legs(step.axis, self.cuts.positions[stage], (step.collective, step.size)) or 1
        together = self.cuts.passes[self.cuts.positions[stage]] is Passes.GROUP and part.communicates and not legs
        along = step.axis if step is not None else TENSOR
        return PartShape(legs, together, part.lead > 0, along, part.beside)

    def _ending(self, position: int, what: Callable[[str, int], Volume]) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that run a collective at the end of the step, with phases of each."""
        found = ((kind, self._legs(kind, position, what(kind, position))) for kind in SHARED)
        return tuple((kind, legs) for kind, legs in found if legs)

    def _late_replicas(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the indices of the kinds of shares that are summed over replicas at the end, with phases of each."""
        found = (self._replica_legs(kind, position, self.volumes.shared(kind, position)) for kind in SHARED)
        return tuple((number, legs) for number, legs in enumerate(found) if legs)

    def _replica_legs(self, kind: str, position: int, elements: int) -> int:
        """Return the phases of the sum over replicas of a rank's share of ``elements`` gradients."""
        return self._legs(REPLICA, position, self.volumes.replica_sum(kind, elements))

    def _legs(self, kind: str, position: int, what: Volume) -> int:
        """Return the most phases of a communication on any group at a position."""
        groups = self.table.groups_at(kind, position) if kind in self.table.tables else ()
        return max((len(self.machine.communicator(kind, group).legs(*what)) for group in groups), default=0)


def _longest(one: tuple[PartShape, ...], other: tuple[PartShape, ...]) -> tuple[PartShape, ...]:
    """Return the parts of a pass with the most phases: collectives of more bytes may run other algorithms."""
    return tuple(max(pair, key=lambda part: part.legs) for pair in zip(one, other, strict=True))
