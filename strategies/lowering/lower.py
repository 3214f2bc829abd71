"""The whole lowering: how passes are cut, the skeleton of the schedule, and what each task does."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from math import ceil

import numpy as np

from simulator.collection import no_collection
from simulator.collective_kinds import Collective
from simulator.interconnect.interconnect import interconnect
from simulator.program import Category, Change, Flow, HostClass, LinkClass, MemoryChange, Piece, Program, TaskKind, Work
from strategies.lowering.assemble import Content, assemble
from strategies.lowering.buffers import flat_gradients
from strategies.lowering.clipping import SQUARES, norm_ticks
from strategies.lowering.communicator import Communicator, Leg
from strategies.lowering.contention import Passes, passes
from strategies.lowering.data import (
    SHARED,
    Bucket,
    bucket_limit,
    buckets,
    fillings,
    overlaps,
    reduces_in_buckets,
    reduction,
    replica_sum,
)
from strategies.lowering.fully_sharded import Changes, changes, sharing
from strategies.lowering.machine import INSIDE, Machine, Rank
from strategies.lowering.memory import resident
from strategies.lowering.offload import CHUNKS, HOST, STEPS, HostStep, host_bytes, host_ticks, offloads_optimizer
from strategies.lowering.optimizer import optimizer_ticks, updated_parameters
from strategies.lowering.parameters import Parameters
from strategies.lowering.pieces import Cut, Granularity, Part, known_parts
from strategies.lowering.pipeline import boundary_part, slices
from strategies.lowering.placed import NORM, tied_kind
from strategies.lowering.skeleton import Leaving, PartShape, Slot, StageShape, StepShape, UnitShape, skeleton
from strategies.lowering.stage import StageCost, StageCosts
from strategies.lowering.step import Step, communication
from strategies.lowering.tenants import background
from strategies.lowering.variant import (
    BACKWARD_PASS,
    FORWARD_PASS,
    JOINED,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    SPLIT,
    WHOLE,
    kind_of,
    variant_of,
)
from strategies.mesh import EXPERT_DATA, REPLICA, TENSOR
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.schedule import ActionKind


def lower(
    problem: Problem,
    plan: Plan,
    granularity: str = Granularity.CHAIN,
    *,
    costs: StageCosts | None = None,
    folded: bool = True,
) -> Program:
    """Return the program of one training step under ``plan``.

    Parameters
    ----------
    granularity
        What becomes one task: every ``operator``, or a ``chain`` of them that nothing can disturb.
        Both take the same ticks, and the pieces of a chain show its operators.
    costs
        Block and stage costs already known for the problem.
    folded
        Whether equal ranks are simulated once; ``False`` simulates every rank.

    Raises
    ------
    ValueError
        Where the schedule's orders cannot finish.
    """
    costs = costs or StageCosts(problem)
    with no_collection():
        return Lowering(costs, plan, costs.machine(plan, folded=folded), Granularity(granularity)).program()


class Lowering:
    """One plan on its way to a program."""

    def __init__(self, costs: StageCosts, plan: Plan, machine: Machine, granularity: Granularity) -> None:
        self.costs, self.problem, self.plan = costs, costs.problem, plan
        self.machine, self.table, self.granularity = machine, machine.table, granularity
        self.cluster, self.training = costs.problem.cluster, costs.problem.training
        self.plan_costs = costs.of(plan)
        self.overlaps = overlaps(self.cluster, plan)
        self.in_buckets = reduces_in_buckets(self.cluster, plan)
        self.sharing = sharing(self.cluster, plan)
        self.tied = costs.tied(plan)
        self._parts: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._buckets: dict[int, tuple[Bucket, ...]] = {}
        self._boundaries: dict[int, tuple[Collective, float]] = {}
        self._work: dict[tuple[object, ...], Work] = {}

    def program(self) -> Program:
        """Return the program."""
        columns = assemble(skeleton(self.shape), self.table, self.content)
        flows = background(self.table)
        return Program(
            rank_classes=self.table.rank_classes(self.plan.positions),
            streams=columns.frame.streams,
            work=columns.work,
            flows=columns.flows,
            work_of=columns.work_of,
            flow_of=columns.flow_of,
            microbatch_of=columns.frame.microbatch_of,
            stream_start=columns.frame.stream_start,
            stream_of=columns.frame.stream_of,
            predecessor_start=columns.frame.predecessor_start,
            predecessor_of=columns.frame.predecessor_of,
            resident=self._resident(),
            capacity=tuple(self.machine.rank(index).accelerator.memory for index in range(len(self.table))),
            links=self._links(),
            traffic=self._traffic(),
            hosts=self._hosts() if offloads_optimizer(self.plan) else (),
            background=flows,
            slowdown=self.cluster.overlap_slowdown,
        )

    # how passes are cut

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """For every position, how its passes run."""
        return passes(self.machine, self.plan, self.in_buckets, self.tied)

    def cut(self, stage: int, variant: int) -> Cut:
        """Return where the passes of a stage are cut."""
        plan, which, shared = self.plan, variant % JOINED, self.sharing
        last, backward = which in (LAST_BACKWARD, LAST_WEIGHTS), which != FORWARD_PASS
        meets = plan.chunks > 1 or plan.splits_backward or shared.gradients
        beneath = last or (backward and meets) or shared.parameters
        every = self.cluster.overlap_slowdown > 1 and self.overlaps and beneath
        ends: frozenset[str] = frozenset()
        if shared.parameters:
            ends = frozenset(plan.stages[stage].blocks)
        elif self.in_buckets and (last or (backward and shared.gradients)):
            ends = frozenset(bucket.last for bucket in self.buckets(stage))
        apart = self.passes[self.positions[stage]] is Passes.APART
        return Cut(every or self.granularity is Granularity.OPERATOR, apart, ends)

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Return the buckets of a stage's gradients."""
        if stage not in self._buckets:
            cost = self.plan_costs.stages[stage]
            names = self.plan.stages[stage].blocks
            self._buckets[stage] = buckets(names, cost, self.training.gradient_bytes, bucket_limit(self.plan))
        return self._buckets[stage]

    def parts(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return a pass of a stage on a rank class in parts."""
        rank = self.machine.rank(rank_class)
        key = (stage, variant, rank.key)
        if key not in self._parts:
            cost = self.costs.stage(self.plan, stage, rank)
            cut, held = self.cut(stage, variant), self._besides(stage, variant, cost)
            names, before = self.plan.stages[stage].blocks, self._before(stage, variant, rank.groups.get(TENSOR))
            self._parts[key] = known_parts(names, cost, stage, kind_of(variant), cut, rank.launch, before, held)
        return self._parts[key]

    def _besides(self, stage: int, variant: int, cost: StageCost) -> tuple[Changes, ...]:
        """Return what the blocks of a pass take and give back of gathered parameters and whole gradients."""
        if not self.sharing.gradients:
            return ()
        elements, experts = [block.parameters for block in cost.blocks], [block.experts for block in cost.blocks]
        filled = fillings(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(self.plan))
        turn = 1 if kind_of(variant) is ActionKind.FORWARD else -1
        return changes(self.sharing, self.training, variant, elements[::turn], filled)

    def _before(self, stage: int, variant: int, tensor: Communicator | None) -> tuple[Step, ...]:
        """Return the gather of the slices that arrive from another stage, if there is one."""
        arrives = stage - 1 if kind_of(variant) is ActionKind.FORWARD else stage
        if kind_of(variant) is ActionKind.WEIGHT:
            return ()
        if not 0 <= arrives < len(self.plan.stages) - 1 or tensor is None or not slices(self.plan):
            return ()
        if self.positions[arrives] == self.positions[arrives + 1]:
            return ()
        size = float(self.costs.boundary_bytes(self.plan, arrives))
        return (communication(tensor, TENSOR, Collective.ALL_GATHER, size, f"boundary along {TENSOR}"),)

    # the shape of the step

    @cached_property
    def shape(self) -> StepShape:
        """What the skeleton depends on."""
        plan = self.plan
        positions = range(plan.pipeline)
        late = plan.replicas > 1 and not self.in_buckets
        return StepShape(
            schedule=plan.schedule_name,
            ranks=plan.pipeline,
            microbatches=plan.num_microbatches,
            chunks=plan.chunks,
            stages=tuple(self._stage_shape(stage) for stage in range(len(plan.stages))),
            reductions=tuple(self._ending(p, self._all_gradients) if late else () for p in positions),
            gathers=tuple(self._ending(p, self._updated) if plan.zero in (1, 2) else () for p in positions),
            host_chunks=CHUNKS if offloads_optimizer(plan) else 0,
            tied=tuple((a, b, self._legs(tied_kind(a, b), a, self._tied_sum(n))) for a, b, n in self.tied),
            replicas=tuple(self._late_replicas(p) if late else () for p in positions),
            sharing=self.sharing,
            norm=self._norm_legs(),
        )

    def _norm_legs(self) -> int | None:
        """Return the phases of the sum of the norm of gradients; ``None`` where they are not clipped."""
        if not self.training.gradient_clipping:
            return None
        return self._legs(NORM, 0, SQUARES) if NORM in self.table.tables else 0

    def _stage_shape(self, stage: int) -> StageShape:
        first = self.table.by_position[self.positions[stage]][0]
        used = WHOLE + SPLIT if self.plan.splits_backward else WHOLE
        variants = [self.parts(stage, variant, first) for variant in used]
        shapes = [tuple(self._part_shape(stage, part) for part in variant) for variant in variants]
        final = variants[self.last_gradients[stage]]
        leaving: list[Leaving] = []
        if self.in_buckets:
            ends = {part.completes: index for index, part in enumerate(final)}
            for number, bucket in enumerate(self.buckets(stage)):
                legs = self._legs(bucket.kind, self.positions[stage], self._gradients(stage, number))
                over = self._replica_legs(bucket.kind, self.positions[stage], bucket.parameters)
                leaving.append(Leaving(ends[bucket.last], bucket.kind, legs, over))
        forward, backward, last, *split = shapes
        units = tuple(self._units(stage, variants[which]) for which in (FORWARD_PASS, LAST_BACKWARD))
        return StageShape(forward, backward, last, tuple(leaving), tuple(split), *units)

    def _units(self, stage: int, parts: tuple[Part, ...]) -> tuple[UnitShape, ...]:
        """Return the units whose parameters are gathered, in the order of a pass; none where none are."""
        if not self.sharing.parameters:
            return ()
        number = {name: index for index, name in enumerate(self.plan.stages[stage].blocks)}
        ends = [(index, number[part.completes]) for index, part in enumerate(parts) if part.completes is not None]
        starts = [0, *(index + 1 for index, _ in ends)]
        return tuple(
            UnitShape(start, end, block, self._gathers(stage, block))
            for start, (end, block) in zip(starts, ends, strict=False)
        )

    def _gathers(self, stage: int, block: int) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that gather a unit, and the phases of each."""
        found = ((kind, self._legs(kind, self.positions[stage], self._unit(kind, stage, block))) for kind in SHARED)
        return tuple((kind, legs) for kind, legs in found if legs)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.plan.positions

    @cached_property
    def last_gradients(self) -> tuple[int, ...]:
        """For every stage the variant of the pass that makes its last gradients."""
        if not self.plan.splits_backward:
            return (LAST_BACKWARD,) * len(self.plan.stages)
        return tuple(variant_of(action, final=True) for action in self.plan.schedule.last_gradients)

    def _part_shape(self, stage: int, part: Part) -> PartShape:
        step, legs = part.collective, 0
        if step is not None and step.collective is not None:
            legs = self._legs(step.axis, self.positions[stage], (step.collective, step.size)) or 1
        together = self.passes[self.positions[stage]] is Passes.GROUP and part.communicates and not legs
        along = step.axis if step is not None else TENSOR
        return PartShape(legs, part.communicates, together, part.lead > 0, along, part.beside)

    def _ending(
        self, position: int, what: Callable[[str, int], tuple[Collective, float]]
    ) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that run a collective at the end of the step, and its phases."""
        found = ((kind, self._legs(kind, position, what(kind, position))) for kind in SHARED)
        return tuple((kind, legs) for kind, legs in found if legs)

    def _late_replicas(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the numbers of the kinds of shares that are summed over replicas at the end, and the phases."""
        found = (self._replica_legs(kind, position, self._shared(kind, position)) for kind in SHARED)
        return tuple((number, legs) for number, legs in enumerate(found) if legs)

    def _replica_legs(self, kind: str, position: int, elements: int) -> int:
        """Return the phases of the sum over replicas of a rank's share of so many gradients."""
        return self._legs(REPLICA, position, self._replica_sum(kind, elements))

    def _legs(self, kind: str, position: int, what: tuple[Collective, float]) -> int:
        """Return the most phases that a communication has on the groups at a position."""
        groups = self.table.groups_at(kind, position) if kind in self.table.tables else ()
        return max((len(self.machine.communicator(kind, group).legs(*what)) for group in groups), default=0)

    # what communications move

    def _gradients(self, stage: int, bucket: int) -> tuple[Collective, float]:
        return reduction(self.plan), float(self.buckets(stage)[bucket].parameters * self.training.gradient_bytes)

    def _all_gradients(self, kind: str, position: int) -> tuple[Collective, float]:
        return reduction(self.plan), float(self._shared(kind, position) * self.training.gradient_bytes)

    def _updated(self, kind: str, position: int) -> tuple[Collective, float]:
        return Collective.ALL_GATHER, float(self._shared(kind, position) * self.training.parameter_bytes)

    def _replica_sum(self, kind: str, elements: int) -> tuple[Collective, float]:
        return replica_sum(self.training, self.plan, kind, elements)

    def _unit(self, kind: str, stage: int, block: int) -> tuple[Collective, float]:
        cost = self.plan_costs.stages[stage].blocks[block]
        elements = cost.experts if kind == EXPERT_DATA else cost.parameters - cost.experts
        return Collective.ALL_GATHER, float(elements * self.training.parameter_bytes)

    def _boundary(self, stage: int) -> tuple[Collective, float]:
        if stage not in self._boundaries:
            size = boundary_part(self.plan, self.costs.boundary_bytes(self.plan, stage))
            self._boundaries[stage] = Collective.SEND, size
        return self._boundaries[stage]

    def _tied_sum(self, elements: int) -> tuple[Collective, float]:
        share = ceil(elements / self.plan.shards) if self.sharing.gradients else elements
        return Collective.ALL_REDUCE, float(share * self.training.gradient_bytes)

    def _shared(self, kind: str, position: int) -> int:
        """Return the parameters of a position that the groups of a kind share."""
        held = self._held(position)
        return held.experts if kind == EXPERT_DATA else held.elements - held.experts

    def _held(self, position: int) -> Parameters:
        """Return the parameters on a rank of a position."""
        return self.plan_costs.held.positions[position]

    # what tasks do

    def content(self, slot: Slot, instance: int) -> Content:
        """Return what the task of a slot does on a rank class or a group class."""
        position, key = slot.site.position, slot.key
        if slot.what in ("pass", "lead", "rest"):
            together = slot.site.kind == TENSOR
            rank_class = self.table.tables[TENSOR].classes[instance][0] if together else instance
            return Content(self._own(slot.what, key, rank_class))
        if slot.what == "optimizer":
            return Content(self._optimizer(position, instance))
        if slot.what == "squares":
            return Content(self._squares(position, instance))
        if slot.what == "host":
            return self._host(STEPS[key[0]], position, instance)
        if slot.what == "collective":
            return self._collective(slot.site.kind, key, instance)
        if slot.what == "send":
            stage, backward = key
            name = "gradients" if backward else "activations"
            communicator = self.machine.communicator(slot.site.kind, instance)
            kind, what = TaskKind.PIPELINE_COMMUNICATION, self._boundary(stage - backward)
            return self._communication(communicator, kind, stage, 0, what, name)
        communicator = self.machine.communicator(slot.site.kind, instance)
        stage, leg, what, name = self._at_the_end(slot)
        return self._communication(communicator, TaskKind.DATA_COMMUNICATION, stage, leg, what, name)

    def _at_the_end(self, slot: Slot) -> tuple[int, int, tuple[Collective, float], str]:
        """Return stage, phase, collective and name of a communication of gradients or parameters."""
        position, key = slot.site.position, slot.key
        if slot.what == "unshard":
            name = self.plan.stages[key[0]].blocks[key[1]]
            what = "experts" if slot.site.kind == EXPERT_DATA else "parameters"
            return key[0], key[2], self._unit(slot.site.kind, key[0], key[1]), f"{what} of {name}"
        over_replicas = slot.site.kind == REPLICA
        if slot.what == "reduce" and key[0] >= 0:
            bucket = self.buckets(key[0])[key[1]]
            sums = self._replica_sum(bucket.kind, bucket.parameters) if over_replicas else self._gradients(*key[:2])
            return key[0], key[2], sums, f"gradients of {bucket.blocks[-1]} .. {bucket.blocks[0]}"
        if slot.what == "reduce" and over_replicas:
            kind = SHARED[key[1]]
            return -1, key[2], self._replica_sum(kind, self._shared(kind, position)), "gradients of all blocks"
        if slot.what == "reduce":
            return -1, key[2], self._all_gradients(slot.site.kind, position), "gradients of all blocks"
        if slot.what == "norm":
            return -1, key[0], SQUARES, "norm of gradients"
        if slot.what == "gather":
            return -1, key[0], self._updated(slot.site.kind, position), "parameters"
        return -1, key[1], self._tied_sum(self.tied[key[0]][2]), "tied gradients"

    def _own(self, what: str, key: tuple[int, ...], rank_class: int) -> Work:
        stage, variant, index = key
        part = self.parts(stage, variant, rank_class)[index]
        if what == "pass":
            return part.work
        ticks = part.lead if what == "lead" else part.rest
        name = part.work.pieces[0].operators
        return self._plain((what, key, self.machine.rank(rank_class).key), TaskKind.LAUNCH, stage, ticks, name)

    def _optimizer(self, position: int, rank_class: int) -> Work:
        rank = self.machine.rank(rank_class)
        key = ("optimizer", position, rank.key)
        if key in self._work:
            return self._work[key]
        ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, self._held(position))
        flat = flat_gradients(self.training, self.plan, self._held(position).elements)
        if flat:
            changes = (Change(Category.BUFFERS, flat),)  # the copy that was summed is read back
            piece = Piece(TaskKind.OPTIMIZER, "optimizer", 0, ticks, acquired=changes, released=changes)
            self._work[key] = Work(TaskKind.OPTIMIZER, -1, ticks, (piece,))
            return self._work[key]
        return self._plain(key, TaskKind.OPTIMIZER, -1, ticks, "optimizer")

    def _squares(self, position: int, rank_class: int) -> Work:
        rank = self.machine.rank(rank_class)
        ticks = norm_ticks(rank.accelerator, self.training, self.plan, self._held(position))
        return self._plain(("squares", position, rank.key), TaskKind.OPTIMIZER, -1, ticks, "norm of gradients")

    def _host(self, step: HostStep, position: int, group: int) -> Content:
        """Return one chunk of one stage of the host's update."""
        held = self._held(position)
        size = host_bytes(self.training, self.plan, held, step.kind)
        (leg,) = self.machine.communicator(step.kind, group).legs(Collective.SEND, size)
        ticks = leg.latency
        if step.kind == HOST and not leg.flow.usage:
            ticks = host_ticks(updated_parameters(self.plan, held.elements, held.experts))
        work = self._plain((step.kind, position, ticks), step.task, -1, ticks, step.name)
        return Content(work, leg.flow if leg.flow.usage else None)

    def _collective(self, kind: str, key: tuple[int, ...], group: int) -> Content:
        """Return one phase of a collective inside a pass; memory changes with the first and the last."""
        stage, variant, index, leg = key
        communicator = self.machine.communicator(kind, group)
        part = self.parts(stage, variant, self.table.tables[kind].classes[group][0])[index]
        step, piece = part.collective, part.work.pieces[0]
        assert step is not None and step.collective is not None
        found = self._communication(
            communicator, piece.kind, stage, leg, (step.collective, step.size), piece.operators, named=True
        )
        legs = max(len(communicator.legs(step.collective, step.size)), 1)
        acquired, released = piece.acquired if leg == 0 else (), piece.released if leg == legs - 1 else ()
        if not (acquired or released):
            return found
        name = ("memory", *key, found.work.duration)
        if name not in self._work:
            changed = found.work.pieces[0]._replace(acquired=acquired, released=released)
            self._work[name] = found.work._replace(pieces=(changed,))
        return Content(self._work[name], found.flow)

    def _communication(
        self,
        communicator: Communicator,
        kind: TaskKind,
        stage: int,
        leg: int,
        what: tuple[Collective, float],
        name: str,
        *,
        named: bool = False,
    ) -> Content:
        legs = communicator.legs(*what)
        now = legs[leg] if leg < len(legs) else Leg(0, 0, Flow(()))
        label = name if named else f"{what[0]} {name}"
        work = self._plain((kind, stage, now.latency, label), kind, stage, now.latency, label)
        return Content(work, now.flow if now.flow.usage else None)

    def _plain(self, key: tuple[object, ...], kind: TaskKind, stage: int, ticks: int, name: str) -> Work:
        """Return work of one piece, the same object for the same key."""
        if key not in self._work:
            self._work[key] = Work(kind, stage, ticks, (Piece(kind, name, 0, ticks),))
        return self._work[key]

    # what the program says besides its tasks

    def _links(self) -> tuple[LinkClass, ...]:
        names = interconnect(self.cluster).names(self.table.first_link)
        return tuple(map(LinkClass, names, self.table.bandwidth, self.table.link_count.tolist()))

    def _traffic(self) -> tuple[float, ...]:
        """Return the bytes on every link class of collectives inside parts of ranks."""
        total = [0.0] * len(self.table.first_link)
        if self.granularity is Granularity.OPERATOR:
            return tuple(total)
        hidden: dict[tuple[object, ...], dict[tuple[str, Collective, float], int]] = {}
        for kind in (kind for kind in INSIDE if kind in self.table.tables):
            for group, members in enumerate(self.table.tables[kind].classes):
                position, rank = self.table.positions[members[0]], self.machine.rank(members[0])
                if self.passes[position] is Passes.APART:
                    continue
                key = (position, rank.key)
                if key not in hidden:
                    hidden[key] = self._hidden(position, rank)
                communicator = self.machine.communicator(kind, group)
                for (axis, collective, size), count in hidden[key].items():
                    for leg in communicator.legs(collective, size) if axis == kind else ():
                        for link, moved in leg.flow.usage:
                            total[link] += moved * count
        return tuple(total)

    def _hidden(self, position: int, rank: Rank) -> dict[tuple[str, Collective, float], int]:
        """Return how often a step runs each collective inside parts of a rank."""
        found: dict[tuple[str, Collective, float], int] = {}
        for stage in self.plan.stages_at(position):
            blocks = self.costs.stage(self.plan, stage, rank).blocks
            for variant, count in self._passes_of(stage):
                if self.cut(stage, variant).every:
                    continue
                steps = (step for block in blocks for step in block.steps_of(kind_of(variant)))
                for step in (*self._before(stage, variant, rank.groups.get(TENSOR)), *steps):
                    if step.collective is not None:
                        key = (step.axis, step.collective, step.size)
                        found[key] = found.get(key, 0) + count
        return found

    def _passes_of(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Return how often a step runs each variant of a stage's passes."""
        every = self.plan.num_microbatches
        if not self.plan.splits_backward:
            return (FORWARD_PASS, every), (BACKWARD_PASS, every - 1), (LAST_BACKWARD, 1)
        order = self.plan.schedule.orders[self.positions[stage]]
        last = self.plan.schedule.last_gradients[stage]
        return tuple(Counter(variant_of(a, a == last) for a in order if a.stage == stage).items())

    def _hosts(self) -> tuple[HostClass, ...]:
        """Return the hosts of the classes' representatives, with the ranks that each holds of every class."""
        network, table = interconnect(self.cluster), self.table
        devices = table.placed.devices
        hosts = network.host_of(devices)
        found: dict[tuple[tuple[int, int], ...], HostClass] = {}
        for rank in table.first.tolist():
            classes, counts = np.unique(table.class_of[hosts == hosts[rank]], return_counts=True)
            members = tuple(zip(classes.tolist(), counts.tolist(), strict=True))
            capacity = self.cluster.node_kind(int(devices[rank])).host.memory
            found.setdefault(members, HostClass(f"host {hosts[rank]}", capacity, members))
        return tuple(found.values())

    def _resident(self) -> tuple[MemoryChange, ...]:
        changes: list[MemoryChange] = []
        known: dict[tuple[object, ...], tuple[MemoryChange, ...]] = {}
        buffers = self.costs.buffers(self.plan)
        for index, position in enumerate(self.table.positions):
            rank = self.machine.rank(index)
            key = (position, rank.key)
            if key not in known:
                known[key] = resident(
                    rank.accelerator, self.training, self.plan, self._held(position), buffers[position], 0
                )
            changes += [MemoryChange(index, *change[1:]) for change in known[key]]
        return tuple(changes)
