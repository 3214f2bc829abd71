"""The shape of a step from its passes as they are cut, and from the collectives outside passes."""

from collections.abc import Callable, Iterator

from meshwise.strategies.lowering.costs.offload import plan_update
from meshwise.strategies.lowering.costs.optimizer import NORM_SUM
from meshwise.strategies.lowering.cuts import Cuts, Part
from meshwise.strategies.lowering.pass_modes import PassMode
from meshwise.strategies.lowering.tasks.activation_copies import OffloadedBlock
from meshwise.strategies.lowering.tasks.data_parallel import (
    SHARING_KINDS,
)
from meshwise.strategies.lowering.tasks.shape import LeavingBucket, PartShape, StageShape, StepShape, UnitShape
from meshwise.strategies.lowering.tasks.variants import (
    FORWARD_PASS,
    INPUTS,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    SPLIT_VARIANTS,
    WHOLE_VARIANTS,
)
from meshwise.strategies.lowering.volumes import Volume, Volumes
from meshwise.strategies.plan.mesh import NORM, OPERATOR_AXES, REPLICA, TENSOR, tied_kind
from meshwise.strategies.plan.offloading import FROM_HOST, Update
from meshwise.strategies.plan.plan import count_host_blocks


def step_shape(cuts: Cuts, volumes: Volumes) -> StepShape:
    """Return the shape of a plan's step, on which its skeleton depends."""
    return _ShapeBuilder(cuts, volumes).build()


