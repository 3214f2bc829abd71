"""The tasks of a schedule and what each waits for, before anything is known of machine or cost.

A skeleton speaks of *sites*: the ranks of a pipeline position, their tensor or data groups,
the pairs that send to the next position. One abstract task at a site stands for one task of
every class there. Skeletons depend on the schedule and on how passes are cut alone, so that one
serves many plans; they are kept.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulator.program import IntArray, StreamKind
from strategies.lowering.offload import STEPS
from strategies.lowering.pipeline import in_order
from strategies.lowering.placed import BACKWARD, FORWARD, tied_kind
from strategies.mesh import DATA, TENSOR
from strategies.schedule import Action, ActionKind, schedule

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


class PartShape(NamedTuple):
    """One part of a pass: how many phases where it is a collective of the group (0: a rank's own).

    ``communicates`` says that a rank's own part holds the tensor stream too, ``together`` that the ranks of
    a tensor group run it as one.
    """

    legs: int
    communicates: bool
    together: bool
    launched: bool


class StageShape(NamedTuple):
    """The parts of a stage's passes; the last backward may be cut more finely than ``backward``.

    ``buckets`` are (part of the last backward after which it leaves, phases of its reduction).
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last: tuple[PartShape, ...]
    buckets: tuple[tuple[int, int], ...]


class StepShape(NamedTuple):
    """Everything a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the phases of one reduction of all gradients after the last backward; 0 for none.
    gathers
        Per position the phases of the gather of updated parameters; 0 for none.
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
    reductions: tuple[int, ...]
    gathers: tuple[int, ...]
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


class _Builder:
    """Abstract tasks while they are collected.

    ``tail`` is each position's last task of its passes and ``held`` its streams, ``leaving`` its last task
    on the data stream.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.order = schedule(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
        self.slots: dict[Slot, int] = {}
        self.parts: dict[tuple[int, ...], _PartSlots] = {}
        self.slot_of: list[int] = []
        self.microbatch_of: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.tail: list[int | None] = [None] * shape.ranks
        self.held: list[tuple[StreamKind, ...]] = [()] * shape.ranks
        self.leaving: list[int | None] = [None] * shape.ranks
        self.arrived: dict[Action, int] = {}

    def build(self) -> Skeleton:
        for action in in_order(self.order):
            self._action(action)
        for position, legs in enumerate(self.shape.reductions):
            self._chain(Site(DATA, position), "reduce", (-1, 0), ((position, StreamKind.DATA),), legs)
        for number, (first, second, legs) in enumerate(self.shape.tied):
            streams = ((first, StreamKind.DATA), (second, StreamKind.DATA))
            self._chain(Site(tied_kind(first, second), first), "tied", (number,), streams, legs)
        for position in range(self.shape.ranks):
            self._update(position)
        for position, legs in enumerate(self.shape.gathers):
            self._chain(Site(DATA, position), "gather", (), ((position, StreamKind.DATA),), legs)
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
            waits = [(task, p) for p in positions for task in (self.tail[p], self.leaving[p])] if leg == 0 else []
            number = self._add(site, what, (*key, leg), streams, -1, waits)
        if legs:
            for position in positions:
                self.leaving[position] = number

    def _update(self, position: int) -> None:
        """Update the parameters, on the device or chunk by chunk on the host."""
        waits = [(self.leaving[position], position), (self.tail[position], position)]
        if not self.shape.host_chunks:
            streams = ((position, StreamKind.COMPUTE),)
            self.tail[position] = self._add(Site(RANK, position), "optimizer", (), streams, -1, waits)
        for chunk in range(self.shape.host_chunks):
            before = waits if chunk == 0 else []
            for number, step in enumerate(STEPS):
                streams, site = ((position, step.stream),), Site(step.kind, position)
                self.tail[position] = self._add(site, "host", (number,), streams, -1, before)
                before = [(self.tail[position], position)]

    def _action(self, action: Action) -> None:
        position, stage = self.order.rank_of(action.stage), self.shape.stages[action.stage]
        forward = action.kind is ActionKind.FORWARD
        last = not forward and action.microbatch == self.shape.microbatches - 1
        chosen = stage.forward if forward else stage.last if last else stage.backward
        variant = (action.stage, 0 if forward else 2 if last else 1)
        arrived = self.arrived.pop(action, None)
        for index, part in enumerate(chosen):
            self._part(position, (*variant, index), part, action.microbatch, arrived)
            arrived = None
            for bucket, (ready, legs) in enumerate(stage.buckets if last else ()):
                if ready == index:
                    self._leave(position, action.stage, bucket, legs)
        self._send(position, action)

    def _part(self, position: int, key: tuple[int, ...], part: PartShape, microbatch: int, arrived: int | None) -> None:
        if key not in self.parts:
            self.parts[key] = self._part_slots(position, key, part)
        slots = self.parts[key]
        waits: list[tuple[int | None, int]] = [(arrived, position)]
        if not any(kind in slots.held for kind in self.held[position]):  # else the stream they share keeps their order
            waits.append((self.tail[position], position))
        if part.launched:
            waits.append((self._task(slots.lead, microbatch, []), position))
        for slot in slots.legs:
            number = self._task(slot, microbatch, waits)
            waits = []
        if part.launched:
            self._task(slots.rest, microbatch, [])
        self.tail[position], self.held[position] = number, slots.held

    def _part_slots(self, position: int, key: tuple[int, ...], part: PartShape) -> "_PartSlots":
        """Return the slots of a part, in the order of its tasks."""
        held = (StreamKind.TENSOR,) if part.legs else _HELD[part.communicates]
        rank, launch = Site(RANK, position), ((position, StreamKind.LAUNCH),)
        site = Site(TENSOR, position) if part.legs or part.together else rank
        streams = tuple((position, kind) for kind in held)
        lead = self._slot(rank, "lead", key, launch) if part.launched else -1
        if part.legs:
            legs = tuple(self._slot(site, "collective", (*key, leg), streams) for leg in range(part.legs))
        else:
            legs = (self._slot(site, "pass", key, streams),)
        return _PartSlots(held, lead, legs, self._slot(rank, "rest", key, launch) if part.launched else -1)

    def _leave(self, position: int, stage: int, bucket: int, legs: int) -> None:
        """Reduce a bucket of gradients that the last part has filled."""
        for leg in range(legs):
            waits = [(self.tail[position], position)] if leg == 0 else []
            streams = ((position, StreamKind.DATA),)
            self.leaving[position] = self._add(Site(DATA, position), "reduce", (stage, bucket, leg), streams, -1, waits)

    def _send(self, position: int, action: Action) -> None:
        """Send what an action made to the stage that waits for it."""
        forward = action.kind is ActionKind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if not 0 <= stage < self.order.num_stages or self.shape.ranks == 1:
            return
        target = self.order.rank_of(stage)
        out, into = _STREAMS[action.kind]
        site = Site(FORWARD if forward else BACKWARD, position)
        streams = ((position, out), (target, into))
        waits = [(self.tail[position], position)]
        sent = self._add(site, "send", (action.stage, int(not forward)), streams, action.microbatch, waits)
        self.arrived[Action(stage, action.kind, action.microbatch)] = sent


_HELD = {False: (StreamKind.COMPUTE,), True: (StreamKind.COMPUTE, StreamKind.TENSOR)}
_STREAMS = {
    ActionKind.FORWARD: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    ActionKind.BACKWARD: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
