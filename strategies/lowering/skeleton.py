"""The tasks of a schedule and what each waits for, before anything is known of machine or cost.

A skeleton speaks of *sites*: the ranks of a pipeline position, their tensor or data groups,
the pairs that send to the next position. One abstract task at a site stands for one task of
every class there. Skeletons depend on the schedule and on how passes are cut alone, so that one
serves many plans; they are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from simulator.program import IntArray, StreamKind
from strategies.lowering.offload import STEPS
from strategies.lowering.pipeline import in_order
from strategies.lowering.placed import BACKWARD, FORWARD, tied_kind
from strategies.mesh import TENSOR
from strategies.schedule import SCHEDULES, Action, ActionKind, schedule
from strategies.schedules.rule import Placement

RANK = "rank"


class Site(NamedTuple):
    """Where tasks are: ranks, groups or pairs of a ``kind`` at a pipeline position."""

    kind: str
    position: int


class Slot(NamedTuple):
    """What all microbatches of a task share.

    ``what`` and ``key`` name it for the lowering; ``streams`` are (position, stream) held.
    """

    site: Site
    what: str
    key: tuple[int, ...]
    streams: tuple[tuple[int, StreamKind], ...]


FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD, INPUTS, WEIGHTS, LAST_WEIGHTS = range(6)
"""Variants of a stage's passes: what makes its last gradients is apart."""


def variant_of(action: Action, final: bool) -> int:
    """Return the variant of a pass that an action runs; ``final`` for that which makes a stage's last gradients."""
    match action.kind:
        case ActionKind.FORWARD:
            return FORWARD_PASS
        case ActionKind.BACKWARD:
            return LAST_BACKWARD if final else BACKWARD_PASS
        case ActionKind.INPUT:
            return INPUTS
        case _:
            return LAST_WEIGHTS if final else WEIGHTS


class PartShape(NamedTuple):
    """One part of a pass: how many phases where it is a collective of a group ``along`` an axis (0: a rank's own).

    ``communicates`` says that a rank's own part holds the tensor stream too, ``together`` that the ranks of
    a tensor group run it as one, ``beside`` that it starts with the next part.
    """

    legs: int
    communicates: bool
    together: bool
    launched: bool
    along: str = TENSOR
    beside: bool = False


class StageShape(NamedTuple):
    """The parts of a stage's passes; those of the last gradients may be cut more finely than the others of their kind.

    ``buckets`` are (part of the last gradients after which it leaves, kind of groups that reduce it, phases);
    ``split`` are the parts of `INPUTS`, `WEIGHTS` and `LAST_WEIGHTS`, where the schedule has such.
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last: tuple[PartShape, ...]
    buckets: tuple[tuple[int, str, int], ...]
    split: tuple[tuple[PartShape, ...], ...] = ()

    def parts(self, variant: int) -> tuple[PartShape, ...]:
        """Return the parts of one of the variants of a pass."""
        return (self.forward, self.backward, self.last, *self.split)[variant]


class StepShape(NamedTuple):
    """Everything a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the reductions of all gradients after the last backward: kind of groups and phases of each.
    gathers
        Per position the gathers of updated parameters, in the same form.
    tied
        Pairs of positions that keep one parameter, and the phases of the sum of its gradients.
    host_chunks
        Pieces in which the host updates parameters; 0 where the device does.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages: tuple[StageShape, ...]
    reductions: tuple[tuple[tuple[str, int], ...], ...]
    gathers: tuple[tuple[tuple[str, int], ...], ...]
    tied: tuple[tuple[int, int, int], ...]
    host_chunks: int


@dataclass(frozen=True, eq=False)
class Skeleton:
    """Abstract tasks in order.

    Parameters
    ----------
    slots
        What the tasks are; ``slot_of`` and ``microbatch_of`` say it for each.
    before, after, through
        Edges: the task ``after`` waits for ``before`` at a pipeline position they share.
    """

    slots: tuple[Slot, ...]
    slot_of: IntArray
    microbatch_of: IntArray
    before: IntArray
    after: IntArray
    through: IntArray


@lru_cache(maxsize=256)
def skeleton(shape: StepShape) -> Skeleton:
    """Return the abstract tasks of one training step."""
    return _Builder(shape).build()


class _PartSlots(NamedTuple):
    """The streams that a part holds and its slots: launching before, itself phase by phase, launching after."""

    held: tuple[StreamKind, ...]
    lead: int
    legs: tuple[int, ...]
    rest: int


