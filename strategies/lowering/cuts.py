"""Cuts: how passes become tasks, and gradients buckets.

Every operator of a pass is one task, or chains of operators are contracted exactly. A chain of operators and
collectives that nothing can disturb is one task, whose pieces say when each operator starts and ends. Chains are cut
where a collective must wait for other ranks or share links, and where gradients are ready to be reduced.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import Category, Change, Deferred, Piece, StreamKind, TaskKind, Work
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.offload import HostShare
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients, count_updated_parameters
from meshwise.strategies.lowering.costs.segments import Segment, build_communication, list_table_moves
from meshwise.strategies.lowering.costs.weights import Unit
from meshwise.strategies.lowering.pass_modes import PassMode, choose_pass_modes
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import BlockCost, StageCost, StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import (
    Bucket,
    bucket_limit,
    build_buckets,
    choose_reduction,
    fill_buckets,
    reduces_in_buckets,
    reduction_bytes,
    with_whole_units,
)
from meshwise.strategies.lowering.tasks.fully_sharded import (
    NO_CHANGES,
    BlockChanges,
    find_sharing,
    list_changes,
)
from meshwise.strategies.lowering.tasks.variants import (
    BACKWARD_PASS,
    FIRST_OFFSET,
    FORWARD_PASS,
    INPUTS,
    JOINED_OFFSET,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    kind_of,
)
from meshwise.strategies.lowering.timing import (
    LaunchedChain,
    RankClock,
    TimedSegment,
    chain_ticks,
    copy_ticks,
    launch_chain,
)
from meshwise.strategies.plan.mesh import DATA, EXPERT_DATA, OPERATOR_AXES, TENSOR
from meshwise.strategies.plan.offloading import HOST_STREAMS
from meshwise.strategies.plan.plan import Plan, count_host_blocks
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, ActionKind


class Granularity(StrEnum):
    """What becomes one task."""

    OPERATOR = "operator"
    CHAIN = "chain"


class Cut(NamedTuple):
    """Where a pass is cut into tasks.

    Parameters
    ----------
    after_every
        After every segment.
    collectives
        Around every collective: it waits for other rank classes, or shares links.
    blocks
        After these blocks: their gradients leave, or the parameters of the next block must have arrived.
    losses
        After the backward of a loss: then parameters begin to arrive.
    """

    after_every: bool
    collectives: bool
    blocks: frozenset[str] = frozenset()
    losses: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One future task of a pass.

    Parameters
    ----------
    name
        The name of its first segment.
    work
        What the task does; for a collective of its own, without its bytes.
    collective
        The segment that is a task of the whole tensor group; ``None`` for a rank's own part.
    completed_block
        The block whose backward ends with it, if one does.
    ends_loss
        Whether the backward of a loss ends with it.
    launch_lead, launch_tail
        Ticks of launching before the part can run, and from then until the host has launched all of it.
    communicates
        Whether a collective runs inside the part.
    """

    name: str
    work: Work
    collective: Segment | None
    completed_block: str | None
    ends_loss: bool
    launch_lead: int
    launch_tail: int
    communicates: bool

    @property
    def overlaps_next(self) -> bool:
        """Whether the part starts with the next one, and what follows waits for both."""
        return self.collective is not None and self.collective.overlaps_next


class _PassItem(NamedTuple):
    """One segment of a pass on its way into a part, and its block if it has one."""

    segment: Segment
    ticks: int
    block: str | None
    acquired: tuple[Change, ...]
    released: tuple[Change, ...]
    completed_block: str | None
    ends_loss: bool = False
    is_copy: bool = False

    @property
    def label(self) -> str:
        """The name of its piece."""
        return f"{self.block}: {self.segment.label}" if self.block is not None else self.segment.label


_BlockEntry = tuple[str, BlockCost, BlockChanges, int, int | None]
"""A block of a stage by name, its cost, its changes besides activations, and the ticks of copying its gradients and of
what data ranks slow it by, if in some pass of the kind they do."""


