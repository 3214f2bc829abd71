"""The allocations of one rank in a step: what stays, then passes in the schedule's order, then the optimizer's step.

Gathered parameters come in a buffer of the stream that gathers them, and move to memory of the compute stream when
their block begins; shards of gradients come out of a reduction into memory of its stream. So does fully_shard: see
``fully_shard/_fsdp_collectives.py`` of PyTorch 2, ``foreach_all_gather`` and ``foreach_reduce``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import Category, Change
from meshwise.strategies.allocation.block_passes import PassEvents
from meshwise.strategies.allocation.caching_allocator import COMPUTE, GATHER, REDUCE, Events
from meshwise.strategies.lowering.tasks.fully_sharded import BlockChanges
from meshwise.strategies.schedules.schedule import ActionKind

BlockPlace = tuple[int, int, int]
"""A stage, the place of a block in it and a microbatch."""


class BlockPass(NamedTuple):
    """A pass of one block: its events, and what it takes and gives back besides.

    ``left`` are the places, among the tensors that it finds, of those that it leaves to a later part of backward.
    """

    events: PassEvents
    changes: BlockChanges
    kind: ActionKind
    left: tuple[int, ...] = ()


class _Slot(NamedTuple):
    slot: int
    size: int


class RankRecorder:
    """Records the allocations of a rank."""

    def __init__(self, num_ahead: int) -> None:
        self._num_ahead = num_ahead
        self._num_slots = 0
        self._slots: list[int] = []
        self._sizes: list[int] = []
        self._other_streams: dict[int, int] = {}  # by event, where it is not the compute stream
        self._kept: dict[BlockPlace, list[int]] = {}
        self._waiting_units: deque[_Slot] = deque()
        self._units: deque[_Slot] = deque()
        self._gradients: deque[_Slot] = deque()
        self._shards: deque[_Slot] = deque()
        self._owed = 0

    @property
    def num_events(self) -> int:
        """The number of events so far."""
        return len(self._slots)

    def allocate(self, sizes: Sequence[int], stream: int = COMPUTE) -> list[_Slot]:
        """Allocate tensors of some bytes each, and return their slots."""
        slots = []
        for size in sizes:
            if size > 0:
                self._record(self._num_slots, size, stream)
                slots.append(_Slot(self._num_slots, size))
                self._num_slots += 1
        return slots

    def release(self, slots: Iterable[_Slot]) -> None:
        """Release slots."""
        for slot, _ in slots:
            self._record(slot, 0, COMPUTE)

    def run_block(self, place: BlockPlace, block: BlockPass, *, is_last: bool) -> None:
        """Record a pass of a block; ``is_last`` where no other block of the pass follows."""
        events, changes = block.events, block.changes
        kept = self._find_kept(place, block)
        others = events.num_slots - events.num_kept
        slots = [*kept, *range(self._num_slots, self._num_slots + others)]
        self._num_slots += others
        self._play(events, slots, 0, events.split)
        self._waiting_units += self.allocate([change.size for change in changes.gathered], GATHER)
        while self._waiting_units and (len(self._waiting_units) > self._num_ahead or is_last):
            unit = self._waiting_units.popleft()
            self.release([unit])
            self._units += self.allocate([unit.size])
        self._play(events, slots, events.split, len(events.slots))
        self._gradients += (_Slot(slots[slot], size) for slot, size in events.gradients)
        if block.kind is not ActionKind.FORWARD:
            self._kept[place] = [kept[index] for index in block.left]
        self._apply(changes.released)
        self.release(self.allocate([changes.copied_bytes]))
        self._apply(changes.released_late)

    def end_step(self) -> None:
        """Give back what gradients are left when the optimizer has read them."""
        self.release(self._gradients)
        self.release(self._shards)
        self._gradients.clear()
        self._shards.clear()
        self._owed = 0

    def _find_kept(self, place: BlockPlace, block: BlockPass) -> list[int]:
        """Return the slots of what a block keeps: new ones in a forward."""
        if block.kind is not ActionKind.FORWARD:
            return self._kept.pop(place)
        first, num_kept = self._num_slots, block.events.num_kept
        self._num_slots += num_kept
        self._kept[place] = list(range(first, first + num_kept))
        return self._kept[place]

    def _apply(self, changes: Sequence[Change]) -> None:
        """Give back units and gradients, the oldest first; what comes out of a reduction is given back below 0."""
        for change in changes:
            if change.size < 0:
                self._shards += self.allocate([-change.size], REDUCE)
            elif change.category is Category.PARAMETERS:
                unit = self._units.popleft() if self._units else self._waiting_units.popleft()
                self.release([unit])
            else:
                self._owed += change.size
                while self._gradients and self._gradients[0].size <= self._owed:
                    gradient = self._gradients.popleft()
                    self._owed -= gradient.size
                    self.release([gradient])

    def _play(self, events: PassEvents, slots: Sequence[int], start: int, end: int) -> None:
        """Record events of a pass whose local slots are ``slots``."""
        self._slots += [slots[slot] for slot in events.slots[start:end]]
        self._sizes += events.sizes[start:end]

    def _record(self, slot: int, size: int, stream: int) -> None:
        if stream != COMPUTE:
            self._other_streams[self.num_events] = stream
        self._slots.append(slot)
        self._sizes.append(size)

    def build(self) -> Events:
        """Return all events."""
        streams = np.full(self.num_events, COMPUTE)
        streams[list(self._other_streams)] = list(self._other_streams.values())
        return Events(np.array(self._slots, np.int64), np.array(self._sizes, np.int64), streams)


def repeat_events(events: Events, start: int, end: int, between: Sequence[int]) -> Events:
    """Return events of which those from ``start`` on, a whole step, come twice.

    ``between`` are the bytes of what the first step allocates for good before its event ``end``.

    >>> events = Events(np.array([0, 1, 1]), np.array([5, 7, 0]), np.zeros(3, np.int64))
    >>> repeat_events(events, 1, 2, [9]).slots.tolist()
    [0, 1, 2, 1, 3, 3]
    """
    num_slots = int(events.slots.max()) + 1
    first_slot = int(events.slots[start:].min(initial=num_slots))
    late_slots = np.arange(num_slots, num_slots + len(between))
    shift = num_slots + len(between) - first_slot
    late_events = Events(late_slots, np.array(between, np.int64), np.full(len(between), COMPUTE))
    repeated_events = Events(events.slots[start:] + shift, events.sizes[start:], events.streams[start:])
    columns = zip(events, late_events, repeated_events, strict=True)
    return Events(*(np.concatenate([row[:end], late, row[end:], again]) for row, late, again in columns))
