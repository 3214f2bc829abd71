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
from meshwise.simulator.program import IntArray, StreamKind
from meshwise.strategies.lowering.costs.offload import GRADIENTS, PARAMETERS, SQUARES_ON_HOST, SUM
from meshwise.strategies.lowering.rank_classes.placement import BACKWARD, FORWARD, NORM, hop_kind, tied_kind
from meshwise.strategies.lowering.tasks.activation_copies import Activations
from meshwise.strategies.lowering.tasks.shape import Leaving, PartShape, StepShape
from meshwise.strategies.lowering.tasks.skeleton import RANK, Site, Skeleton, Streams, TaskList, Waits
from meshwise.strategies.lowering.tasks.variants import FIRST, JOINED, variant_of
from meshwise.strategies.plan.mesh import REPLICA
from meshwise.strategies.plan.offloading import CHUNKS, FROM_HOST, HOST, STEPS, TO_HOST
from meshwise.strategies.schedules.orders import actions, in_order
from meshwise.strategies.schedules.rule import Placement
from meshwise.strategies.schedules.schedule import KINDS, MAKES_GRADIENTS, Action, ActionKind, rule_of, schedule


class _PartSlots(NamedTuple):
    """The stream that a part occupies and its templates: launches before it, its phases, and launches after it."""

    stream: StreamKind
    lead: int
    legs: tuple[int, ...]
    rest: int


@dataclass(slots=True)
class Chain:
    """The end of tasks that run one after another: the last task, its stream, and another task that must end too.

    ``pending_side`` runs beside the next task, and ``side_tail`` has run beside the last one.
    """

    tail: int | None = None
    stream: StreamKind | None = None
    beside: int | None = None
    joined: int | None = None

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """The tasks that have to end."""
        return self.tail, self.joined


class _Body(NamedTuple):
    """The tasks of a pass that wait only for each other, numbered from the first, and the end of their chain."""

    slots: list[int]
    edges: IntArray
    tail: int
    joined: int | None
    stream: StreamKind | None


