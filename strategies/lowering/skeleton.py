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
from strategies.lowering.classes import BACKWARD, FORWARD, tied_kind
from strategies.lowering.offload import STEPS
from strategies.lowering.pipeline import in_order
from strategies.mesh import TENSOR
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
    """The parts of a stage's passes; the last backward may be cut more finely than ``backward``.

    ``buckets`` are (part of the last backward after which it leaves, kind of groups that reduce it, phases).
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last: tuple[PartShape, ...]
    buckets: tuple[tuple[int, str, int], ...]


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


class _Builder:
    """Abstract tasks while they are collected.

    ``tail`` is each position's last task of its passes and ``held`` its streams, ``beside`` what runs beside
    the next one and ``joined`` what ran beside the last; ``leaving`` is its last task on the data stream.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.order = schedule(shape.schedule, shape.ranks, shape.microbatches, shape.chunks)
        self.slots: dict[Slot, int] = {}
        self.slot_of: list[int] = []
        self.microbatch_of: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.tail: list[int | None] = [None] * shape.ranks
        self.held: list[tuple[StreamKind, ...]] = [()] * shape.ranks
        self.beside: list[int | None] = [None] * shape.ranks
        self.joined: list[int | None] = [None] * shape.ranks
        self.leaving: list[int | None] = [None] * shape.ranks
        self.arrived: dict[Action, int] = {}

    def build(self) -> Skeleton:
        for action in in_order(self.order):
            self._action(action)
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
        slot = Slot(site, what, key, streams)
        number = len(self.slot_of)
        self.slot_of.append(self.slots.setdefault(slot, len(self.slots)))
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
            for bucket, (ready, kind, legs) in enumerate(stage.buckets if last else ()):
                if ready == index:
                    self._leave(Site(kind, position), action.stage, bucket, legs)
        self._send(position, action)

    def _part(self, position: int, key: tuple[int, ...], part: PartShape, microbatch: int, arrived: int | None) -> None:
        held = _HELD[part.communicates] if not part.legs else _BESIDE if part.beside else (StreamKind.TENSOR,)
        waits: list[tuple[int | None, int]] = [(arrived, position), (self.joined[position], position)]
        if not set(held) & set(self.held[position]):  # else the stream they share keeps their order
            waits.append((self.tail[position], position))
        rank, launch = Site(RANK, position), ((position, StreamKind.LAUNCH),)
        if part.launched:
            waits.append((self._add(rank, "lead", key, launch, microbatch, []), position))
        site = Site(part.along, position) if part.legs or part.together else rank
        streams = tuple((position, kind) for kind in held)
        for leg in range(part.legs or 1):
            what, named = ("collective", (*key, leg)) if part.legs else ("pass", key)
            number = self._add(site, what, named, streams, microbatch, waits if leg == 0 else [])
        if part.launched:
            self._add(rank, "rest", key, launch, microbatch, [])
        if part.beside:
            self.beside[position] = number
            return
        self.joined[position], self.beside[position] = self.beside[position], None
        self.tail[position], self.held[position] = number, held

    def _leave(self, site: Site, stage: int, bucket: int, legs: int) -> None:
        """Reduce a bucket of gradients that the last part has filled."""
        position = site.position
        for leg in range(legs):
            waits = [(self.tail[position], position)] if leg == 0 else []
            streams = ((position, StreamKind.DATA),)
            self.leaving[position] = self._add(site, "reduce", (stage, bucket, leg), streams, -1, waits)

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
_BESIDE = (StreamKind.CONTEXT,)
_STREAMS = {
    ActionKind.FORWARD: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    ActionKind.BACKWARD: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
