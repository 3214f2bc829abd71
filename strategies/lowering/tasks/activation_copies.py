"""Activation offload: the order of copies to the host and back, through two buffers on the device.

Activations of a block leave when its forward has ended and return before its backward, through two buffers on the
device, each as large as the most that one block keeps [1]_. A forward fills a buffer, which is free again when its copy
has ended; a backward reads a buffer, which is free again when the backward has ended; the copy for it starts when a
buffer is free. So a block's forward waits for the copy of the block before the previous one, and a block's activations
arrive while the previous block computes. Where a microbatch's backward follows its forward at once, its last two blocks
are still in the buffers and are not copied: Megatron-LM too offloads fewer layers than there are [2]_.

Parameters of a block arrive before its forward and again before its backward, its shard before the gather where ZeRO 3
shares them. Its gradients leave when they are made, or reduced, all at the moments that
`meshwise.strategies.lowering.tasks.fully_sharded` says [3]_ [4]_. The host adds gradients of a later microbatch to
those it has: it reads two values and writes one.

References
----------
.. [1] TransformerEngine, ``pytorch/cpu_offload.py``, ``AsyncDoubleBufferGroupOffloadHandler`` (two buffers in turns, a
   stream for either direction, one group ahead).
.. [2] Megatron-LM, ``cpu_offloading_num_layers``.
.. [3] Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1 (activations, parameters and gradients in host memory).
.. [4] PyTorch 2, ``CPUOffloadPolicy`` (shards are copied before the gather, reduced gradients after it).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from meshwise.strategies.lowering.tasks.skeleton import Role, Waits
from meshwise.strategies.plan.offloading import FROM_HOST, TO_HOST
from meshwise.strategies.schedules.schedule import Action, ActionKind, Schedule

AddCopy = Callable[[str, int, str, tuple[int, ...], int, Waits], int]
"""Adds a copy, given its kind, position, role, key, microbatch and the tasks that it waits for; returns its number."""

NUM_BUFFERS = 2
"""Buffers on the device: one is copied while the other is filled or read."""


class OffloadedBlock(NamedTuple):
    """A block of a pass whose activations are on the host between passes: its first and last part, and its number."""

    first_part: int
    last_part: int
    block: int


class TaskChain(Protocol):
    """Tasks that run one after another."""

    @property
    def ends(self) -> tuple[int | None, ...]:
        """The tasks that have to end."""
        ...


class ActivationOffload:
    """The activations of one step that are on hosts between passes, while its tasks are added."""

    def __init__(self, order: Schedule) -> None:
        self.copies_out: dict[tuple[Action, int], int] = {}
        self._buffers = [_CopyBuffers() for _ in range(order.num_ranks)]
        self._order = order

    def start_pass(
        self, action: Action, blocks: Sequence[OffloadedBlock], chain: TaskChain, add_copy: AddCopy
    ) -> "OffloadedPass":
        """Return the offloaded blocks of a pass, before any of them runs."""
        position = self._order.find_rank(action.stage)
        return OffloadedPass(self, self._buffers[position], position, action, blocks, chain, add_copy)

    @cached_property
    def turning_forwards(self) -> frozenset[Action]:
        """The forwards that are directly followed by the backward of the same microbatch."""
        pairs = (pair for actions in self._order.orders for pair in pairwise(actions))
        return frozenset(earlier for earlier, later in pairs if later == earlier._replace(kind=ActionKind.BACKWARD))


class _CopyBuffers:
    """The buffers of one rank; ``use_ends`` are in order the tasks that end each use."""

    def __init__(self) -> None:
        self.num_uses = 0
        self.use_ends: list[tuple[int | None, ...]] = []

    def take_buffer(self) -> tuple[int | None, ...]:
        """Begin a use, and return the tasks that end the earlier use of the same buffer."""
        self.num_uses += 1
        # Buffers are used in turns, so that a use waits for the last but one.
        return self.use_ends[self.num_uses - NUM_BUFFERS - 1] if self.num_uses > NUM_BUFFERS else ()


class OffloadedPass:
    """The offloaded blocks of one pass, while its tasks are added."""

    def __init__(
        self,
        offload: ActivationOffload,
        buffers: _CopyBuffers,
        position: int,
        action: Action,
        blocks: Sequence[OffloadedBlock],
        chain: TaskChain,
        add_copy: AddCopy,
    ) -> None:
        self.offload, self.buffers, self.position, self.action = offload, buffers, position, action
        self.blocks, self.chain, self.add_copy = blocks, chain, add_copy
        self.forward = action.kind is ActionKind.FORWARD
        self.num_ended = 0
        self.fetches: dict[int, int] = {}
        if not self.forward:
            for number in range(min(NUM_BUFFERS, len(blocks))):
                self._fetch_block(number)

    def list_waits(self, part: int) -> tuple[int | None, ...]:
        """Return what a part waits for: a free buffer in forward, the block's fetched activations in backward."""
        if self.num_ended == len(self.blocks) or self.blocks[self.num_ended].first_part != part:
            return ()
        return self.buffers.take_buffer() if self.forward else (self.fetches.pop(self.num_ended, None),)

    def finish_part(self, part: int) -> None:
        """Copy the activations of a block that has ended, or fetch those of the block after the next."""
        if self.num_ended == len(self.blocks) or self.blocks[self.num_ended].last_part != part:
            return
        self.num_ended += 1
        if not self.forward:
            self.buffers.use_ends.append(self.chain.ends)
            if self.num_ended + 1 < len(self.blocks):
                self._fetch_block(self.num_ended + 1)
        elif not self._stays_in_buffer():
            block = self.blocks[self.num_ended - 1].block
            task = self.offload.copies_out[self.action, block] = self._add_copy(TO_HOST, block, self.chain.ends)
            self.buffers.use_ends.append((task,))

    def _stays_in_buffer(self) -> bool:
        """Return whether a block's activations are still in a buffer when its backward runs."""
        return self.num_ended > len(self.blocks) - NUM_BUFFERS and self.action in self.offload.turning_forwards

    def _fetch_block(self, number: int) -> None:
        """Fetch the activations of a block when a buffer is free, unless they have stayed there."""
        block = self.blocks[number].block
        copy_out = self.offload.copies_out.pop((self.action._replace(kind=ActionKind.FORWARD), block), None)
        if copy_out is not None:
            self.fetches[number] = self._add_copy(FROM_HOST, block, (*self.buffers.take_buffer(), copy_out))

    def _add_copy(self, kind: str, block: int, waited_tasks: tuple[int | None, ...]) -> int:
        """Add a copy of a block's activations, and return its task."""
        waits = [(task, self.position) for task in waited_tasks]
        return self.add_copy(
            kind, self.position, Role.ACTIVATIONS, (self.action.stage, block), self.action.microbatch, waits
        )
