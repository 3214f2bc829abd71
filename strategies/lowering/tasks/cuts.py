"""Cuts: how passes become tasks, and gradients buckets.

Every operator of a pass is one task, or chains of operators are contracted exactly. A chain of operators and
collectives that nothing can disturb is one task, whose pieces say when each operator starts and ends. Chains are cut
where a collective must wait for other ranks or share links, and where gradients are ready to be reduced.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import Category, Change, Deferred, Piece, StreamKind, TaskKind, Work
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.offload import OnHost
from meshwise.strategies.lowering.costs.optimizer import updated_parameters
from meshwise.strategies.lowering.costs.stage import BlockCost, StageCost, StageCosts
from meshwise.strategies.lowering.costs.steps import Step, chain_ticks, communication
from meshwise.strategies.lowering.costs.weights import Unit
from meshwise.strategies.lowering.rank_classes.machine import INSIDE, Machine, Rank
from meshwise.strategies.lowering.rank_classes.placement import (
    BACKWARD,
    FORWARD,
    HOST_KINDS,
    hop_kind,
    tenant_kind,
    tied_kind,
)
from meshwise.strategies.lowering.tasks.data_parallel import (
    Bucket,
    at_once,
    bucket_limit,
    buckets,
    fillings,
    overlaps,
    reduces_in_buckets,
    reduction,
)
from meshwise.strategies.lowering.tasks.fully_sharded import NOTHING, Changes, changes, copy_ticks, sharing
from meshwise.strategies.lowering.tasks.residents import on_host
from meshwise.strategies.lowering.tasks.variants import (
    BACKWARD_PASS,
    FIRST,
    FORWARD_PASS,
    INPUTS,
    JOINED,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    kind_of,
)
from meshwise.strategies.plan.mesh import DATA, EXPERT_DATA, OPERATOR_AXES, REPLICA, TENSOR
from meshwise.strategies.plan.offloading import FROM_HOST, TO_HOST
from meshwise.strategies.plan.plan import Plan, blocks_on_host
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

    every: bool
    collectives: bool
    blocks: frozenset[str] = frozenset()
    losses: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One future task of a pass.

    Parameters
    ----------
    name
        The name of its first segment, or of its first block where it is several whole blocks.
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
    collective: Step | None
    completes: str | None
    ends_loss: bool
    lead: int
    rest: int
    communicates: bool

    @property
    def beside(self) -> bool:
        """Whether the part starts with the next one, and what follows waits for both."""
        return self.collective is not None and self.collective.beside


class _Item(NamedTuple):
    """One segment of a pass on its way into a part, and its block if it has one."""

    step: Step
    block: str | None
    acquired: tuple[Change, ...]
    released: tuple[Change, ...]
    completes: str | None
    ends_loss: bool = False
    copies: bool = False

    @property
    def label(self) -> str:
        """The name of its piece."""
        return f"{self.block}: {self.step.operators}" if self.block is not None else self.step.operators


_Block = tuple[str, BlockCost, Changes, int]
"""A block of a stage by name, its cost, its changes besides activations, and the ticks of copying its gradients."""


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
    before
        Collectives that run first, on what arrives from another stage.
    changes
        What the blocks, in the order of the pass, take and give back besides activations.
    copy_durations
        Ticks in which gradients are copied after each block.
    """

    stage: int
    kind: ActionKind
    names: tuple[str, ...]
    cost: StageCost
    launch: float
    before: tuple[Step, ...] = ()
    changes: tuple[Changes, ...] = ()
    copies: tuple[int, ...] = ()