class Passes(TaskList):
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
    leaving_buckets
        By stage and kind of pass, the buckets that leave after each part.
    """

    def __init__(self, shape: StepShape) -> None:
        super().__init__()
        self.shape = shape
        self.order = schedule(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
        self.placement = rule_of(shape.schedule).placement
        self.first, self.final = self.order.first_gradients, self.order.last_gradients
        self.parts: dict[tuple[int, ...], _PartSlots] = {}
        self.bodies: dict[tuple[int, ...], tuple[_Body, list[int]]] = {}
        self.chain = [Chain() for _ in range(shape.ranks)]
        self.leaving: list[int | None] = [None] * shape.ranks
        self.scattered: list[int | None] = [None] * shape.ranks
        self.arrived: dict[Action, int] = {}
        self.joins = _joins(shape)
        self.activations = Activations(self.order)
        self.summed: list[int | None] = [None] * shape.ranks
        self.on_host: set[tuple[int, int]] = set()
        self.computed: list[int | None] = [None] * shape.ranks
        self.buckets: dict[tuple[int, ActionKind], dict[int, list[Leaving]]] = {}

    def add_actions(self, actions: tuple[Action, ...]) -> None:
        """Add an action, or two that overlap: they take turns at collectives, beneath which the other one computes."""
        check_deadline()
        chain = self.chain[self.order.rank_of(actions[0].stage)]
        # Both actions of a pair continue from the same end.
        chains = [chain, *(replace(chain) for _ in actions[1:])]
        alone = len(actions) == 1
        runs = [self.action(action, own, alone=alone) for action, own in zip(actions, chains, strict=True)]
        # Each generator pauses at its next collective, which makes the two take turns.
        for _ in zip_longest(*runs):
            pass
        for other in chains[1:]:
            chain.joined, chain.tail, chain.stream = chain.tail, other.tail, other.stream

    def action(self, action: Action, chain: Chain, *, alone: bool) -> Iterator[None]:
        """Add the tasks of an action, up to its next collective at a time.

        A pass that runs alone and gathers, keeps and reduces nothing is a copy of the others of its variant.
        """
        position, stage = self.order.rank_of(action.stage), self.shape.stages[action.stage]
        final, shared = self.is_final(action), self.shape.sharing
        begins = shared.begins and action == self.first[action.stage]
        variant = variant_of(action, final) + JOINED * (action in self.joins) + FIRST * begins
        blocks = stage.forward_kept if action.kind is ActionKind.FORWARD else stage.backward_kept
        leaves = final or (shared.gradients and action.kind in MAKES_GRADIENTS)
        waits = self.awaited(action)
        hosts_wait = [*waits, chain.tail] if self.shape.hosts_wait else []
        if shared.gradients:
            waits.append(self.leaving[position])
        # The common pass of a schedule is added once and repeated by array operations.
        if alone and not (leaves or blocks or shared.parameters or self.shape.hosts_wait_inside):
            self._alike(chain, position, action, variant, waits, hosts_wait)
        else:
            kept, units = (
                self.activations.begin(action, blocks, chain, self.copy),
                _Units(self, chain, action, variant),
            )
            for index, part in enumerate(stage.parts(variant)):
                waits += [*kept.before(index), *units.before(index)]
                if shared.copies and leaves and self._leaving_after(action, index):
                    waits.append(self.scattered[position])
                self._part(chain, position, (action.stage, variant, index), part, action.microbatch, waits, hosts_wait)
                hosts_wait = [chain.tail] if self.shape.hosts_wait_inside and part.legs and not part.beside else []
                waits = waits if part.beside else []  # the next one starts with it
                waits += self._reduce(chain, position, action, index) if leaves else []
                kept.after(index)
                units.after(index)
                if part.legs and not part.beside:
                    yield
        if action.kind is not ActionKind.WEIGHT:
            self._send(chain, position, action)

    def _alike(
        self,
        chain: Chain,
        position: int,
        action: Action,
        variant: int,
        waits: list[int | None],
        hosts_wait: list[int | None],
    ) -> None:
        """Add the parts of a pass like others: only the first part waits for tasks outside it."""
        for index, part in enumerate(self.shape.stages[action.stage].parts(variant)):
            self._part(chain, position, (action.stage, variant, index), part, action.microbatch, waits, hosts_wait)
            if not part.beside:
                self._rest(chain, position, action, variant, index + 1)
                return
            hosts_wait = []  # the next one starts with it

    def _rest(self, chain: Chain, position: int, action: Action, variant: int, first: int) -> None:
        """Add the parts of a pass from ``first_part`` on, which wait only for each other."""
        key, start = (action.stage, variant), len(self.slot_of)
        if key in self.bodies:
            body, starts = self.bodies[key]
            starts.append(start)
            self.tasks(body.slots, action.microbatch)
        else:
            body = self._body(chain, position, action, variant, first)
            self.bodies[key] = body, []
            self.repeated.append((body.edges, self.bodies[key][1]))
        chain.tail, chain.joined, chain.stream = start + body.tail, _shifted(body.joined, start), body.stream

    def _body(self, chain: Chain, position: int, action: Action, variant: int, first: int) -> _Body:
        """Add the parts of a pass from ``first_part`` on, and return them as a body."""
        start, num_edges = len(self.slot_of), len(self.edges)
        for index, part in enumerate(self.shape.stages[action.stage].parts(variant)[first:], first):
            self._part(chain, position, (action.stage, variant, index), part, action.microbatch, [], [])
        edges = np.array(self.edges[num_edges:], dtype=np.int64).reshape(-1, 3) - (start, start, 0)
        assert chain.tail is not None
        return _Body(self.slot_of[start:], edges, chain.tail - start, _shifted(chain.joined, -start), chain.stream)

    def is_final(self, action: Action) -> bool:
        """Return whether an action makes the last gradients of its stage before an update."""
        return action == self.final[action.stage]

    def awaited(self, action: Action) -> list[int | None]:
        """Return the tasks that an action waits for besides earlier ones on its rank: what another rank sends."""
        if action.kind is ActionKind.WEIGHT:
            return []
        return [self.arrived.pop(action._replace(kind=_AWAITED[action.kind]), None)]

    def _part(
        self,
        chain: Chain,
        position: int,
        key: tuple[int, ...],
        part: PartShape,
        microbatch: int,
        after: list[int | None],
        launched_after: list[int | None],
    ) -> None:
        """Add the tasks of a part: launches, phases, and launches that run ahead."""
        if key not in self.parts:
            self.parts[key] = self._part_slots(position, key, part)
        slots = self.parts[key]
        waits = [(task, position) for task in (*after, chain.joined)]
        if slots.stream is not chain.stream:  # else the stream they share keeps their order
            waits.append((chain.tail, position))
        if part.launched:
            launched = self.task(slots.lead, microbatch, [(task, position) for task in launched_after])
            waits.append((launched, position))
        for slot in slots.legs:
            number = self.task(slot, microbatch, waits)
            waits = []
        if slots.stream is StreamKind.COMPUTE:
            self.computed[position] = number
        if part.launched:
            self.task(slots.rest, microbatch, [])
        if part.beside:
            chain.beside = number
            return
        chain.joined, chain.beside = chain.beside, None
        chain.tail, chain.stream = number, slots.stream

    def _part_slots(self, position: int, key: tuple[int, ...], part: PartShape) -> _PartSlots:
        """Return the templates of a part, in the order of its tasks."""
        kind = StreamKind.COMPUTE if not part.legs else StreamKind.CONTEXT if part.beside else StreamKind.TENSOR
        rank, launch = Site(RANK, position), ((position, StreamKind.LAUNCH),)
        site = Site(part.along, position) if part.legs or part.together else rank
        streams = ((position, kind),)
        lead = self.slot(rank, "lead", key, launch) if part.launched else -1
        if part.legs:
            legs = tuple(self.slot(site, "collective", (*key, leg), streams) for leg in range(part.legs))
        else:
            legs = (self.slot(site, "pass", key, streams),)
        return _PartSlots(kind, lead, legs, self.slot(rank, "rest", key, launch) if part.launched else -1)

    def _reduce(self, chain: Chain, position: int, action: Action, part: int) -> list[int | None]:
        """Reduce the gradients that a part has completed, and return the reductions that the next part waits for."""
        shared, before = self.shape.sharing, self.scattered[position]
        found = self._leaving_after(action, part)
        for leaving in found:
            self._leave(chain, position, action, leaving)
        if not found or not shared.gradients:
            return []
        return [before if shared.ahead else self.leaving[position]]

    def _leaving_after(self, action: Action, part: int) -> list[Leaving]:
        """Return the buckets that leave after a part of an action."""
        key = action.stage, action.kind
        if key not in self.buckets:
            self.buckets[key] = defaultdict(list)
            for bucket in self.shape.stages[action.stage].buckets:
                self.buckets[key][bucket.after(action.kind)].append(bucket)
        return self.buckets[key].get(part, [])

    def _leave(self, chain: Chain, position: int, action: Action, leaving: Leaving) -> None:
        """Reduce a bucket of gradients, a stage's last ones over replicas too, and copy it to the host."""
        final = self.is_final(action)
        microbatch = action.microbatch if self.shape.sharing.gradients else -1
        after = chain.tail
        for kind, stream, legs in (
            (leaving.kind, StreamKind.DATA, leaving.legs),
            (REPLICA, StreamKind.REPLICA, leaving.replicas if final else 0),
        ):
            for leg in range(legs):
                waits = [(after, position)] if leg == 0 else []
                key, streams = (action.stage, leaving.number, leg), ((position, stream),)
                after = self.add(Site(kind, position), "reduce", key, streams, microbatch, waits)
                self.leaving[position] = after
                if kind != REPLICA:
                    self.scattered[position] = after

        if leaving.copied:
            bucket = (action.stage, leaving.number)
            waits = [(after, position), (chain.joined, position)]
            copy = self.copy(TO_HOST, position, GRADIENTS, bucket, microbatch, waits)
            self.leaving[position] = self.scattered[position] = copy
            # The host adds to the gradients of earlier microbatches; the first ones it only receives.
            if bucket in self.on_host:
                self.summed[position] = self.copy(HOST, position, SUM, bucket, microbatch, [(copy, position)])
            self.on_host.add(bucket)

    def copy(
        self,
        kind: str,
        position: int,
        what: str,
        key: tuple[int, ...],
        microbatch: int,
        waits: Waits,
    ) -> int:
        """Add a copy between a rank and its host, and return its task."""
        return self.add(Site(kind, position), what, key, ((position, _HOST_STREAMS[kind]),), microbatch, waits)

    def _send(self, chain: Chain, position: int, action: Action) -> None:
        """Send the result of an action to the stage that waits for it, if that is on another rank."""
        forward = action.kind is ActionKind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if not 0 <= stage < self.order.num_stages:
            return
        target = self.order.rank_of(stage)
        if target == position:
            return
        ahead = forward if self.placement is Placement.LOOP else target > position
        out, into = _STREAMS[ahead]
        hops = self.placement is Placement.WRITTEN and abs(target - position) > 1
        site = Site(hop_kind(position, target) if hops else FORWARD if ahead else BACKWARD, position)
        streams = ((position, out), (target, into))
        waits = [(chain.tail, position)]
        sent = self.add(site, "send", (action.stage, int(not forward)), streams, action.microbatch, waits)
        self.arrived[Action(stage, _AWAITED[action.kind], action.microbatch)] = sent