class StagePass(NamedTuple):
    """One pass of a stage on a rank, before it is cut into tasks.

    Parameters
    ----------
    stage
        The number of the stage.
    kind
        Which of its passes.
    names, cost
        The names of its blocks, and what they take.
    launch
        Seconds in which the host launches one kernel.
    first_segments
        Collectives that run first, on what arrives from another stage.
    changes
        What the blocks, in the order of the pass, take and give back besides activations.
    copy_durations
        Ticks in which gradients are copied after each block.
    slowed_durations
        Ticks by which each block takes longer because data ranks communicate beneath it, ``None`` where no pass of the
        kind has them do so.
    """

    stage: int
    kind: ActionKind
    names: tuple[str, ...]
    cost: StageCost
    launch: float
    first_segments: tuple[TimedSegment, ...] = ()
    changes: tuple[BlockChanges, ...] = ()
    copy_durations: tuple[int, ...] = ()
    slowed_durations: tuple[int | None, ...] = ()


def cut_pass(stage_pass: StagePass, cut: Cut) -> tuple[Part, ...]:
    """Return one pass of a stage in parts, in order."""
    index, kind, names, cost, launch, first_segments, *extras = stage_pass
    direction = 1 if kind is ActionKind.FORWARD else -1
    block_extras = [row or (default,) * len(names) for row, default in zip(extras, (NO_CHANGES, 0, None), strict=True)]
    blocks = list(zip(names[::direction], cost.blocks[::direction], *block_extras, strict=True))
    ends = [place for place, (name, *_) in enumerate(blocks, 1) if name in cut.blocks or place == len(blocks)]
    rows = [blocks[start:end] for start, end in pairwise([0, *ends])] or [blocks]
    pass_parts: list[Part] = []
    for place, row in enumerate(rows):
        leading = () if place else first_segments
        # Where cuts lie between blocks alone, segments need not be looked at: whole blocks are summed.
        if _is_cut_inside(row, kind, leading, cut):
            chains = _split_chains(_list_items(row, kind, leading), cut)
            pass_parts += (_build_part(items, index, kind, launch) for items in chains)
        else:
            pass_parts.append(_build_whole_part(row, index, kind, launch, leading))
    return tuple(pass_parts)


def _is_cut_inside(
    blocks: list[_BlockEntry], kind: ActionKind, first_segments: tuple[TimedSegment, ...], cut: Cut
) -> bool:
    """Return whether blocks of a pass are cut elsewhere than behind the last of them."""
    if cut.after_every or (cut.collectives and first_segments):
        return True
    return any(
        copy_duration
        or (cut.losses and cost.find_first_read(kind))
        or (cut.collectives and cost.passes.select(kind).communicates)
        for _, cost, _, copy_duration, _ in blocks
    )


def _build_whole_part(
    blocks: list[_BlockEntry], index: int, kind: ActionKind, launch: float, first_segments: tuple[TimedSegment, ...]
) -> Part:
    """Return a part of whole blocks, whose segments are looked at only when its pieces are needed."""
    ticks, chain = chain_ticks(first_segments), launch_chain(first_segments, launch)
    communicates = bool(first_segments)
    for _, cost, _, _, slowed_ticks in blocks:
        block_pass = cost.passes.select(kind)
        ticks += block_pass.ticks + (slowed_ticks or 0)
        chain = chain.extend(block_pass.chain)
        if slowed_ticks:
            chain = chain.extend(LaunchedChain(slowed_ticks, latest=slowed_ticks))
        communicates = communicates or block_pass.communicates
    pieces = Deferred(lambda: _build_pieces(_list_items(blocks, kind, first_segments), launch))
    work, last_block = Work(_TASK_KINDS[kind], index, ticks, pieces), blocks[-1][0] if blocks else None
    name = next(_list_items(blocks, kind, first_segments)).label
    return Part(name, work, None, last_block, False, chain.lead, chain.tail, communicates)


def _list_items(
    blocks: list[_BlockEntry], kind: ActionKind, first_segments: tuple[TimedSegment, ...]
) -> Iterator[_PassItem]:
    """Yield every segment of a pass in order."""
    for timed_segment in first_segments:
        yield _PassItem(*timed_segment, None, (), (), None)
    for block in blocks:
        yield from _list_block_items(*block, kind)
    if not first_segments and not any(cost.passes.select(kind).segments for _, cost, *_ in blocks):
        yield _PassItem(Segment(_TASK_KINDS[kind], "empty stage", num_launches=0), 0, None, (), (), None)


cut_known_pass = lru_cache(maxsize=256)(cut_pass)
"""`cut_pass`, with its latest results kept: plans that differ elsewhere share their passes. More than 256 are no more
often found again in the sweeps of published runs, and keep the costs of old problems alive."""