def cut_pass(whole: StagePass, cut: Cut) -> tuple[Part, ...]:
    """Return one pass of a stage in parts, in order."""
    index, kind, names, cost, launch, before, held, copies = whole
    turn = 1 if kind is ActionKind.FORWARD else -1
    besides = held or (NOTHING,) * len(names), copies or (0,) * len(names)
    blocks = list(zip(names[::turn], cost.blocks[::turn], *besides, strict=True))
    if launch or cut.every or cut.collectives:
        return tuple(_part(items, index, kind, launch) for items in _chains(_items(blocks, kind, before), cut))
    # Without launches and with cuts between blocks alone, segments need not be looked at: whole blocks are summed.
    ends = [place for place, (name, *_) in enumerate(blocks, 1) if name in cut.blocks or place == len(blocks)]
    rows = [blocks[start:end] for start, end in pairwise([0, *ends])] or [blocks]
    found: list[Part] = []
    for place, row in enumerate(rows):
        first = () if place else before
        if any(copy or (cut.losses and block.first_reading(kind)) for _, block, _, copy in row):
            found += (_part(items, index, kind, launch) for items in _chains(_items(row, kind, first), cut))
        else:
            found.append(_whole(row, index, kind, first))
    return tuple(found)


def _whole(blocks: list[_Block], index: int, kind: ActionKind, before: tuple[Step, ...]) -> Part:
    """Return a part of whole blocks, whose segments are looked at only when its pieces are needed."""
    ticks = chain_ticks(before) + sum(cost.ticks(kind) for _, cost, *_ in blocks)
    work = Work(_TASK_KIND[kind], index, ticks, Deferred(lambda: _pieces(_items(blocks, kind, before))))
    steps = chain(before, *(cost.steps_of(kind) for _, cost, *_ in blocks))
    communicates = any(step.collective is not None for step in steps)
    first, last = (blocks[0][0], blocks[-1][0]) if blocks else ("empty stage", None)
    return Part(first, work, None, last, ends_loss=False, lead=0, rest=0, communicates=communicates)


def _items(blocks: list[_Block], kind: ActionKind, before: tuple[Step, ...]) -> list[_Item]:
    """Return every segment of a pass in order."""
    items = [_Item(step, None, (), (), None) for step in before]
    for block in blocks:
        items += _block(*block, kind)
    return items or [_Item(Step(_TASK_KIND[kind], 0, "empty stage", 0), None, (), (), None)]


known_parts = lru_cache(maxsize=1024)(cut_pass)
"""The same, kept: plans that differ elsewhere share their passes."""


def _block(name: str, cost: BlockCost, besides: Changes, copy: int, kind: ActionKind) -> Iterator[_Item]:
    """Yield the segments of a block, with what each takes and gives back."""
    memory, steps = cost.memory, cost.steps_of(kind)
    taken, given = memory.changes(kind)
    working, of_loss, unmade = memory.working(kind), memory.of_loss(kind), min(taken, 0)
    begins = _changes(taken - unmade, working, unmade) + besides.acquired
    ends = _changes(given - unmade, working - of_loss, unmade) + besides.released
    reading = cost.first_reading(kind)
    for index, step in enumerate(steps):
        acquired = (begins if index == 0 else ()) + (besides.gathered if index == reading else ())
        ends_loss, last = index == reading - 1, index == len(steps) - 1
        released = (_changes(0, of_loss, 0) if ends_loss else ()) + (ends if last else ())
        yield _Item(step, name, acquired, released, name if last and not copy else None, ends_loss)
    if copy:
        step = Step(_TASK_KIND[kind], copy, "copy of gradients")
        copied = (Change(Category.BUFFERS, besides.copied),)
        yield _Item(step, name, copied, copied + besides.left, name, copies=True)


def _changes(activations: int, buffers: int, gradients: int) -> tuple[Change, ...]:
    """Return changes of memory, without those of no bytes.

    ``gradients``, below 0, are gradients that count already but are made later.
    """
    sizes = ((Category.ACTIVATIONS, activations), (Category.BUFFERS, buffers), (Category.GRADIENTS, gradients))
    return tuple(Change(category, size) for category, size in sizes if size)