class _Units:
    """The units of one pass while its tasks are added: each is gathered ahead of its parts."""

    def __init__(self, builder: Passes, chain: Chain, action: Action, variant: int) -> None:
        self.builder, self.chain, self.action = builder, chain, action
        self.position, stage = builder.order.rank_of(action.stage), builder.shape.stages[action.stage]
        self.units = stage.gathered(action.kind)
        self.gathered = builder.shape.sharing.gathered(variant, len(self.units))
        self.ready: dict[int, int] = {}
        self.begun = 0
        self._reach(0)

    def before(self, part: int) -> list[int | None]:
        """Return what a part waits for: the gather of the unit that begins with it."""
        return [self.ready[part]] if part in self.ready else []

    def after(self, part: int) -> None:
        """Gather the unit that may be gathered once a part has ended."""
        self._reach(part + 1)

    def _reach(self, part: int) -> None:
        """Gather the unit that may be gathered as a part begins: one ahead of the unit that is read from there on."""
        if self.begun == len(self.units) or self.units[self.begun].first != part:
            return
        following = self.begun + self.builder.shape.sharing.ahead
        first, computed = (following, None) if self.begun else (0, self.builder.computed[self.position])
        for unit in range(first, min(following + 1, len(self.units))):
            self._gather(unit, computed)
        self.begun += 1

    def _gather(self, unit: int, computed: int | None = None) -> None:
        """Gather a unit's parameters after the rank's present work; the stream keeps gathers in order.

        The first gather of a pass waits for ``compute_task``, all that was computed before, which may belong to another
        pass that runs in turns with this one.
        """
        shape, position, builder = self.units[unit], self.position, self.builder
        reduced = None if builder.shape.sharing.ahead else builder.leaving[position]
        after = [*dict.fromkeys((*self.chain.ends, computed, reduced))]
        legs = [(kind, leg) for kind, count in shape.gathers for leg in range(count)]
        for kind, leg in legs if self.gathered[unit] else ():
            waits, after = [(task, position) for task in after], []
            if kind == FROM_HOST:
                unit_of = (self.action.stage, shape.block)
                copy = builder.copy(kind, position, PARAMETERS, unit_of, self.action.microbatch, waits)
                self.ready[shape.first], after = copy, [copy]
                continue
            key, streams = (self.action.stage, shape.block, leg), ((position, StreamKind.GATHER),)
            site = Site(kind, position)
            self.ready[shape.first] = builder.add(site, "unshard", key, streams, self.action.microbatch, waits)