def _list_block_items(
    name: str,
    cost: BlockCost,
    block_changes: BlockChanges,
    copy_duration: int,
    slowed_ticks: int | None,
    kind: ActionKind,
) -> Iterator[_PassItem]:
    """Yield the segments of a block, with what each takes and gives back."""
    memory, segments = cost.memory, cost.passes.select(kind).segments
    if slowed_ticks is not None:
        slowed_segment = Segment(_TASK_KINDS[kind], "slowed by communication", num_launches=0)
        segments = (*segments, TimedSegment(slowed_segment, slowed_ticks))
    acquired_bytes, released_bytes = memory.changes(kind)
    working_bytes, loss_bytes, unmade_bytes = (
        memory.working_bytes(kind),
        memory.loss_bytes(kind),
        min(acquired_bytes, 0),
    )
    begin_changes = _build_changes(acquired_bytes - unmade_bytes, working_bytes, unmade_bytes) + block_changes.acquired
    end_changes = (
        _build_changes(released_bytes - unmade_bytes, working_bytes - loss_bytes, unmade_bytes) + block_changes.released
    )
    first_read = cost.find_first_read(kind)
    for index, timed_segment in enumerate(segments):
        acquired = (begin_changes if index == 0 else ()) + (block_changes.gathered if index == first_read else ())
        ends_loss, is_last = index == first_read - 1, index == len(segments) - 1
        released = (_build_changes(0, loss_bytes, 0) if ends_loss else ()) + (end_changes if is_last else ())
        completed_block = name if is_last and not copy_duration else None
        yield _PassItem(*timed_segment, name, acquired, released, completed_block, ends_loss)
    if copy_duration:
        segment, copy_changes = (
            Segment(_TASK_KINDS[kind], "copy of gradients"),
            (Change(Category.BUFFERS, block_changes.copied_bytes),),
        )
        late_changes = copy_changes + block_changes.released_late
        yield _PassItem(segment, copy_duration, name, copy_changes, late_changes, name, is_copy=True)


def _build_changes(activations: int, buffers: int, gradients: int) -> tuple[Change, ...]:
    """Return changes of memory, without those of no bytes.

    ``gradients``, below 0, are gradients that count already but are made later.
    """
    sizes = ((Category.ACTIVATIONS, activations), (Category.BUFFERS, buffers), (Category.GRADIENTS, gradients))
    return tuple(Change(category, size) for category, size in sizes if size)


def _split_chains(items: Iterable[_PassItem], cut: Cut) -> Iterator[list[_PassItem]]:
    """Yield the items of each part."""
    current_chain: list[_PassItem] = []
    ends_overlap = False  # whether a collective runs beside the next item, so that a part ends behind both
    for item in items:
        is_joint = item.segment.collective is not None and (cut.collectives or cut.after_every)
        if current_chain and (cut.after_every or is_joint or item.is_copy):
            yield current_chain
            current_chain = []
        current_chain.append(item)
        if is_joint or ends_overlap or item.completed_block in cut.blocks or (cut.losses and item.ends_loss):
            yield current_chain
            current_chain = []
        ends_overlap = is_joint and item.segment.overlaps_next
    if current_chain:
        yield current_chain


def _build_part(items: list[_PassItem], index: int, kind: ActionKind, launch: float) -> Part:
    """Return one part of consecutive items."""
    is_joint = len(items) == 1 and items[0].segment.collective is not None
    timed_segments = [TimedSegment(item.segment, item.ticks) for item in items]
    ticks = items[0].ticks if is_joint else chain_ticks(timed_segments)
    work = Work(
        items[0].segment.kind if is_joint else _TASK_KINDS[kind],
        index,
        ticks,
        Deferred(partial(_build_pieces, items, launch)),
    )
    chain = launch_chain(timed_segments, launch)
    communicates = any(segment.collective is not None for segment, _ in timed_segments)
    segment, last_item = items[0].segment if is_joint else None, items[-1]
    return Part(
        items[0].label,
        work,
        segment,
        last_item.completed_block,
        last_item.ends_loss,
        chain.lead,
        chain.tail,
        communicates,
    )