def _chains(items: list[_Item], cut: Cut) -> Iterator[list[_Item]]:
    """Yield the items of each part."""
    found: list[_Item] = []
    meets = False  # whether the next step meets one beside it
    for item in items:
        joint = item.step.collective is not None and (cut.collectives or cut.every)
        if found and (cut.every or joint or item.copies):
            yield found
            found = []
        found.append(item)
        if joint or meets or item.completes in cut.blocks or (cut.losses and item.ends_loss):
            yield found
            found = []
        meets = joint and item.step.beside
    if found:
        yield found


def _part(items: list[_Item], index: int, kind: ActionKind, launch: float) -> Part:
    """Return one part of consecutive items."""
    joint = len(items) == 1 and items[0].step.collective is not None
    ticks = items[0].step.ticks if joint else chain_ticks(item.step for item in items)
    work = Work(
        items[0].step.kind if joint else _TASK_KIND[kind], index, ticks, Deferred(lambda: _pieces(items, launch))
    )
    lead, rest = _launching(items, launch) if launch else (0, 0)
    communicates = any(item.step.collective is not None for item in items)
    step, last = items[0].step if joint else None, items[-1]
    return Part(items[0].label, work, step, last.completes, last.ends_loss, lead, rest, communicates)


def _pieces(items: list[_Item], launch: float = 0.0) -> list[Piece]:
    """Return the pieces of a chain, from its start on."""
    pieces, start, end, launched = [], 0, 0, 0
    for item in items:
        step = item.step
        launched += to_ticks(launch * step.launches)
        stream = StreamKind.COMPUTE if step.collective is None else _stream(step)
        moved = step.size if step.collective is not None else 0.0
        changes = item.acquired, item.released
        waits = launched if step.launches else 0  # a kernel that is launched with an earlier one waits for none itself
        pieces.append(Piece(step.kind, item.label, start, start + step.ticks, stream, *changes, moved, waits))
        end = max(end, start + step.ticks)
        start = start if step.beside else end
    return pieces


def _stream(collective: Step) -> StreamKind:
    """Return the stream of a collective inside a pass: one that overlaps compute has its own."""
    return StreamKind.CONTEXT if collective.beside else StreamKind.TENSOR


def _launching(items: list[_Item], launch: float) -> tuple[int, int]:
    """Return the ticks of launching before a chain can run without a stop, and those after that.

    With launches l_i, and e_i ticks from the start of kernel i to the end of the chain, the chain ends at
    max(t + e_1, h + max_i(l_1 + .. + l_i + e_i)) where it is reached at time t and its first launch begins at
    time h: as if it could begin at h + lead with lead = max_i(l_1 + .. + l_i + e_i) - e_1.
    """
    launched = done = lead = 0
    together: list[tuple[int, int]] = []  # kernels that start at once: when each is launched, and its ticks
    for item in items:
        launched += to_ticks(launch * item.step.launches)
        together.append((launched if item.step.launches else 0, item.step.ticks))
        if not item.step.beside or item is items[-1]:
            done += max(ticks for _, ticks in together)
            lead = max(lead, *(at + ticks - done for at, ticks in together))
            together = []
    return lead, launched - lead


_TASK_KIND = {
    ActionKind.FORWARD: TaskKind.FORWARD,
    ActionKind.BACKWARD: TaskKind.BACKWARD,
    ActionKind.INPUT: TaskKind.BACKWARD,
    ActionKind.WEIGHT: TaskKind.WEIGHT_GRADIENT,
}
"""Kind of the tasks of a pass, by kind of action."""


_Group = tuple[str, int]
"""A group class, by kind and index."""


class Passes(StrEnum):
    """How a pass of a stage runs.

    ``rank``: each rank class runs it alone; nothing can disturb the collectives inside. ``group``: the ranks of a
    group, of several classes that compute alike, run it together: early ones are shown to wait before the pass, not in
    its first collective. ``apart``: collectives are tasks of their own.
    """

    RANK = "rank"
    GROUP = "group"
    APART = "apart"


