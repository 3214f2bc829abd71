"""The shape of a plan's step: what its skeleton depends on, and no more.

That is parts of passes, what is gathered and reduced after which, and how a step ends. Volumes are what the
communications of a plan move: the collective of each, and its bytes.
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
    """One part of a pass: how many phases where it is a collective of a group ``along`` an axis (0: a rank's own).

    ``together`` says that the ranks of a tensor group run a rank's own part as one, ``beside`` that it starts with the
    next part.
    """

    legs: int
    together: bool
    launched: bool
    along: str = TENSOR
    beside: bool = False


class Leaving(NamedTuple):
    """A bucket of gradients by its number: after which part it leaves of a pass of each kind, and how it is reduced.

    ``parts`` are those of a whole backward, and of the gradients of weights where they are apart. First by groups of
    a ``kind``, in ``legs`` phases, and of the last gradients then over ``replicas``, in as many; then it may be
    ``copied`` to the host.
    """

    number: int
    parts: tuple[int, ...]
    kind: str
    legs: int
    replicas: int
    copied: bool = False

    def after(self, kind: ActionKind) -> int:
        """Return the part of a pass of a kind after which it leaves."""
        return self.parts[MAKES_GRADIENTS.index(kind)]


class UnitShape(NamedTuple):
    """A unit of a pass whose parameters are gathered: the first part that reads them, its block, and its gathers.

    ``gathers`` are kinds of groups and phases of each.
    """

    first: int
    block: int
    gathers: tuple[tuple[str, int], ...]


class StageShape(NamedTuple):
    """The parts of a stage's passes; those of the last gradients may be cut more finely than the others of their kind.

    ``split`` are the parts of `SPLIT` variants, where the schedule has such. Units are those whose parameters are
    gathered for a forward, a backward and the gradients of inputs, in the order of the pass, and kept those whose
    activations go to the host; none without ZeRO 3 or offload.
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
        """Return the parts of one of the variants of a pass."""
        return (self.forward, self.backward, self.last, *self.split)[variant % JOINED]

    def gathered(self, kind: ActionKind) -> tuple[UnitShape, ...]:
        """Return the units that a pass of a kind reads: gradients of weights need no parameters."""
        return () if kind is ActionKind.WEIGHT else self.units[KINDS.index(kind)]


class StepShape(NamedTuple):
    """Everything a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the reductions of all gradients after the last backward: kind of groups and phases of each.
    gathers
        Per position the gathers of updated parameters, in the same form.
    replicas
        Per position the sums over replicas of what ``reductions`` left: number of the kind in `SHARED`, and phases.
    replicated
        Per position the operator axes along which gradients of ranks' own parts are summed, and phases of each.
    tied
        Pairs of positions that keep one parameter, and the phases of the sum of its gradients.
    updates
        Per position how parameters are updated.
    sharing
        What data ranks share besides the optimizer's states.
    norm
        Phases of the sum of the norm of gradients over all positions; ``None`` where it is not asked for.
    hosts_wait
        Whether hosts launch nothing of a pass before what it receives is there and all before it has ended.
    hosts_wait_inside
        Whether they launch nothing before a collective inside a pass has ended.
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
"""A collective, and the bytes that it is given."""


class Volumes:
    """What the communications of one plan move outside its passes."""

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
        """Return the sum over replicas of a rank's share of so many gradients."""
        return replica_sum(self.training, self.plan, kind, elements)

    def unit(self, kind: str, stage: int, block: int) -> Volume:
        """Return the gather of the parameters of a block by the groups of a kind."""
        cost = self.cuts.plan_costs.stages[stage].blocks[block]
        elements = cost.experts if kind == EXPERT_DATA else cost.parameters - cost.experts
        return Collective.ALL_GATHER, float(elements * self.training.parameter_bytes)

    def boundary(self, stage: int, batch: int) -> Volume:
        """Return the send of what one microbatch of a stage gives the next one, of ``batch`` sequences as in `Rank`."""
        if (stage, batch) not in self._boundaries:
            size = self.plan.boundary_part(self.costs.boundary_bytes(self.costs.seen(self.plan, batch), stage))
            self._boundaries[stage, batch] = Collective.SEND, size
        return self._boundaries[stage, batch]

    def replicated(self, axis: str, position: int) -> Volume:
        """Return the sum of the gradients at a position that each rank along an axis has of its own part."""
        elements = summed_share(self.plan, self.held(position).replicated[OPERATOR_AXES.index(axis)])
        return Collective.ALL_REDUCE, float(elements * self.training.gradient_bytes)

    def tied_sum(self, elements: int) -> Volume:
        """Return the sum of the gradients of a tied parameter."""
        share = ceil(elements / self.plan.shards) if self.cuts.sharing.gradients else elements
        return Collective.ALL_REDUCE, float(share * self.training.gradient_bytes)

    def shared(self, kind: str, position: int) -> int:
        """Return the parameters of a position that the groups of a kind share."""
        held = self.held(position)
        return held.experts if kind == EXPERT_DATA else held.elements - held.experts

    def held(self, position: int) -> Parameters:
        """Return the parameters on a rank of a position."""
        return self.cuts.plan_costs.held.positions[position]

    def at_the_end(self, slot: Slot) -> tuple[int, int, Volume, str]:
        """Return stage, phase, volume and name of a communication of gradients or parameters."""
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
    """Return what the skeleton of a plan's step depends on."""
    return _Shape(cuts, volumes).step()


class _Shape:
    """The parts, buckets and communications of one plan, without what they take."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training

    def step(self) -> StepShape:
        """Return what the skeleton depends on."""
        plan, framework = self.plan, self.training.conventions
        positions = range(plan.pipeline)
        late = plan.replicas > 1 and not self.cuts.in_buckets
        return StepShape(
            schedule=plan.schedule_name,
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
        """Return the operator axes along which gradients are summed at the end of the step, and its phases."""
        found = ((axis, self._legs(axis, position, self.volumes.replicated(axis, position))) for axis in OPERATOR_AXES)
        return tuple((axis, legs) for axis, legs in found if legs)

    def _norm_legs(self) -> int | None:
        """Return the phases of the sum of the norm of gradients; ``None`` where they are not clipped."""
        if not self.training.gradient_clipping:
            return None
        return self._legs(NORM, 0, SQUARES) if NORM in self.table.tables else 0

    def _stage_shape(self, stage: int) -> StageShape:
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
        """Return one rank class at a position for every size of microbatches that ranks there run."""
        classes = self.table.by_position[position]
        if not self.table.placed.batches:
            return classes[:1]
        return tuple({self.machine.rank(index).batch: index for index in reversed(classes)}.values())

    def _pass_shape(self, stage: int, parts: tuple[Part, ...]) -> tuple[PartShape, ...]:
        return tuple(self._part_shape(stage, part) for part in parts)

    def _units(self, stage: int, parts: tuple[Part, ...]) -> tuple[UnitShape, ...]:
        """Return the units whose parameters are gathered, in the order of a pass; none where none are."""
        if not self.cuts.sharing.parameters:
            return ()
        ended = [index for index, part in enumerate(parts) if part.ends_loss]
        units = []
        for start, end, block in self._blocks(stage, parts):
            after_loss = (index + 1 for index in ended if start <= index <= end)
            units.append(UnitShape(max(after_loss, default=start), block, self._gathers(stage, block)))
        return tuple(units)

    def _kept(self, stage: int, parts: tuple[Part, ...]) -> tuple[KeptShape, ...]:
        """Return the blocks of a pass whose activations are on the host in between, in its order."""
        blocks = self.cuts.plan_costs.stages[stage].blocks
        if not any(block.away for block in blocks):
            return ()
        return tuple(KeptShape(*where) for where in self._blocks(stage, parts) if blocks[where[2]].away)

    def _blocks(self, stage: int, parts: tuple[Part, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield the first and the last part of every block of a pass, and its number, where passes are cut there."""
        number = {name: index for index, name in enumerate(self.plan.stages[stage].blocks)}
        ends = [(index, number[part.completes]) for index, part in enumerate(parts) if part.completes is not None]
        starts = [0, *(index + 1 for index, _ in ends)]
        yield from ((start, end, block) for start, (end, block) in zip(starts, ends, strict=False))

    def _update(self, position: int) -> Update:
        return update(self.training, self.plan, self.volumes.held(position), self.cuts.on_host[position])

    def _gathers(self, stage: int, block: int) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that gather a unit, its way from the host first, and the phases of each."""
        found = (
            (kind, self._legs(kind, self.cuts.positions[stage], self.volumes.unit(kind, stage, block)))
            for kind in SHARED
        )
        first = ((FROM_HOST, 1),) if block < blocks_on_host(self.plan, stage) else ()
        return (*first, *((kind, legs) for kind, legs in found if legs))

    def _part_shape(self, stage: int, part: Part) -> PartShape:
        step, legs = part.collective, 0
        if step is not None and step.collective is not None:
            legs = self._legs(step.axis, self.cuts.positions[stage], (step.collective, step.size)) or 1
        together = self.cuts.passes[self.cuts.positions[stage]] is Passes.GROUP and part.communicates and not legs
        along = step.axis if step is not None else TENSOR
        return PartShape(legs, together, part.lead > 0, along, part.beside)

    def _ending(self, position: int, what: Callable[[str, int], Volume]) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that run a collective at the end of the step, and its phases."""
        found = ((kind, self._legs(kind, position, what(kind, position))) for kind in SHARED)
        return tuple((kind, legs) for kind, legs in found if legs)

    def _late_replicas(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the numbers of the kinds of shares that are summed over replicas at the end, and the phases."""
        found = (self._replica_legs(kind, position, self.volumes.shared(kind, position)) for kind in SHARED)
        return tuple((number, legs) for number, legs in enumerate(found) if legs)

    def _replica_legs(self, kind: str, position: int, elements: int) -> int:
        """Return the phases of the sum over replicas of a rank's share of so many gradients."""
        return self._legs(REPLICA, position, self.volumes.replica_sum(kind, elements))

    def _legs(self, kind: str, position: int, what: Volume) -> int:
        """Return the most phases that a communication has on the groups at a position."""
        groups = self.table.groups_at(kind, position) if kind in self.table.tables else ()
        return max((len(self.machine.communicator(kind, group).legs(*what)) for group in groups), default=0)


def _longest(one: tuple[PartShape, ...], other: tuple[PartShape, ...]) -> tuple[PartShape, ...]:
    """Return the parts of a pass with the most phases: collectives of more bytes may have others."""
    return tuple(max(pair, key=lambda part: part.legs) for pair in zip(one, other, strict=True))