def _build_pieces(items: Iterable[_PassItem], launch: float) -> list[Piece]:
    """Return the pieces of a chain, from its start on."""
    pieces, start, end, launch_end = [], 0, 0, 0
    for item in items:
        segment = item.segment
        launch_end += to_ticks(launch * segment.num_launches)
        stream = StreamKind.COMPUTE if segment.collective is None else _choose_stream(segment)
        num_bytes = segment.size if segment.collective is not None else 0.0
        changes = item.acquired, item.released
        launch_wait = (
            launch_end if segment.num_launches else 0
        )  # a kernel that is launched with an earlier one waits for none itself
        pieces.append(
            Piece(segment.kind, item.label, start, start + item.ticks, stream, *changes, num_bytes, launch_wait)
        )
        end = max(end, start + item.ticks)
        start = start if segment.overlaps_next else end
    return pieces


def _choose_stream(collective: Segment) -> StreamKind:
    """Return the stream of a collective inside a pass: one that overlaps compute has its own, and so has a copy."""
    if collective.axis in HOST_STREAMS:
        return HOST_STREAMS[collective.axis]
    return StreamKind.CONTEXT if collective.overlaps_next else StreamKind.TENSOR


_TASK_KINDS = {
    ActionKind.FORWARD: TaskKind.FORWARD,
    ActionKind.BACKWARD: TaskKind.BACKWARD,
    ActionKind.INPUT: TaskKind.BACKWARD,
    ActionKind.WEIGHT: TaskKind.WEIGHT_GRADIENT,
}
"""Kind of the tasks of a pass, by kind of action."""


def build_stage_buckets(names: Sequence[str], cost: StageCost, gradient_bytes: int, limit: float) -> tuple[Bucket, ...]:
    """Return the buckets of a stage whose blocks have ``names``, in the order in which backward fills them."""
    experts = [block.expert_parameters for block in cost.blocks]
    return build_buckets(names, cost.gradients, experts, gradient_bytes, limit)