@dataclass(slots=True)
class _Chain:
    """The end of what runs one after another: the last task, the streams it holds, and others that must end too.

    ``beside`` is what runs beside the next task.
    """

    tail: int | None = None
    held: tuple[StreamKind, ...] = ()
    beside: int | None = None
    joined: int | None = None

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """All that has to end."""
        return self.tail, self.joined


class _Builder:
    """Abstract tasks while they are collected.

    ``chain`` is each position's end of its passes, ``leaving`` its last task on the data stream.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.order = schedule(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
        self.loops = SCHEDULES[shape.schedule].placement is Placement.LOOP
        self.final = self.order.last_gradients
        self.slots: dict[Slot, int] = {}
        self.parts: dict[tuple[int, ...], _PartSlots] = {}
        self.slot_of: list[int] = []
        self.microbatch_of: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.chain = [_Chain() for _ in range(shape.ranks)]
        self.leaving: list[int | None] = [None] * shape.ranks
        self.arrived: dict[Action, int] = {}

    def build(self) -> Skeleton:
        for actions in in_order(self.order):
            self._actions(actions)
        for position, reductions in enumerate(self.shape.reductions):
            for kind, legs in reductions:
                self._chain(Site(kind, position), "reduce", (-1, 0), ((position, StreamKind.DATA),), legs)
        for number, (first, second, legs) in enumerate(self.shape.tied):
            streams = ((first, StreamKind.DATA), (second, StreamKind.DATA))
            self._chain(Site(tied_kind(first, second), first), "tied", (number,), streams, legs)
        for position in range(self.shape.ranks):
            self._update(position)
        for position, gathers in enumerate(self.shape.gathers):
            for kind, legs in gathers:
                self._chain(Site(kind, position), "gather", (), ((position, StreamKind.DATA),), legs)
        edges = np.array(self.edges, dtype=np.int64).reshape(-1, 3)
        slot_of, microbatch_of = (np.array(c, dtype=np.int64) for c in (self.slot_of, self.microbatch_of))
        return Skeleton(tuple(self.slots), slot_of, microbatch_of, edges[:, 0], edges[:, 1], edges[:, 2])

    def _add(
        self,
        site: Site,
        what: str,
        key: tuple[int, ...],
        streams: tuple[tuple[int, StreamKind], ...],
        microbatch: int,
        waits: list[tuple[int | None, int]],
    ) -> int:
        return self._task(self._slot(site, what, key, streams), microbatch, waits)

    def _slot(self, site: Site, what: str, key: tuple[int, ...], streams: tuple[tuple[int, StreamKind], ...]) -> int:
        return self.slots.setdefault(Slot(site, what, key, streams), len(self.slots))

    def _task(self, slot: int, microbatch: int, waits: list[tuple[int | None, int]]) -> int:
        number = len(self.slot_of)
        self.slot_of.append(slot)
        self.microbatch_of.append(microbatch)
        self.edges += [(before, number, position) for before, position in waits if before is not None]
        return number

    def _chain(
        self, site: Site, what: str, key: tuple[int, ...], streams: tuple[tuple[int, StreamKind], ...], legs: int
    ) -> None:
        """Add the phases of a communication at the end of the step; the streams keep them in order."""
        positions = [position for position, _ in streams]
        for leg in range(legs):
            waits = (
                [(task, p) for p in positions for task in (*self.chain[p].ends, self.leaving[p])] if leg == 0 else []
            )
            number = self._add(site, what, (*key, leg), streams, -1, waits)
        if legs:
            for position in positions:
                self.leaving[position] = number

    def _update(self, position: int) -> None:
        """Update the parameters, on the device or chunk by chunk on the host."""
        chain = self.chain[position]
        waits = [(task, position) for task in (self.leaving[position], *chain.ends)]
        if not self.shape.host_chunks:
            streams = ((position, StreamKind.COMPUTE),)
            chain.tail = self._add(Site(RANK, position), "optimizer", (), streams, -1, waits)
        for chunk in range(self.shape.host_chunks):
            before = waits if chunk == 0 else []
            for number, step in enumerate(STEPS):
                streams, site = ((position, step.stream),), Site(step.kind, position)
                chain.tail = self._add(site, "host", (number,), streams, -1, before)
                before = [(chain.tail, position)]

    def _actions(self, actions: tuple[Action, ...]) -> None:
        """Add an action, or two that overlap: in turn up to a collective, beneath which the other one computes."""
        chain = self.chain[self.order.rank_of(actions[0].stage)]
        chains = [chain, *(replace(chain) for _ in actions[1:])]
        runs = [self._action(action, own) for action, own in zip(actions, chains, strict=True)]
        for _ in zip_longest(*runs):
            pass
        for other in chains[1:]:
            chain.joined, chain.tail, chain.held = chain.tail, other.tail, other.held

    def _action(self, action: Action, chain: _Chain) -> Iterator[None]:
        """Add the tasks of an action, up to its next collective at a time."""
        position, stage = self.order.rank_of(action.stage), self.shape.stages[action.stage]
        final = action == self.final[action.stage]
        variant = variant_of(action, final)
        arrived = self.arrived.pop(action._replace(kind=_AWAITED[action.kind]), None) if variant < WEIGHTS else None
        for index, part in enumerate(stage.parts(variant)):
            self._part(chain, position, (action.stage, variant, index), part, action.microbatch, arrived)
            arrived = None
            for bucket, (ready, kind, legs) in enumerate(stage.buckets if final else ()):
                if ready == index:
                    self._leave(chain, Site(kind, position), action.stage, bucket, legs)
            if part.legs and not part.beside:
                yield
        if action.kind is not ActionKind.WEIGHT:
            self._send(chain, position, action)

    def _part(
        self,
        chain: _Chain,
        position: int,
        key: tuple[int, ...],
        part: PartShape,
        microbatch: int,
        arrived: int | None,
    ) -> None:
        if key not in self.parts:
            self.parts[key] = self._part_slots(position, key, part)
        slots = self.parts[key]
        waits: list[tuple[int | None, int]] = [(arrived, position), (chain.joined, position)]
        if not any(kind in slots.held for kind in chain.held):  # else the stream they share keeps their order
            waits.append((chain.tail, position))
        if part.launched:
            waits.append((self._task(slots.lead, microbatch, []), position))
        for slot in slots.legs:
            number = self._task(slot, microbatch, waits)
            waits = []
        if part.launched:
            self._task(slots.rest, microbatch, [])
        if part.beside:
            chain.beside = number
            return
        chain.joined, chain.beside = chain.beside, None
        chain.tail, chain.held = number, slots.held

    def _part_slots(self, position: int, key: tuple[int, ...], part: PartShape) -> "_PartSlots":
        """Return the slots of a part, in the order of its tasks."""
        held = _HELD[part.communicates] if not part.legs else _BESIDE if part.beside else (StreamKind.TENSOR,)
        rank, launch = Site(RANK, position), ((position, StreamKind.LAUNCH),)
        site = Site(part.along, position) if part.legs or part.together else rank
        streams = tuple((position, kind) for kind in held)
        lead = self._slot(rank, "lead", key, launch) if part.launched else -1
        if part.legs:
            legs = tuple(self._slot(site, "collective", (*key, leg), streams) for leg in range(part.legs))
        else:
            legs = (self._slot(site, "pass", key, streams),)
        return _PartSlots(held, lead, legs, self._slot(rank, "rest", key, launch) if part.launched else -1)

    def _leave(self, chain: _Chain, site: Site, stage: int, bucket: int, legs: int) -> None:
        """Reduce a bucket of gradients that the last part has filled."""
        position = site.position
        for leg in range(legs):
            waits = [(chain.tail, position)] if leg == 0 else []
            streams = ((position, StreamKind.DATA),)
            self.leaving[position] = self._add(site, "reduce", (stage, bucket, leg), streams, -1, waits)

    def _send(self, chain: _Chain, position: int, action: Action) -> None:
        """Send what an action made to the stage that waits for it, if it is on another rank."""
        forward = action.kind is ActionKind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if not 0 <= stage < self.order.num_stages:
            return
        target = self.order.rank_of(stage)
        if target == position:
            return
        ahead = forward if self.loops else target > position
        out, into = _STREAMS[ahead]
        site = Site(FORWARD if ahead else BACKWARD, position)
        streams = ((position, out), (target, into))
        waits = [(chain.tail, position)]
        sent = self._add(site, "send", (action.stage, int(not forward)), streams, action.microbatch, waits)
        self.arrived[Action(stage, _AWAITED[action.kind], action.microbatch)] = sent


_HELD = {False: (StreamKind.COMPUTE,), True: (StreamKind.COMPUTE, StreamKind.TENSOR)}
_BESIDE = (StreamKind.CONTEXT,)
_STREAMS = {
    True: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    False: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
_AWAITED = {
    ActionKind.FORWARD: ActionKind.FORWARD,
    ActionKind.BACKWARD: ActionKind.BACKWARD,
    ActionKind.INPUT: ActionKind.BACKWARD,
}
"""What the next stage waits for, by what makes it."""