def passes(
    machine: Machine,
    plan: Plan,
    in_buckets: bool,
    tied: Sequence[tuple[int, int, int]],
    replicated: Sequence[str],
    drifts: Callable[[int], bool],
) -> tuple[Passes, ...]:
    """Return, for every pipeline position, how its passes run.

    Ranks of one tensor group that compute alike stay together, because their first collective makes them wait for the
    last: the group ends a pass when that one would, were it alone. Where ``can_drift`` of a position is true they need
    not wait for one another, because every collective may end before the work that it overlaps. Along
    ``replicated_axes`` gradients are summed.
    """
    table = machine.table
    result = [Passes.RANK] * plan.pipeline
    inside = [kind for kind in INSIDE if kind in table.tables]
    # Two passes take turns at collectives, which must be tasks for that.
    if inside and plan.overlaps_passes:
        return (Passes.APART,) * plan.pipeline
    disturbed = _disturbed(machine, inside, plan, _others(machine, plan, in_buckets, tied, replicated))
    for kind in inside:
        for index, members in enumerate(table.tables[kind].classes):
            position = table.positions[members[0]]
            if (kind, index) in disturbed or len({machine.rank(member).key for member in members}) > 1:
                result[position] = Passes.APART
            elif len(members) > 1 and result[position] is not Passes.APART:
                together = inside == [TENSOR] and not drifts(position)
                result[position] = Passes.GROUP if together else Passes.APART
    return tuple(result)


def _disturbed(
    machine: Machine, inside: Sequence[str], plan: Plan, beside: Iterable[tuple[str, Collective, bool]]
) -> frozenset[_Group]:
    """Return the group classes on whose links other groups, as `_list_others` yields them, may move bytes meanwhile.

    Two groups with a common member take turns, because a rank runs one collective after another.
    """
    runs = [(kind, INSIDE[kind][0]) for kind in inside]
    runs += [each for each in machine.table.placed.exchanges.items() if each[0] in inside]
    own, others = _users(machine, runs), dict[int, list[_Group]]()
    busy = np.zeros(len(machine.table.first_link), dtype=bool)
    for kind, collective, after in beside:
        if after:
            for link, found in _users(machine, [(kind, collective)], own).items():
                others.setdefault(link, []).extend(found)
        else:
            busy[machine.table.users(kind, collective)[1]] = True
    result: set[_Group] = set()
    for link, groups in own.items():
        met = [*groups, *others.get(link, ())]
        if busy[link]:
            result.update(groups)
        elif len(met) > 1:
            result.update(group for group in groups if any(not _take_turns(machine, group, each) for each in met))
    return frozenset(result)


def _users(
    machine: Machine, runs: Iterable[tuple[str, Collective]], on: Container[int] | None = None
) -> dict[int, list[_Group]]:
    """Return, for every link class, the group classes that use it, as (kind, index)."""
    result: dict[int, list[_Group]] = {}
    for kind, collective in runs:
        index, links = machine.table.users(kind, collective)
        for group, link in zip(index.tolist(), links.tolist(), strict=True):
            if on is None or link in on:
                result.setdefault(link, []).append((kind, group))
    return result


def _take_turns(machine: Machine, first: _Group, second: _Group) -> bool:
    """Return whether two groups have a common member."""
    tables = machine.table.tables
    return not set(tables[first[0]].classes[first[1]]).isdisjoint(tables[second[0]].classes[second[1]])


