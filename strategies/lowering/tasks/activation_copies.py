"""Activations on their way to the host and back: the order of copies, through two buffers on the device.

What this rests on is in `meshwise.strategies.lowering.tasks.contents`.
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
"""Adds a copy of a kind, at a position, of what, by key and microbatch, after others; returns its number."""

BUFFERS = 2


class KeptShape(NamedTuple):
    """A block of a pass whose activations are on the host in between: its first and last part, and its number."""

    first: int
    last: int
    block: int


class Running(Protocol):
    """What runs one after another."""

    @property
    def ends(self) -> tuple[int | None, ...]:
        """The tasks with which all so far ends."""
        ...


class Activations:
    """The activations of one step that are on hosts between passes, while its tasks are added."""

    def __init__(self, order: Schedule) -> None:
        self.left: dict[tuple[Action, int], int] = {}
        self._buffers = [_Buffers() for _ in range(order.num_ranks)]
        self._order = order

    def begin(self, action: Action, blocks: Sequence[KeptShape], chain: Running, copy: Copy) -> "KeptPass":
        """Return the blocks of a pass, of which none has run."""
        position = self._order.rank_of(action.stage)
        return KeptPass(self, self._buffers[position], position, action, blocks, chain, copy)

    @cached_property
    def turning(self) -> frozenset[Action]:
        """The forwards that the backward of the same microbatch follows at once."""
        pairs = (pair for actions in self._order.orders for pair in pairwise(actions))
        return frozenset(one for one, two in pairs if two == one._replace(kind=ActionKind.BACKWARD))


class _Buffers:
    """The buffers of one rank; ``ended`` are the ends of uses in their order, each the tasks with which it ends."""

    def __init__(self) -> None:
        self.uses = 0
        self.ended: list[tuple[int | None, ...]] = []

    def use(self) -> tuple[int | None, ...]:
        """Begin a use; return what ends the one that leaves a buffer free for it."""
        self.uses += 1
        return self.ended[self.uses - BUFFERS - 1] if self.uses > BUFFERS else ()


class KeptPass:
    """The blocks of one pass whose activations are on the host in between, while its tasks are added."""

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
        """Return what a part waits for: a free buffer, or what a block's forward has kept."""
        if self.ended == len(self.blocks) or self.blocks[self.ended].first != part:
            return ()
        return self.buffers.use() if self.forward else (self.back.pop(self.ended, None),)

    def after(self, part: int) -> None:
        """Copy what a block has kept when it has ended, or fetch what the next but one needs."""
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
        """Return whether what the block has kept is still in a buffer when its backward comes."""
        return self.ended > len(self.blocks) - BUFFERS and self.action in self.step.turning

    def _fetch(self, number: int) -> None:
        """Fetch what a block has kept when a buffer is free, unless it has stayed."""
        block = self.blocks[number].block
        left = self.step.left.pop((self.action._replace(kind=ActionKind.FORWARD), block), None)
        if left is not None:
            self.back[number] = self._copied(FROM_HOST, block, (*self.buffers.use(), left))

    def _copied(self, kind: str, block: int, after: tuple[int | None, ...]) -> int:
        waits = [(task, self.position) for task in after]
        return self.copy(kind, self.position, ACTIVATIONS, (self.action.stage, block), self.action.microbatch, waits)
