"""The shape of a plan's step: what its skeleton depends on, and no more."""

from collections.abc import Callable, Iterator

from strategies.lowering.clipping import SQUARES
from strategies.lowering.contention import Passes
from strategies.lowering.cuts import Cuts
from strategies.lowering.data import SHARED
from strategies.lowering.kept import KeptShape
from strategies.lowering.offload import Update, update
from strategies.lowering.pieces import Part
from strategies.lowering.placed import NORM, tied_kind
from strategies.lowering.step_shape import Leaving, PartShape, StageShape, StepShape, UnitShape
from strategies.lowering.variant import FORWARD_PASS, INPUTS, LAST_BACKWARD, LAST_WEIGHTS, SPLIT, WHOLE
from strategies.lowering.volumes import Volume, Volumes
from strategies.mesh import OPERATOR_AXES, REPLICA, TENSOR
from strategies.offloading import FROM_HOST
from strategies.plan import blocks_on_host


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
            ends = [{part.completes: index for index, part in enumerate(variants[each])} for each in makes]
            for number, bucket in enumerate(self.cuts.buckets(stage)):
                legs = self._legs(bucket.kind, self.cuts.positions[stage], self.volumes.gradients(stage, number))
                over = self._replica_legs(bucket.kind, self.cuts.positions[stage], bucket.parameters)
                copied = bucket.last in names[:away]
                if legs or over or copied:
                    parts = tuple(each[bucket.last] for each in ends)
                    leaving.append(Leaving(number, parts, bucket.kind, legs, over, copied))
        forward, backward, last, *split = shapes
        ways = variants[FORWARD_PASS], variants[LAST_BACKWARD]
        reading = (FORWARD_PASS, LAST_BACKWARD, INPUTS)
        units = tuple(self._units(stage, variants[each]) for each in reading if each in used)
        kept = [self._kept(stage, each) for each in ways]
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
