"""Activation offload: the order of copies to the host and back, through two buffers on the device.

The rules that it follows are described in `meshwise.strategies.lowering.tasks.contents`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from meshwise.strategies.lowering.costs.offload import ACTIVATIONS
from meshwise.strategies.lowering.tasks.skeleton import Waits
from meshwise.strategies.plan.offloading import FROM_HOST, TO_HOST
from meshwise.strategies.schedules.schedule import Action, ActionKind, Schedule

Copy = Callable[[str, int, str, tuple[int, ...], int, Waits], int]
"""Adds a copy, given its kind, position, role, key, microbatch and the tasks that it waits for; returns its number."""

BUFFERS = 2
"""Buffers on the device: one is copied while the other is filled or read."""


class KeptShape(NamedTuple):
    """A block of a pass whose activations are on the host between passes: its first and last part, and its number."""

    first: int
    last: int
    block: int


class Running(Protocol):
    """Tasks that run one after another."""

    @property
    def ends(self) -> tuple[int | None, ...]:
        """The tasks that have to end."""
        ...


class Activations:
    """The activations of one step that are on hosts between passes, while its tasks are added."""

    def __init__(self, order: Schedule) -> None:
        self.left: dict[tuple[Action, int], int] = {}
        self._buffers = [_Buffers() for _ in range(order.num_ranks)]
        self._order = order

    def begin(self, action: Action, blocks: Sequence[KeptShape], chain: Running, copy: Copy) -> "KeptPass":
        """Return the offloaded blocks of a pass, before any of them runs."""
        position = self._order.rank_of(action.stage)
        return KeptPass(self, self._buffers[position], position, action, blocks, chain, copy)

    @cached_property
    def turning(self) -> frozenset[Action]:
        """The forwards that are directly followed by the backward of the same microbatch."""
        pairs = (pair for actions in self._order.orders for pair in pairwise(actions))
        return frozenset(one for one, two in pairs if two == one._replace(kind=ActionKind.BACKWARD))


class _Buffers:
    """The buffers of one rank; ``use_ends`` are in order the tasks that end each use."""

    def __init__(self) -> None:
        self.uses = 0
        self.ended: list[tuple[int | None, ...]] = []

    def use(self) -> tuple[int | None, ...]:
        """Begin a use, and return the tasks that end the earlier use of the same buffer."""
        self.uses += 1
        # Buffers are used in turns, so that a use waits for the last but one.
        return self.ended[self.uses - BUFFERS - 1] if self.uses > BUFFERS else ()


class KeptPass:
    """The offloaded blocks of one pass, while its tasks are added."""

    def __init__(
        self,
        step: Activations,
        buffers: _Buffers,
        position: int,
        action: Action,
        blocks: Sequence[KeptShape],
        chain: Running,
        copy: Copy,
    ) -> None:
        self.step, self.buffers, self.position, self.action = step, buffers, position, action
        self.blocks, self.chain, self.copy = blocks, chain, copy
        self.forward = action.kind is ActionKind.FORWARD
        self.ended = 0
        self.back: dict[int, int] = {}
        if not self.forward:
            for number in range(min(BUFFERS, len(blocks))):
                self._fetch(number)

    def before(self, part: int) -> tuple[int | None, ...]:
        """Return what a part waits for: a free buffer in forward, the block's fetched activations in backward."""
        if self.ended == len(self.blocks) or self.blocks[self.ended].first != part:
            return ()
        return self.buffers.use() if self.forward else (self.back.pop(self.ended, None),)

    def after(self, part: int) -> None:
        """Copy the activations of a block that has ended, or fetch those of the block after the next."""
        if self.ended == len(self.blocks) or self.blocks[self.ended].last != part:
            return
        self.ended += 1
        if not self.forward:
            self.buffers.ended.append(self.chain.ends)
            if self.ended + 1 < len(self.blocks):
                self._fetch(self.ended + 1)
        elif not self._stays():
            block = self.blocks[self.ended - 1].block
            copy = self.step.left[self.action, block] = self._copied(TO_HOST, block, self.chain.ends)
            self.buffers.ended.append((copy,))

    def _stays(self) -> bool:
        """Return whether a block's activations are still in a buffer when its backward runs."""
        return self.ended > len(self.blocks) - BUFFERS and self.action in self.step.turning

    def _fetch(self, number: int) -> None:
        """Fetch the activations of a block when a buffer is free, unless they have stayed there."""
        block = self.blocks[number].block
        left = self.step.left.pop((self.action._replace(kind=ActionKind.FORWARD), block), None)
        if left is not None:
            self.back[number] = self._copied(FROM_HOST, block, (*self.buffers.use(), left))

    def _copied(self, kind: str, block: int, after: tuple[int | None, ...]) -> int:
        """Add a copy of a block's activations, and return its task."""
        waits = [(task, self.position) for task in after]
        return self.copy(kind, self.position, ACTIVATIONS, (self.action.stage, block), self.action.microbatch, waits)