def _others(
    machine: Machine, plan: Plan, in_buckets: bool, tied: Sequence[tuple[int, int, int]], replicated: Sequence[str]
) -> Iterator[tuple[str, Collective, bool]]:
    """Yield other kinds of groups, their collectives, and whether these wait until their members' passes end."""
    hops = (hop_kind(*pair) for pair in plan.hops)
    kinds = [(kind, Collective.SEND, False) for kind in (FORWARD, BACKWARD, *hops)]
    kinds += [(tenant_kind(n), tenant.collective, False) for n, tenant in enumerate(machine.table.cluster.tenants)]
    kinds += [(kind, reduction(plan), not in_buckets) for kind in (DATA, EXPERT_DATA)]
    kinds += [(REPLICA, Collective.ALL_REDUCE, not in_buckets)]
    kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero >= 3]
    kinds += [(kind, Collective.SEND, False) for kind in (TO_HOST, FROM_HOST) if plan.offload.in_passes]
    if plan.asynchronous:  # weights are updated beneath the passes of others, or their own
        kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero]
        kinds += [(kind, Collective.SEND, False) for kind in HOST_KINDS if plan.offload]
        kinds += [(axis, Collective.ALL_REDUCE, False) for axis in replicated]
    kinds += [(tied_kind(first, second), Collective.ALL_REDUCE, not plan.asynchronous) for first, second, _ in tied]
    return (each for each in kinds if each[0] in machine.table.tables)


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
        self.overlaps = overlaps(self.cluster, plan)
        self.in_buckets = reduces_in_buckets(self.cluster, plan) or any(plan.offload.parameters)
        self.sharing = sharing(self.cluster, self.training, plan)
        self.tied = costs.tied(plan)
        self.plan_costs = costs.of(plan)
        self._parts: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._parts_of: dict[tuple[int, int, int], tuple[Part, ...]] = {}
        self._buckets: dict[int, tuple[Bucket, ...]] = {}

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.plan.positions

    @cached_property
    def on_host(self) -> tuple[OnHost, ...]:
        """What the ranks of every position keep on their hosts."""
        return on_host(self.costs, self.plan)

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """For every position, how its passes run; a collective that a host waits for is a task of its own."""
        if self.training.conventions.waits_for_collectives and self.machine.launches:
            return (Passes.APART,) * self.plan.pipeline
        every = zip(*(each.replicated for each in self.plan_costs.held.positions), strict=True)
        replicated = [axis for axis, parts in zip(OPERATOR_AXES, every, strict=True) if any(parts)]
        return passes(self.machine, self.plan, self.in_buckets, self.tied, replicated, self._drifts)

    def _drifts(self, position: int) -> bool:
        """Return whether some block at a position has a pass whose collectives all overlap other work.

        A pass without collectives starts no drift: its ranks take the same time, alone or together.
        """
        stages = [cost for cost, at in zip(self.plan_costs.stages, self.positions, strict=True) if at == position]
        blocks = {id(block): block for stage in stages for block in stage.blocks}.values()
        kinds = (FORWARD_PASS, *((INPUTS, WEIGHTS) if self.plan.splits_backward else (BACKWARD_PASS,)))
        passes_of_blocks = (block.steps_of(kind_of(kind)) for block in blocks for kind in kinds)
        collectives = ([step for step in steps if step.collective] for steps in passes_of_blocks)
        return any(steps and all(step.beside for step in steps) for steps in collectives)

    def cut(self, stage: int, variant: int) -> Cut:
        """Return where the passes of a stage are cut."""
        plan, which, shared = self.plan, variant % JOINED, self.sharing
        last, backward = which in (LAST_BACKWARD, LAST_WEIGHTS), which != FORWARD_PASS
        meets = plan.chunks > 1 or plan.splits_backward or shared.gradients
        away = self.plan_costs.stages[stage].away
        in_turns = plan.overlaps_passes and shared.gradients  # either pass computes beneath what the other reduces
        beneath = last or (backward and meets) or shared.parameters or away or plan.asynchronous or in_turns
        # Computing slows down beneath a collective of the data axis, collectives inside a pass do not.
        every = self.cluster.overlap_slowdown > 1 and (self.overlaps or in_turns) and beneath
        ends: frozenset[str] = frozenset()
        if shared.parameters or away:
            ends = frozenset(plan.stages[stage].blocks)
        elif self.in_buckets and (last or (shared.gradients and kind_of(which) in MAKES_GRADIENTS)):
            ends = frozenset(bucket.last for bucket in self.buckets(stage))
        apart = self.passes[self.positions[stage]] is Passes.APART
        return Cut(every or self.granularity is Granularity.OPERATOR, apart, ends, shared.parameters)

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Return the buckets of a stage's gradients."""
        if stage not in self._buckets:
            cost = self.plan_costs.stages[stage]
            names = self.plan.stages[stage].blocks
            self._buckets[stage] = buckets(names, cost, self.training.gradient_bytes, bucket_limit(self.plan))
        return self._buckets[stage]

    def parts(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return a pass of a stage on a rank class as parts."""
        if (stage, variant, rank_class) not in self._parts_of:
            self._parts_of[stage, variant, rank_class] = self._parts_on(stage, variant, rank_class)
        return self._parts_of[stage, variant, rank_class]

    def _parts_on(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return a pass of a stage as parts; rank classes of equal costs share it."""
        rank = self.machine.rank(rank_class)
        key = (stage, variant, rank.key)
        if key not in self._parts:
            cost = self.costs.stage(self.plan, stage, rank)
            cost = cost.beginning if variant >= FIRST else cost
            cut, held = self.cut(stage, variant), self._besides(stage, variant, cost)
            names, before = self.plan.stages[stage].blocks, self.before(stage, variant, rank)
            copies = tuple(copy_ticks(rank.accelerator, each.copied) for each in held)
            whole = StagePass(stage, kind_of(variant), names, cost, rank.launch, before, held, copies)
            self._parts[key] = known_parts(whole, cut)
        return self._parts[key]

    def _besides(self, stage: int, variant: int, cost: StageCost) -> tuple[Changes, ...]:
        """Return what the blocks of a pass take and give back of gathered parameters and whole gradients."""
        begins = self.costs.begun_elements(self.plan, stage) if variant >= FIRST else ()
        if not self.sharing.gradients:
            turned = (0,) * len(cost.blocks)
            return changes(self.sharing, self.training, variant, turned, (), kept=begins) if begins else ()
        blocks, shared, away = cost.blocks, self.plan.shards > 1, blocks_on_host(self.plan, stage)
        moving = blocks if shared else blocks[:away]
        still = (0,) * (len(blocks) - len(moving))
        elements = [*(block.parameters for block in moving), *still]
        experts = [*(block.experts for block in moving), *still]
        filled = fillings(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(self.plan))
        shards = [updated_parameters(self.plan, block.parameters, block.experts) for block in blocks[:away]]
        shards = [*shards, *(0,) * (len(blocks) - away)] if shared and away else []
        undeferred = [*(block.undeferred for block in moving), *still]
        units = [*(block.unit for block in moving), *(Unit() for _ in still)]
        turn = 1 if kind_of(variant) is ActionKind.FORWARD else -1
        # Buckets fill in the order of backward, the last block first.
        sizes = [unit.size for unit in units]
        of_pass = sizes[::turn], at_once(filled, units[::-1]), shards[::turn], undeferred[::-1], begins
        return changes(self.sharing, self.training, variant, *of_pass)

    def before(self, stage: int, variant: int, rank: Rank) -> tuple[Step, ...]:
        """Return the gather of the slices that arrive from another stage, if there is one."""
        tensor = rank.groups.get(TENSOR)
        arrives = stage - 1 if kind_of(variant) is ActionKind.FORWARD else stage
        if kind_of(variant) is ActionKind.WEIGHT:
            return ()
        if not 0 <= arrives < len(self.plan.stages) - 1 or tensor is None or not self.plan.slices_boundaries:
            return ()
        if self.positions[arrives] == self.positions[arrives + 1]:
            return ()
        size = float(self.costs.boundary_bytes(self.costs.seen(self.plan, rank.batch), arrives))
        return (communication(tensor, TENSOR, Collective.ALL_GATHER, size, f"boundary along {TENSOR}"),)