class _ShapeBuilder:
    """Builds the shape of one plan's step."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training

    def build(self) -> StepShape:
        """Return the shape of the step."""
        plan, framework = self.plan, self.training.conventions
        positions = range(plan.pipeline)
        reduces_late = plan.replicas > 1 and not self.cuts.in_buckets
        return StepShape(
            schedule=plan.schedule,
            ranks=plan.pipeline,
            microbatches=plan.num_microbatches,
            chunks=plan.chunks,
            stages=tuple(self._build_stage(stage) for stage in range(len(plan.stages))),
            reductions=tuple(
                self._list_late_collectives(pipeline_position, self.volumes.gradient_sum) if reduces_late else ()
                for pipeline_position in positions
            ),
            gathers=tuple(
                self._list_late_collectives(pipeline_position, self.volumes.parameter_gather)
                if plan.zero in (1, 2)
                else ()
                for pipeline_position in positions
            ),
            updates=tuple(self._plan_update(position) for position in positions),
            replicated_sums=tuple(self._list_replicated_sums(pipeline_position) for pipeline_position in positions),
            tied_sums=tuple(
                (
                    first_position,
                    second_position,
                    self._count_phases(
                        tied_kind(first_position, second_position), first_position, self.volumes.tied_sum(elements)
                    ),
                )
                for first_position, second_position, elements in self.cuts.tied_sums
            ),
            replica_sums=tuple(
                self._list_late_replicas(pipeline_position) if reduces_late else () for pipeline_position in positions
            ),
            sharing=self.cuts.sharing,
            norm_phases=self._count_norm_phases(),
            hosts_wait=framework.waits_for_passes or (plan.pipeline > 1 and framework.waits_for_exchanges),
            hosts_wait_inside=framework.waits_for_collectives,
            table_moves=tuple(
                (move.axis, self._count_phases(move.axis, 0, (move.collective, move.size)))
                for move in self.cuts.table_moves
                if move.collective is not None
            ),
        )

    def _list_replicated_sums(self, position: int) -> tuple[tuple[str, int], ...]:
        """Return the operator axes along which gradients are summed at the end of the step, with phases of each."""
        phase_counts = (
            (axis, self._count_phases(axis, position, self.volumes.replicated_sum(axis, position)))
            for axis in OPERATOR_AXES
        )
        return tuple((axis, num_phases) for axis, num_phases in phase_counts if num_phases)

    def _count_norm_phases(self) -> int | None:
        """Return the phases of the sum of the norm of gradients; ``None`` without clipping."""
        if not self.training.gradient_clipping:
            return None
        return self._count_phases(NORM, 0, NORM_SUM) if NORM in self.table.tables else 0

    def _build_stage(self, stage: int) -> StageShape:
        """Return the shape of a stage.

        Ranks with larger microbatches may need more phases; tasks of phases that a rank lacks take no ticks.
        """
        first_class, *other_classes = self._list_sized_classes(self.cuts.positions[stage])
        used_variants = WHOLE_VARIANTS + SPLIT_VARIANTS if self.plan.splits_backward else WHOLE_VARIANTS
        variants = [self.cuts.list_parts(stage, variant, first_class) for variant in used_variants]
        shapes = [self._build_pass(stage, parts) for parts in variants]
        for rank_class in other_classes:
            other_shapes = [
                self._build_pass(stage, self.cuts.list_parts(stage, variant, rank_class)) for variant in used_variants
            ]
            shapes = [_choose_longest(*rows) for rows in zip(shapes, other_shapes, strict=True)]
        gradient_variants = [LAST_BACKWARD, LAST_WEIGHTS] if self.plan.splits_backward else [LAST_BACKWARD]
        leaving_buckets: list[LeavingBucket] = []
        num_on_host = count_host_blocks(self.plan, stage)
        names = self.plan.stages[stage].blocks
        if self.cuts.in_buckets:
            part_ends = [
                {part.completed_block: index for index, part in enumerate(variants[variant])}
                for variant in gradient_variants
            ]
            for number, bucket in enumerate(self.cuts.buckets(stage)):
                num_phases = self._count_phases(
                    bucket.kind, self.cuts.positions[stage], self.volumes.bucket_sum(stage, number)
                )
                num_replica_phases = self._count_replica_phases(
                    bucket.kind, self.cuts.positions[stage], bucket.parameters
                )
                is_copied = bucket.last_block in names[:num_on_host]
                if num_phases or num_replica_phases or is_copied:
                    parts = tuple(end_parts[bucket.last_block] for end_parts in part_ends)
                    leaving_buckets.append(
                        LeavingBucket(number, parts, bucket.kind, num_phases, num_replica_phases, is_copied)
                    )
        forward, backward, last_backward, *split_passes = shapes
        part_lists = variants[FORWARD_PASS], variants[LAST_BACKWARD]
        reading_variants = (FORWARD_PASS, LAST_BACKWARD, INPUTS)
        units = tuple(
            self._list_units(stage, variants[variant]) for variant in reading_variants if variant in used_variants
        )
        offloads = [self._list_offloaded(stage, pass_parts) for pass_parts in part_lists]
        return StageShape(
            forward,
            backward,
            last_backward,
            tuple(leaving_buckets),
            tuple(split_passes),
            units,
            offloads[0],
            offloads[1],
        )

    def _list_sized_classes(self, position: int) -> tuple[int, ...]:
        """Return, for every size of microbatches of the ranks at a position, one rank class."""
        classes = self.table.by_position[position]
        if not self.table.placed.batches:
            return classes[:1]
        return tuple({self.machine.rank(index).batch: index for index in reversed(classes)}.values())

    def _build_pass(self, stage: int, parts: tuple[Part, ...]) -> tuple[PartShape, ...]:
        """Return the shapes of the parts of a pass."""
        return tuple(self._build_part(stage, part) for part in parts)

    def _list_units(self, stage: int, parts: tuple[Part, ...]) -> tuple[UnitShape, ...]:
        """Return the units whose parameters are gathered, in the order of a pass."""
        if not self.cuts.sharing.parameters:
            return ()
        loss_ends = [index for index, part in enumerate(parts) if part.ends_loss]
        units = []
        for start, end, block in self._list_blocks(stage, parts):
            after_loss = (index + 1 for index in loss_ends if start <= index <= end)
            units.append(UnitShape(max(after_loss, default=start), block, self._list_gathers(stage, block)))
        return tuple(units)

    def _list_offloaded(self, stage: int, parts: tuple[Part, ...]) -> tuple[OffloadedBlock, ...]:
        """Return the blocks of a pass whose activations are on the host between passes, in its order."""
        blocks = self.cuts.plan_costs.stages[stage].blocks
        if not any(block.offloaded_bytes for block in blocks):
            return ()
        return tuple(
            OffloadedBlock(*span) for span in self._list_blocks(stage, parts) if blocks[span[2]].offloaded_bytes
        )

    def _list_blocks(self, stage: int, parts: tuple[Part, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield the first part, last part and number of every block of a pass, where passes are cut at blocks."""
        number = {name: index for index, name in enumerate(self.plan.stages[stage].blocks)}
        ends = [
            (index, number[part.completed_block])
            for index, part in enumerate(parts)
            if part.completed_block is not None
        ]
        starts = [0, *(index + 1 for index, _ in ends)]
        yield from ((start, end, block) for start, (end, block) in zip(starts, ends, strict=False))

    def _plan_update(self, position: int) -> Update:
        """Return how the ranks of a position update their parameters."""
        return plan_update(
            self.training,
            self.plan,
            self.volumes.position_parameters(position),
            self.cuts.host_shares[position],
            self.plan.offload.step,
        )

    def _list_gathers(self, stage: int, block: int) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that gather a unit, with phases of each; first its copy from the host."""
        gathers = (
            (kind, self._count_phases(kind, self.cuts.positions[stage], self.volumes.unit_gather(kind, stage, block)))
            for kind in SHARING_KINDS
        )
        host_copy = ((FROM_HOST, 1),) if block < count_host_blocks(self.plan, stage) else ()
        return (*host_copy, *((kind, num_phases) for kind, num_phases in gathers if num_phases))

    def _build_part(self, stage: int, part: Part) -> PartShape:
        """Return the shape of a part."""
        segment, num_phases = part.collective, 0
        if segment is not None and segment.collective is not None:
            num_phases = (
                self._count_phases(segment.axis, self.cuts.positions[stage], (segment.collective, segment.size)) or 1
            )
        runs_as_group = (
            self.cuts.pass_modes[self.cuts.positions[stage]] is PassMode.GROUP and part.communicates and not num_phases
        )
        axis = segment.axis if segment is not None else TENSOR
        return PartShape(num_phases, runs_as_group, part.launch_lead > 0, axis, part.overlaps_next)

    def _list_late_collectives(
        self, position: int, find_volume: Callable[[str, int], Volume]
    ) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that run a collective at the end of the step, with phases of each."""
        collectives = (
            (kind, self._count_phases(kind, position, find_volume(kind, position))) for kind in SHARING_KINDS
        )
        return tuple((kind, num_phases) for kind, num_phases in collectives if num_phases)

    def _list_late_replicas(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the indices of the kinds of shares that are summed over replicas at the end, with phases of each."""
        phase_counts = (
            self._count_replica_phases(kind, position, self.volumes.count_shared(kind, position))
            for kind in SHARING_KINDS
        )
        return tuple((number, num_phases) for number, num_phases in enumerate(phase_counts) if num_phases)

    def _count_replica_phases(self, kind: str, position: int, elements: int) -> int:
        """Return the phases of the sum over replicas of a rank's share of ``elements`` gradients."""
        return self._count_phases(REPLICA, position, self.volumes.replica_sum(kind, elements))

    def _count_phases(self, kind: str, position: int, volume: Volume) -> int:
        """Return the most phases of a communication on any group at a position."""
        groups = self.table.groups_at(kind, position) if kind in self.table.tables else ()
        return max((len(self.machine.communicator(kind, group).list_phases(*volume)) for group in groups), default=0)


def _choose_longest(first_parts: tuple[PartShape, ...], second_parts: tuple[PartShape, ...]) -> tuple[PartShape, ...]:
    """Return the parts of a pass with the most phases: collectives of more bytes may run other algorithms."""
    return tuple(max(pair, key=lambda part: part.num_phases) for pair in zip(first_parts, second_parts, strict=True))
