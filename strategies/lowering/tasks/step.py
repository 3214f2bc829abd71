"""The abstract tasks of one training step: the passes of its schedule, and what ends it.

Passes are added in the order of each rank, part by part, with what they gather, keep, reduce and send. A skeleton
depends on the schedule and on how passes are cut alone, so that one serves many plans: skeletons are cached.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray, StreamKind
from meshwise.strategies.lowering.tasks.activation_copies import ActivationOffload
from meshwise.strategies.lowering.tasks.ending import ENDING, GATHER, GRADIENT_SUMS, SQUARES, TIED_SUMS, UPDATE, Scope
from meshwise.strategies.lowering.tasks.shape import LeavingBucket, PartShape, StepShape
from meshwise.strategies.lowering.tasks.skeleton import RANK, Role, Site, Skeleton, Streams, TaskList, Waits
from meshwise.strategies.lowering.tasks.variants import FIRST_OFFSET, JOINED_OFFSET, variant_of
from meshwise.strategies.plan.mesh import BACKWARD, FORWARD, NORM, REPLICA, hop_kind, tied_kind
from meshwise.strategies.plan.offloading import FROM_HOST, HOST, HOST_STREAMS, STEPS, TO_HOST, UPDATE_CHUNKS
from meshwise.strategies.schedules.orders import list_actions, order_actions
from meshwise.strategies.schedules.rule import Placement
from meshwise.strategies.schedules.schedule import KINDS, MAKES_GRADIENTS, Action, ActionKind, build_schedule, find_rule


class _PartTemplates(NamedTuple):
    """The stream that a part occupies and its templates: launches before it, its phases, and launches after it."""

    stream: StreamKind
    launch_lead: int
    phases: tuple[int, ...]
    launch_tail: int


@dataclass(slots=True)
class Chain:
    """The end of tasks that run one after another: the last task, its stream, and another task that must end too.

    ``pending_side`` runs beside the next task, and ``side_tail`` has run beside the last one.
    """

    tail: int | None = None
    stream: StreamKind | None = None
    pending_side: int | None = None
    side_tail: int | None = None

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """The tasks that have to end."""
        return self.tail, self.side_tail


class _PassBody(NamedTuple):
    """The tasks of a pass that wait only for each other, numbered from the first, and the end of their chain."""

    templates: list[int]
    edges: IntArray
    tail: int
    side_tail: int | None
    stream: StreamKind | None


class PassBuilder(TaskList):
    """Abstract tasks of passes while they are collected.

    Attributes
    ----------
    chains
        Per position, the end of its passes.
    last_reductions, last_scatters
        Per position, its last reduction of gradients, and its last one within a group that shares states.
    host_sums, host_buckets
        Per position, the last sum on its host; the buckets whose gradients hosts have.
    last_computed
        Per position, its last task that computes.
    joined_actions
        Actions whose passes are of joined variants.
    bodies
        The tasks of a pass of each variant, and the first tasks of its repetitions.
    """

    def __init__(self, shape: StepShape) -> None:
        super().__init__()
        self.shape = shape
        self.order = build_schedule(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
        self.placement = find_rule(shape.schedule).placement
        self.first_gradients, self.last_gradients = self.order.first_gradients, self.order.last_gradients
        self.bodies: dict[tuple[int, ...], tuple[_PassBody, list[int]]] = {}
        self.chains = [Chain() for _ in range(shape.ranks)]
        self.last_reductions: list[int | None] = [None] * shape.ranks
        self.last_scatters: list[int | None] = [None] * shape.ranks
        self.arrivals: dict[Action, int] = {}
        self.joined_actions = _find_joined(shape)
        self.activation_offload = ActivationOffload(self.order)
        self.host_sums: list[int | None] = [None] * shape.ranks
        self.host_buckets: set[tuple[int, int]] = set()
        self.last_computed: list[int | None] = [None] * shape.ranks

    def add_actions(self, actions: tuple[Action, ...]) -> None:
        """Add an action, or two that overlap: they take turns at collectives, beneath which the other one computes."""
        check_deadline()
        chain = self.chains[self.order.find_rank(actions[0].stage)]
        # Both actions of a pair continue from the same end.
        chains = [chain, *(replace(chain) for _ in actions[1:])]
        is_single = len(actions) == 1
        runs = [
            self.add_action(action, action_chain, is_single=is_single)
            for action, action_chain in zip(actions, chains, strict=True)
        ]
        # Each generator pauses at its next collective, which makes the two take turns.
        for _ in zip_longest(*runs):
            pass
        for other_chain in chains[1:]:
            chain.side_tail, chain.tail, chain.stream = chain.tail, other_chain.tail, other_chain.stream

    def add_action(self, action: Action, chain: Chain, *, is_single: bool) -> Iterator[None]:
        """Add the tasks of an action, up to its next collective at a time.

        A pass that runs alone and gathers, keeps and reduces nothing is a copy of the others of its variant.
        """
        position, stage = self.order.find_rank(action.stage), self.shape.stages[action.stage]
        is_last, sharing = self.is_final(action), self.shape.sharing
        begins_gradients = sharing.begins_gradients and action == self.first_gradients[action.stage]
        variant = (
            variant_of(action, is_last)
            + JOINED_OFFSET * (action in self.joined_actions)
            + FIRST_OFFSET * begins_gradients
        )
        offloaded_blocks = stage.forward_offloads if action.kind is ActionKind.FORWARD else stage.backward_offloads
        reduces = is_last or (sharing.gradients and action.kind in MAKES_GRADIENTS)
        waits = self.list_awaited(action)
        hosts_wait = [*waits, chain.tail] if self.shape.hosts_wait else []
        if sharing.gradients:
            waits.append(self.last_reductions[position])
        # The common pass of a schedule is added once and repeated by array operations.
        if is_single and not (reduces or offloaded_blocks or sharing.parameters or self.shape.hosts_wait_inside):
            self._add_alike(chain, position, action, variant, waits, hosts_wait)
        else:
            offloaded_pass, units = (
                self.activation_offload.start_pass(action, offloaded_blocks, chain, self.add_copy),
                _UnitGathers(self, chain, action, variant),
            )
            for index, part in enumerate(stage.select_parts(variant)):
                waits += [*offloaded_pass.list_waits(index), *units.list_waits(index)]
                if sharing.copies_gradients and reduces and self._list_leaving(action, index):
                    waits.append(self.last_scatters[position])
                self._add_part(
                    chain, position, (action.stage, variant, index), part, action.microbatch, waits, hosts_wait
                )
                hosts_wait = (
                    [chain.tail] if self.shape.hosts_wait_inside and part.num_phases and not part.overlaps_next else []
                )
                waits = waits if part.overlaps_next else []  # the next one starts with it
                waits += self._reduce_buckets(chain, position, action, index) if reduces else []
                offloaded_pass.finish_part(index)
                units.finish_part(index)
                if part.num_phases and not part.overlaps_next:
                    yield
        if action.kind is not ActionKind.WEIGHT:
            self._add_send(chain, position, action)

    def _add_alike(
        self,
        chain: Chain,
        position: int,
        action: Action,
        variant: int,
        waits: list[int | None],
        hosts_wait: list[int | None],
    ) -> None:
        """Add the parts of a pass like others: only the first part waits for tasks outside it."""
        for index, part in enumerate(self.shape.stages[action.stage].select_parts(variant)):
            self._add_part(chain, position, (action.stage, variant, index), part, action.microbatch, waits, hosts_wait)
            if not part.overlaps_next:
                self._repeat_body(chain, position, action, variant, index + 1)
                return
            hosts_wait = []  # the next one starts with it

    def _repeat_body(self, chain: Chain, position: int, action: Action, variant: int, first_part: int) -> None:
        """Add the parts of a pass from ``first_part`` on, which wait only for each other."""
        key, start = (action.stage, variant), len(self.template_of)
        if key in self.bodies:
            body, starts = self.bodies[key]
            starts.append(start)
            self.append_tasks(body.templates, action.microbatch)
        else:
            body = self._build_body(chain, position, action, variant, first_part)
            self.bodies[key] = body, []
            self.repeated_edges.append((body.edges, self.bodies[key][1]))
        chain.tail, chain.side_tail, chain.stream = start + body.tail, _shift_task(body.side_tail, start), body.stream

    def _build_body(self, chain: Chain, position: int, action: Action, variant: int, first_part: int) -> _PassBody:
        """Add the parts of a pass from ``first_part`` on, and return them as a body."""
        start, num_edges = len(self.template_of), len(self.edges)
        for index, part in enumerate(self.shape.stages[action.stage].select_parts(variant)[first_part:], first_part):
            self._add_part(chain, position, (action.stage, variant, index), part, action.microbatch, [], [])
        edges = np.array(self.edges[num_edges:], dtype=np.int64).reshape(-1, 3) - (start, start, 0)
        assert chain.tail is not None
        return _PassBody(
            self.template_of[start:], edges, chain.tail - start, _shift_task(chain.side_tail, -start), chain.stream
        )

    def is_final(self, action: Action) -> bool:
        """Return whether an action makes the last gradients of its stage before an update."""
        return action == self.last_gradients[action.stage]

    def list_awaited(self, action: Action) -> list[int | None]:
        """Return the tasks that an action waits for besides earlier ones on its rank: what another rank sends."""
        if action.kind is ActionKind.WEIGHT:
            return []
        return [self.arrivals.pop(action._replace(kind=_AWAITED_KINDS[action.kind]), None)]

    def _add_part(
        self,
        chain: Chain,
        position: int,
        key: tuple[int, ...],
        part: PartShape,
        microbatch: int,
        waited_tasks: list[int | None],
        launch_waits: list[int | None],
    ) -> None:
        """Add the tasks of a part: launches, phases, and launches that run ahead."""
        templates = self._build_templates(position, key, part)
        waits = [(task, position) for task in (*waited_tasks, chain.side_tail)]
        if templates.stream is not chain.stream:  # else the stream they share keeps their order
            waits.append((chain.tail, position))
        if part.has_launch:
            launch_task = self.append_task(
                templates.launch_lead, microbatch, [(task, position) for task in launch_waits]
            )
            waits.append((launch_task, position))
        for template in templates.phases:
            number = self.append_task(template, microbatch, waits)
            waits = []
        if templates.stream is StreamKind.COMPUTE:
            self.last_computed[position] = number
        if part.has_launch:
            self.append_task(templates.launch_tail, microbatch, [])
        if part.overlaps_next:
            chain.pending_side = number
            return
        chain.side_tail, chain.pending_side = chain.pending_side, None
        chain.tail, chain.stream = number, templates.stream

    @memoise
    def _build_templates(self, position: int, key: tuple[int, ...], part: PartShape) -> _PartTemplates:
        """Return the templates of a part, in the order of its tasks."""
        kind = (
            StreamKind.COMPUTE
            if not part.num_phases
            else HOST_STREAMS.get(part.axis, StreamKind.CONTEXT if part.overlaps_next else StreamKind.TENSOR)
        )
        rank_site, launch_streams = Site(RANK, position), ((position, StreamKind.LAUNCH),)
        site = Site(part.axis, position) if part.num_phases or part.runs_as_group else rank_site
        streams = ((position, kind),)
        launch_lead = self.number_template(rank_site, Role.LEAD, key, launch_streams) if part.has_launch else -1
        if part.num_phases:
            phases = tuple(
                self.number_template(site, Role.COLLECTIVE, (*key, phase), streams) for phase in range(part.num_phases)
            )
        else:
            phases = (self.number_template(site, Role.PASS, key, streams),)
        return _PartTemplates(
            kind,
            launch_lead,
            phases,
            self.number_template(rank_site, Role.REST, key, launch_streams) if part.has_launch else -1,
        )

    def _reduce_buckets(self, chain: Chain, position: int, action: Action, part: int) -> list[int | None]:
        """Reduce the gradients that a part has completed, and return the reductions that the next part waits for."""
        sharing, earlier_scatter = self.shape.sharing, self.last_scatters[position]
        leaving_buckets = self._list_leaving(action, part)
        for bucket in leaving_buckets:
            self._reduce_bucket(chain, position, action, bucket)
        if not leaving_buckets or not sharing.gradients:
            return []
        return [earlier_scatter if sharing.num_ahead else self.last_reductions[position]]

    def _list_leaving(self, action: Action, part: int) -> list[LeavingBucket]:
        """Return the buckets that leave after a part of an action."""
        return self._group_leaving(action.stage, action.kind).get(part, [])

    @memoise
    def _group_leaving(self, stage: int, kind: ActionKind) -> dict[int, list[LeavingBucket]]:
        """Return the buckets that leave after each part of a stage's passes of a kind."""
        buckets_after: dict[int, list[LeavingBucket]] = defaultdict(list)
        for bucket in self.shape.stages[stage].buckets:
            buckets_after[bucket.leaving_part(kind)].append(bucket)
        return buckets_after

    def _reduce_bucket(self, chain: Chain, position: int, action: Action, leaving_bucket: LeavingBucket) -> None:
        """Reduce a bucket of gradients, a stage's last ones over replicas too, and copy it to the host."""
        is_last = self.is_final(action)
        microbatch = action.microbatch if self.shape.sharing.gradients else -1
        last_task = chain.tail
        for kind, stream, num_phases in (
            (leaving_bucket.kind, StreamKind.DATA, leaving_bucket.num_phases),
            (REPLICA, StreamKind.REPLICA, leaving_bucket.num_replica_phases if is_last else 0),
        ):
            for phase in range(num_phases):
                waits = [(last_task, position)] if phase == 0 else []
                key, streams = (action.stage, leaving_bucket.number, phase), ((position, stream),)
                last_task = self.add_task(Site(kind, position), Role.REDUCE, key, streams, microbatch, waits)
                self.last_reductions[position] = last_task
                if kind != REPLICA:
                    self.last_scatters[position] = last_task

        if leaving_bucket.is_copied:
            bucket_key = (action.stage, leaving_bucket.number)
            waits = [(last_task, position), (chain.side_tail, position)]
            copy = self.add_copy(TO_HOST, position, Role.GRADIENTS, bucket_key, microbatch, waits)
            self.last_reductions[position] = self.last_scatters[position] = copy
            # The host adds to the gradients of earlier microbatches; the first ones it only receives.
            if bucket_key in self.host_buckets:
                self.host_sums[position] = self.add_copy(
                    HOST, position, Role.SUM_ON_HOST, bucket_key, microbatch, [(copy, position)]
                )
            self.host_buckets.add(bucket_key)

    def add_copy(
        self,
        kind: str,
        position: int,
        role: str,
        key: tuple[int, ...],
        microbatch: int,
        waits: Waits,
    ) -> int:
        """Add a copy between a rank and its host, and return its task."""
        return self.add_task(Site(kind, position), role, key, ((position, HOST_STREAMS[kind]),), microbatch, waits)

    def _add_send(self, chain: Chain, position: int, action: Action) -> None:
        """Send the result of an action to the stage that waits for it, if that is on another rank."""
        forward = action.kind is ActionKind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if not 0 <= stage < self.order.num_stages:
            return
        target = self.order.find_rank(stage)
        if target == position:
            return
        goes_ahead = forward if self.placement is Placement.LOOP else target > position
        send_stream, receive_stream = _STREAMS[goes_ahead]
        is_hop = self.placement is Placement.WRITTEN and abs(target - position) > 1
        site = Site(hop_kind(position, target) if is_hop else FORWARD if goes_ahead else BACKWARD, position)
        streams = ((position, send_stream), (target, receive_stream))
        waits = [(chain.tail, position)]
        task = self.add_task(site, Role.SEND, (action.stage, int(not forward)), streams, action.microbatch, waits)
        self.arrivals[Action(stage, _AWAITED_KINDS[action.kind], action.microbatch)] = task