def _joins(shape: StepShape) -> frozenset[Action]:
    """Return the actions whose passes find or leave other parameters gathered than most of their kind."""
    if not shape.sharing.parameters:
        return frozenset()
    rows = actions(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
    chosen = shape.sharing.joins(rows)
    found = zip(*(column[chosen].tolist() for column in rows[:3]), strict=True)
    return frozenset(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in found)


def _shifted(task: int | None, by: int) -> int | None:
    """Return the number of a task, counted from another one."""
    return None if task is None else task + by


_HOST_STREAMS = {TO_HOST: StreamKind.TO_HOST, HOST: StreamKind.HOST, FROM_HOST: StreamKind.FROM_HOST}
"""Streams of copies and of work on the host, by kind of site."""
_STREAMS = {
    True: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    False: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
"""Streams of sender and receiver, by whether a send goes to a later position."""
_AWAITED = {
    ActionKind.FORWARD: ActionKind.FORWARD,
    ActionKind.BACKWARD: ActionKind.BACKWARD,
    ActionKind.INPUT: ActionKind.BACKWARD,
}
"""Kind of action that the next stage waits for, by the kind that makes it."""


@lru_cache(maxsize=256)
def one_step(shape: StepShape) -> Skeleton:
    """Return the abstract tasks of one training step."""
    return Step(shape).build()


class Step(Passes):
    """Abstract tasks of a step while they are collected."""

    def build(self) -> Skeleton:
        """Return the abstract tasks of the whole step."""
        for together in in_order(self.order):
            self.add_actions(together)
        for position in range(self.shape.ranks):
            self._sum(position)
        for number, (first, second, legs) in enumerate(self.shape.tied):
            streams = ((first, StreamKind.DATA), (second, StreamKind.DATA))
            self._chain(Site(tied_kind(first, second), first), "tied", (number,), streams, legs)
        if self.shape.norm is not None:
            self._clip(self.shape.norm)
        for position in range(self.shape.ranks):
            self._update(position)
        for position in range(self.shape.ranks):
            self._gather(position)
        return self.skeleton()

    def _chain(self, site: Site, what: str, key: tuple[int, ...], streams: Streams, legs: int) -> None:
        """Add the phases of a communication at the end of the step; streams keep them in order."""
        positions = [position for position, _ in streams]
        for leg in range(legs):
            waits = (
                [(task, p) for p in positions for task in (*self.chain[p].ends, self.leaving[p])] if leg == 0 else []
            )
            number = self.add(site, what, (*key, leg), streams, -1, waits)
        if legs:
            for position in positions:
                self.leaving[position] = number

    def _sum(self, position: int) -> None:
        """Reduce the gradients of a position that passes have not reduced, then those of replicated parameters."""
        own = ((position, StreamKind.DATA),)
        for kind, legs in self.shape.reductions[position]:
            self._chain(Site(kind, position), "reduce", (-1, 0), own, legs)
        for number, legs in self.shape.replicas[position]:
            over = ((position, StreamKind.REPLICA),)
            self._chain(Site(REPLICA, position), "reduce", (-1, number), over, legs)
        for axis, legs in self.shape.replicated[position]:
            self._chain(Site(axis, position), "replicated", (), own, legs)

    def _gather(self, position: int) -> None:
        """Gather the parameters of a position that its optimizer has updated as shards."""
        for kind, legs in self.shape.gathers[position]:
            self._chain(Site(kind, position), "gather", (), ((position, StreamKind.DATA),), legs)

    def _clip(self, legs: int) -> None:
        """Read the gradients of every rank, and sum their norm over the ranks of all positions."""
        for position in range(self.shape.ranks):
            chain, own = self.chain[position], ((position, StreamKind.COMPUTE),)
            waits = [(task, position) for task in (self.leaving[position], *chain.ends)]
            chain.tail, chain.joined = self.add(Site(RANK, position), "squares", (), own, -1, waits), None
            if self.shape.updates[position].gradients:
                waits.append((self.summed[position], position))
                chain.joined = self.copy(HOST, position, SQUARES_ON_HOST, (), -1, waits)
        streams = tuple((position, StreamKind.DATA) for position in range(self.shape.ranks))
        self._chain(Site(NORM, 0), "norm", (), streams, legs)

    def _update(self, position: int) -> None:
        """Update the parameters: those with states on the device at once, the others chunk by chunk."""
        chain, update = self.chain[position], self.shape.updates[position]
        waits = [(task, position) for task in (self.leaving[position], self.summed[position], *chain.ends)]
        if update.device:
            streams = ((position, StreamKind.COMPUTE),)
            chain.tail, chain.joined = self.add(Site(RANK, position), "optimizer", (), streams, -1, waits), None
        ended: list[int] = []
        for chunk in range(CHUNKS if update.steps else 0):
            before = waits if chunk == 0 else []
            if update.streamed and chunk > 1:  # both buffers are in use until then
                before = [(ended[chunk - 2], position)]
            for number in update.steps:
                step, end = STEPS[number], ((chunk == CHUNKS - 1) - (chunk == 0)) * update.streamed
                streams, site = ((position, step.stream),), Site(step.kind or RANK, position)
                task = self.add(site, "update", (number, end), streams, -1, before)
                before = [(task, position)]
            ended.append(task)
        if ended:
            chain.joined, chain.tail = chain.tail if update.device else None, ended[-1]