class Cuts:
    """The passes of one plan as parts, and its gradients as buckets, each computed once.

    Parameters
    ----------
    machine
        The rank classes of the plan.
    granularity
        What becomes one task where nothing else cuts a pass.
    """

    def __init__(self, costs: StageCosts, plan: Plan, machine: Machine, granularity: Granularity) -> None:
        self.costs, self.plan, self.machine, self.granularity = costs, plan, machine, granularity
        self.cluster, self.training = costs.problem.cluster, costs.problem.training
        self.in_buckets = reduces_in_buckets(self.cluster, plan) or plan.offloads_parameters
        begins_gradients = allocates_gradients(self.training, plan)
        self.sharing = find_sharing(self.cluster, self.training, plan, begins_gradients=begins_gradients)
        self.tied_sums = costs.list_tied_shares(plan)
        self.plan_costs = costs.plan_costs(plan)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.plan.positions

    @cached_property
    def host_shares(self) -> tuple[HostShare, ...]:
        """What the ranks of every position keep on their hosts."""
        return self.costs.list_host_shares(self.plan)

    @cached_property
    def table_moves(self) -> tuple[Segment, ...]:
        """What moves of tables beside a microbatch, where steps overlap."""
        if not self.plan.embeddings.pipelined:
            return ()
        work = self.costs.blocks.table_work(self.costs.find_keys(self.plan).cut, self.plan.sequences)
        return list_table_moves(work)

    @cached_property
    def pass_modes(self) -> tuple[PassMode, ...]:
        """For every position, how its passes run; a collective that a host waits for is a task of its own.

        So is one beside copies from hosts, or beside the sums of gradients of what is not in tables.
        """
        if self.plan.embeddings:
            return (PassMode.SEPARATE,) * self.plan.pipeline
        if self.training.conventions.waits_for_collectives and self.machine.has_launches:
            return (PassMode.SEPARATE,) * self.plan.pipeline
        axis_counts = zip(
            *(parameters.replicated_elements for parameters in self.plan_costs.plan_parameters.positions), strict=True
        )
        replicated_axes = [axis for axis, counts in zip(OPERATOR_AXES, axis_counts, strict=True) if any(counts)]
        return choose_pass_modes(
            self.machine, self.plan, self.in_buckets, self.tied_sums, replicated_axes, self._can_drift
        )

    def _can_drift(self, position: int) -> bool:
        """Return whether some block at a position has a pass whose collectives all overlap other work.

        A pass without collectives starts no drift: its ranks take the same time, alone or together.
        """
        stages = [
            cost
            for cost, stage_position in zip(self.plan_costs.stages, self.positions, strict=True)
            if stage_position == position
        ]
        blocks = {cost.passes for stage in stages for cost in stage.blocks}
        kinds = (FORWARD_PASS, *((INPUTS, WEIGHTS) if self.plan.splits_backward else (BACKWARD_PASS,)))
        passes_of_blocks = (passes.select(kind_of(kind)).segments for passes in blocks for kind in kinds)
        collective_lists = ([segment for segment, _ in row if segment.collective] for row in passes_of_blocks)
        return any(segments and all(segment.overlaps_next for segment in segments) for segments in collective_lists)

    def find_cut(self, stage: int, variant: int) -> Cut:
        """Return where the passes of a stage are cut."""
        base_variant, shared_states = variant % JOINED_OFFSET, self.sharing
        is_last = base_variant in (LAST_BACKWARD, LAST_WEIGHTS)
        end_blocks: frozenset[str] = frozenset()
        if shared_states.parameters or self.plan_costs.stages[stage].offloads_activations:
            end_blocks = frozenset(self.plan.stages[stage].blocks)
        elif self.in_buckets and (is_last or (shared_states.gradients and kind_of(base_variant) in MAKES_GRADIENTS)):
            end_blocks = frozenset(bucket.last_block for bucket in self.buckets(stage))
        is_separate = self.pass_modes[self.positions[stage]] is PassMode.SEPARATE
        return Cut(self.granularity is Granularity.OPERATOR, is_separate, end_blocks, shared_states.parameters)

    @memoise
    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Return the buckets of a stage's gradients."""
        cost, names = self.plan_costs.stages[stage], self.plan.stages[stage].blocks
        return build_stage_buckets(names, cost, self.training.gradient_bytes, bucket_limit(self.plan))

    def list_parts(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return a pass of a stage on a rank class as parts."""
        return self._cut_stage(stage, variant, self.machine.rank(rank_class))

    @memoise
    def _cut_stage(self, stage: int, variant: int, rank: RankProfile) -> tuple[Part, ...]:
        """Return a pass of a stage on a rank as parts."""
        cost = self.costs.stage_cost(self.plan, stage, rank)
        cost = cost.first_gradient_cost if variant >= FIRST_OFFSET else cost
        cut, block_changes = self.find_cut(stage, variant), self._list_block_changes(stage, variant, cost)
        clock, names = self.costs.clock(rank), self.plan.stages[stage].blocks
        first_segments = clock.time_segments(self.list_first_segments(stage, variant, rank))
        copy_durations = tuple(copy_ticks(rank.accelerator, change.copied_bytes) for change in block_changes)
        slowed_durations = self._list_slowed_ticks(stage, variant, cost, clock)
        passes = stage, kind_of(variant), names, cost, rank.launch, first_segments
        return cut_known_pass(StagePass(*passes, block_changes, copy_durations, slowed_durations), cut)

    def _list_slowed_ticks(self, stage: int, variant: int, cost: StageCost, clock: RankClock) -> tuple[int | None, ...]:
        """Return by how much each block of a pass, in its order, is slowed by what data ranks move beneath it.

        A block is slowed by the gather of the next unit, and by the reduction of the bucket that the previous block
        filled, where every microbatch has these. A reduction of once a step is too short to count. It is ``None`` where
        nothing moves beneath a block in any pass of the kind, and 0 where nothing does in this one: passes of a kind
        have the same parts.
        """
        shared_states, kind, names = self.sharing, kind_of(variant), self.plan.stages[stage].blocks
        if clock.rank.slowdown == 1 or not shared_states.num_ahead or self.plan.shards == 1:
            return ()
        blocks = cost.blocks[:: 1 if kind is ActionKind.FORWARD else -1]
        collective_ticks = Counter[int]()  # by place of the block beneath which they run
        may_gather = kind is ActionKind.FORWARD or (shared_states.reshard and kind is not ActionKind.WEIGHT)
        if shared_states.parameters and may_gather:
            is_gathered = shared_states.list_gathered(variant, len(names))
            for unit, block in enumerate(blocks[1:], 1):
                dense_elements = block.parameters - block.expert_parameters
                for group, elements in ((DATA, dense_elements), (EXPERT_DATA, block.expert_parameters)):
                    size = float(elements * self.training.parameter_bytes * is_gathered[unit])
                    collective_ticks[unit - 1] += self._count_ticks(group, stage, Collective.ALL_GATHER, size)
        if shared_states.gradients and kind in MAKES_GRADIENTS:
            reduction, size = choose_reduction(self.plan), reduction_bytes(self.training, self.plan)
            for bucket in self.buckets(stage):
                next_block = len(names) - names.index(bucket.last_block)
                if next_block < len(names):
                    ticks = self._count_ticks(bucket.kind, stage, reduction, float(bucket.parameters * size))
                    collective_ticks[next_block] += ticks
        pass_ticks = (block.passes.select(kind).ticks for block in blocks)
        return tuple(
            clock.count_slowed_ticks(ticks, collective_ticks[place]) if place in collective_ticks else None
            for place, ticks in enumerate(pass_ticks)
        )

    def _count_ticks(self, kind: str, stage: int, collective: Collective, size: float) -> int:
        """Return the least ticks of a collective of data ranks at the position of a stage; 0 without bytes or ranks."""
        if not size or kind not in self.machine.table.tables:
            return 0
        groups = self.machine.list_distinct_groups(kind, collective)[self.positions[stage]]
        return self.machine.least_ticks(kind, groups, collective, size)

    def _list_first_gradients(self, stage: int) -> tuple[int, ...]:
        """Return the elements of every block, in the order of backward, whose gradients a first backward allocates."""
        keys = self.costs.find_keys(self.plan)
        return self.costs.list_first_gradients(keys.stages, keys.states, stage)

    def _list_block_changes(self, stage: int, variant: int, cost: StageCost) -> tuple[BlockChanges, ...]:
        """Return what the blocks of a pass take and give back of gathered parameters and whole gradients."""
        first_elements = self._list_first_gradients(stage) if variant >= FIRST_OFFSET else ()
        if not self.sharing.gradients:
            no_sizes = (0,) * len(cost.blocks)
            return (
                list_changes(self.sharing, self.training, variant, no_sizes, (), lasting_elements=first_elements)
                if first_elements
                else ()
            )
        blocks, is_shared, num_on_host = cost.blocks, self.plan.shards > 1, count_host_blocks(self.plan, stage)
        moving_blocks = blocks if is_shared else blocks[:num_on_host]
        zeros = (0,) * (len(blocks) - len(moving_blocks))
        element_counts = [*(block.parameters for block in moving_blocks), *zeros]
        expert_counts = [*(block.expert_parameters for block in moving_blocks), *zeros]
        bucket_fillings = fill_buckets(
            element_counts[::-1], expert_counts[::-1], self.training.gradient_bytes, bucket_limit(self.plan)
        )
        shards = [
            count_updated_parameters(self.plan, block.parameters, block.expert_parameters)
            for block in blocks[:num_on_host]
        ]
        shards = [*shards, *(0,) * (len(blocks) - num_on_host)] if is_shared and num_on_host else []
        undeferred_counts = [*(block.undeferred_parameters for block in moving_blocks), *zeros]
        units = [*(block.unit for block in moving_blocks), *(Unit() for _ in zeros)]
        direction = 1 if kind_of(variant) is ActionKind.FORWARD else -1
        # Buckets fill in the order of backward, the last block first.
        sizes = [unit.size for unit in units]
        pass_arguments = (
            sizes[::direction],
            with_whole_units(
                bucket_fillings,
                [unit.elements for unit in units[::-1]],
                [unit.expert_elements for unit in units[::-1]],
            ),
            shards[::direction],
            undeferred_counts[::-1],
            first_elements,
        )
        return list_changes(self.sharing, self.training, variant, *pass_arguments)

    def list_first_segments(self, stage: int, variant: int, rank: RankProfile) -> tuple[Segment, ...]:
        """Return the gather of the slices that arrive from another stage, if there is one."""
        source_stage = stage - 1 if kind_of(variant) is ActionKind.FORWARD else stage
        if kind_of(variant) is ActionKind.WEIGHT:
            return ()
        if not 0 <= source_stage < len(self.plan.stages) - 1 or not self.plan.slices_boundaries:
            return ()
        if self.positions[source_stage] == self.positions[source_stage + 1]:
            return ()
        size = float(self.costs.boundary_bytes(self.plan, source_stage, rank.batch or None))
        return (build_communication(TENSOR, Collective.ALL_GATHER, size, f"boundary along {TENSOR}"),)