class _UnitGathers:
    """The units of one pass while its tasks are added: each is gathered ahead of its parts."""

    def __init__(self, builder: PassBuilder, chain: Chain, action: Action, variant: int) -> None:
        self.builder, self.chain, self.action = builder, chain, action
        self.position, stage = builder.order.find_rank(action.stage), builder.shape.stages[action.stage]
        self.units = stage.select_units(action.kind)
        self.is_gathered = builder.shape.sharing.list_gathered(variant, len(self.units))
        self.gather_tasks: dict[int, int] = {}
        self.num_begun = 0
        self._advance(0)

    def list_waits(self, part: int) -> list[int | None]:
        """Return what a part waits for: the gather of the unit that begins with it."""
        return [self.gather_tasks[part]] if part in self.gather_tasks else []

    def finish_part(self, part: int) -> None:
        """Gather the unit that may be gathered once a part has ended."""
        self._advance(part + 1)

    def _advance(self, part: int) -> None:
        """Gather the unit that may be gathered as a part begins: one ahead of the unit that is read from there on."""
        if self.num_begun == len(self.units) or self.units[self.num_begun].first_part != part:
            return
        next_unit = self.num_begun + self.builder.shape.sharing.num_ahead
        first_unit, compute_task = (
            (next_unit, None) if self.num_begun else (0, self.builder.last_computed[self.position])
        )
        for unit in range(first_unit, min(next_unit + 1, len(self.units))):
            self._add_gather(unit, compute_task)
        self.num_begun += 1

    def _add_gather(self, unit: int, compute_task: int | None = None) -> None:
        """Gather a unit's parameters after the rank's present work; the stream keeps gathers in order.

        The first gather of a pass waits for ``compute_task``, all that was computed before, which may belong to another
        pass that runs in turns with this one.
        """
        shape, position, builder = self.units[unit], self.position, self.builder
        last_reduction = None if builder.shape.sharing.num_ahead else builder.last_reductions[position]
        waited_tasks = [*dict.fromkeys((*self.chain.ends, compute_task, last_reduction))]
        phases = [(kind, phase) for kind, count in shape.gathers for phase in range(count)]
        for kind, phase in phases if self.is_gathered[unit] else ():
            waits, waited_tasks = [(task, position) for task in waited_tasks], []
            if kind == FROM_HOST:
                unit_key = (self.action.stage, shape.block)
                copy = builder.add_copy(kind, position, Role.PARAMETERS, unit_key, self.action.microbatch, waits)
                self.gather_tasks[shape.first_part], waited_tasks = copy, [copy]
                continue
            key, streams = (self.action.stage, shape.block, phase), ((position, StreamKind.GATHER),)
            site = Site(kind, position)
            self.gather_tasks[shape.first_part] = builder.add_task(
                site, Role.UNSHARD, key, streams, self.action.microbatch, waits
            )


def _find_joined(shape: StepShape) -> frozenset[Action]:
    """Return the actions whose passes find or leave other parameters gathered than most of their kind."""
    if not shape.sharing.parameters:
        return frozenset()
    rows = list_actions(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
    is_chosen = shape.sharing.find_special_passes(rows)
    columns = zip(*(column[is_chosen].tolist() for column in rows[:3]), strict=True)
    return frozenset(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in columns)


def _shift_task(task: int | None, offset: int) -> int | None:
    """Return the number of a task, counted from another one."""
    return None if task is None else task + offset


_STREAMS = {
    True: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    False: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
"""Streams of sender and receiver, by whether a send goes to a later position."""
_AWAITED_KINDS = {
    ActionKind.FORWARD: ActionKind.FORWARD,
    ActionKind.BACKWARD: ActionKind.BACKWARD,
    ActionKind.INPUT: ActionKind.BACKWARD,
}
"""Kind of action that the next stage waits for, by the kind that makes it."""


@lru_cache(maxsize=64)
def build_step(shape: StepShape) -> Skeleton:
    """Return the abstract tasks of one training step."""
    return StepBuilder(shape).build()


class StepBuilder(PassBuilder):
    """Abstract tasks of a step while they are collected."""

    def build(self) -> Skeleton:
        """Return the abstract tasks of the whole step."""
        self._move_rows()
        for pass_actions in order_actions(self.order):
            self.add_actions(pass_actions)
        add_at_position = {
            GRADIENT_SUMS: self._sum_gradients,
            SQUARES: self._square_gradients,
            UPDATE: self._update_parameters,
            GATHER: self._gather_parameters,
        }
        for phase in ENDING:
            if phase.scope is Scope.POSITION:
                for position in range(self.shape.ranks):
                    add_at_position[phase](position)
            elif phase is TIED_SUMS:
                self._sum_tied_gradients()
            else:
                self._sum_norm()
        return self.build_skeleton()

    def _move_rows(self) -> None:
        """Move indices and rows of tables for the microbatches before and after, beside all that the step does."""
        last_task: int | None = None
        for _ in range(self.shape.microbatches):
            for number, (kind, num_phases) in enumerate(self.shape.table_moves):
                streams = ((0, HOST_STREAMS.get(kind, StreamKind.CONTEXT)),)
                for phase in range(num_phases):
                    # rows come once their indices are there
                    waits = [(last_task, 0)] if phase or kind == FROM_HOST else []
                    last_task = self.add_task(Site(kind, 0), Role.ROWS, (number, phase), streams, -1, waits)

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of each parameter that two positions keep."""
        for number, (first_position, second_position, num_phases) in enumerate(self.shape.tied_sums):
            streams = ((first_position, StreamKind.DATA), (second_position, StreamKind.DATA))
            self._add_communication(
                Site(tied_kind(first_position, second_position), first_position),
                Role.TIED,
                (number,),
                streams,
                num_phases,
            )

    def _add_communication(
        self, site: Site, role: str, key: tuple[int, ...], streams: Streams, num_phases: int
    ) -> None:
        """Add the phases of a communication at the end of the step; streams keep them in order."""
        positions = [position for position, _ in streams]
        for phase in range(num_phases):
            waits = (
                [
                    (task, waiting_position)
                    for waiting_position in positions
                    for task in (*self.chains[waiting_position].ends, self.last_reductions[waiting_position])
                ]
                if phase == 0
                else []
            )
            number = self.add_task(site, role, (*key, phase), streams, -1, waits)
        if num_phases:
            for position in positions:
                self.last_reductions[position] = number

    def _sum_gradients(self, position: int) -> None:
        """Reduce the gradients of a position that passes have not reduced, then those of replicated parameters."""
        data_streams = ((position, StreamKind.DATA),)
        for kind, num_phases in self.shape.reductions[position]:
            self._add_communication(Site(kind, position), Role.REDUCE, (-1, 0), data_streams, num_phases)
        for number, num_phases in self.shape.replica_sums[position]:
            replica_streams = ((position, StreamKind.REPLICA),)
            self._add_communication(Site(REPLICA, position), Role.REDUCE, (-1, number), replica_streams, num_phases)
        for axis, num_phases in self.shape.replicated_sums[position]:
            self._add_communication(Site(axis, position), Role.REPLICATED, (), data_streams, num_phases)

    def _gather_parameters(self, position: int) -> None:
        """Gather the parameters of a position that its optimizer has updated as shards."""
        for kind, num_phases in self.shape.gathers[position]:
            self._add_communication(Site(kind, position), Role.GATHER, (), ((position, StreamKind.DATA),), num_phases)

    def _square_gradients(self, position: int) -> None:
        """Read the gradients of a position for their norm, where they are clipped."""
        if self.shape.norm_phases is None:
            return
        chain, compute_streams = self.chains[position], ((position, StreamKind.COMPUTE),)
        waits = [(task, position) for task in (self.last_reductions[position], *chain.ends)]
        chain.tail, chain.side_tail = (
            self.add_task(Site(RANK, position), Role.SQUARES, (), compute_streams, -1, waits),
            None,
        )
        if self.shape.updates[position].has_host_gradients:
            waits.append((self.host_sums[position], position))
            chain.side_tail = self.add_copy(HOST, position, Role.SQUARES_ON_HOST, (), -1, waits)

    def _sum_norm(self) -> None:
        """Sum the norm of gradients over the ranks of all positions, where they are clipped."""
        streams = tuple((position, StreamKind.DATA) for position in range(self.shape.ranks))
        self._add_communication(Site(NORM, 0), Role.NORM, (), streams, self.shape.norm_phases or 0)

    def _update_parameters(self, position: int) -> None:
        """Update the parameters: those with states on the device at once, the others chunk by chunk."""
        chain, update = self.chains[position], self.shape.updates[position]
        waits = [(task, position) for task in (self.last_reductions[position], self.host_sums[position], *chain.ends)]
        if update.has_device_states:
            streams = ((position, StreamKind.COMPUTE),)
            chain.tail = self.add_task(Site(RANK, position), Role.OPTIMIZER, (), streams, -1, waits)
            chain.side_tail = None
        chunk_ends: list[int] = []
        for chunk in range(UPDATE_CHUNKS if update.steps else 0):
            chunk_waits = waits if chunk == 0 else []
            if update.streams_states and chunk > 1:  # both buffers are in use until then
                chunk_waits = [(chunk_ends[chunk - 2], position)]
            for number in update.steps:
                update_step, end = STEPS[number], ((chunk == UPDATE_CHUNKS - 1) - (chunk == 0)) * update.streams_states
                streams, site = ((position, update_step.stream),), Site(update_step.kind or RANK, position)
                task = self.add_task(site, Role.UPDATE, (number, end), streams, -1, chunk_waits)
                chunk_waits = [(task, position)]
            chunk_ends.append(task)
        if chunk_ends:
            chain.side_tail, chain.tail = chain.tail if update.has_device_states else None, chunk_ends[-1]
