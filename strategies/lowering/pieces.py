"""How one pass through a stage becomes tasks: every operator one, or chains contracted exactly.

A chain of operators and collectives that nothing can disturb is one task; its pieces keep
where each operator starts and ends. Chains are cut where a collective must wait for other
ranks or share links, and where gradients are ready to leave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from simulator.deferred import Deferred
from simulator.program import Category, Change, Piece, StreamKind, TaskKind, Work
from simulator.units import to_ticks
from strategies.lowering.fully_sharded import NOTHING, Changes
from strategies.lowering.stage import BlockCost, StageCost
from strategies.lowering.step import Step, chain_ticks
from strategies.schedule import ActionKind


class Granularity(StrEnum):
    """What becomes one task."""

    OPERATOR = "operator"
    CHAIN = "chain"


class Cut(NamedTuple):
    """Where a pass is cut into tasks.

    Parameters
    ----------
    every
        After every step.
    collectives
        Around every collective: it waits for other rank classes, or shares links.
    blocks
        After these blocks: their gradients leave, or the parameters of the next must have come.
    losses
        After the backward of a loss: then parameters begin to come.
    """

    every: bool
    collectives: bool
    blocks: frozenset[str] = frozenset()
    losses: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One task to be of a pass.

    Parameters
    ----------
    name
        What its first step is called, or its first block where it is several whole ones.
    work
        What the task does; for a collective of its own, without its bytes.
    collective
        The step that is a task of the whole tensor group; ``None`` for a rank's own part.
    completes
        The block whose backward ends with it, if one does.
    ends_loss
        Whether the backward of a loss ends with it.
    lead, rest
        Ticks of launching before the part can run, and until the host has launched all of it.
    communicates
        Whether a collective runs inside the part.
    """

    name: str
    work: Work
    collective: Step | None
    completes: str | None
    ends_loss: bool
    lead: int
    rest: int
    communicates: bool

    @property
    def beside(self) -> bool:
        """Whether the part starts with the next one, and what follows waits for both."""
        return self.collective is not None and self.collective.beside


class _Item(NamedTuple):
    """One step of a pass on its way into a part: of a block, or of none."""

    step: Step
    block: str | None
    acquired: tuple[Change, ...]
    released: tuple[Change, ...]
    completes: str | None
    ends_loss: bool = False
    copies: bool = False

    @property
    def label(self) -> str:
        """What its piece is called."""
        return f"{self.block}: {self.step.operators}" if self.block is not None else self.step.operators


_Block = tuple[str, BlockCost, Changes, int]
"""A block of a stage by name, its cost, what it takes and gives back besides activations, and the ticks of copying."""


def parts(
    names: Sequence[str],
    stage: StageCost,
    index: int,
    kind: ActionKind,
    cut: Cut,
    launch: float,
    before: tuple[Step, ...] = (),
    held: tuple[Changes, ...] = (),
    copies: tuple[int, ...] = (),
) -> tuple[Part, ...]:
    """Return one pass of stage number ``index`` in parts, in order.

    Parameters
    ----------
    names
        The names of its blocks.
    launch
        Seconds in which the host launches one kernel.
    before
        Collectives that run first, on what arrives from another stage.
    held
        What the blocks, in the order of the pass, take and give back besides activations.
    copies
        Ticks in which gradients are copied after each of them.
    """
    turn = 1 if kind is ActionKind.FORWARD else -1
    besides = held or (NOTHING,) * len(names), copies or (0,) * len(names)
    blocks = list(zip(names[::turn], stage.blocks[::turn], *besides, strict=True))
    if launch or cut.every or cut.collectives:
        return tuple(_part(items, index, kind, launch) for items in _chains(_items(blocks, kind, before), cut))
    ends = [place for place, (name, *_) in enumerate(blocks, 1) if name in cut.blocks or place == len(blocks)]
    rows = [blocks[start:end] for start, end in pairwise([0, *ends])] or [blocks]
    found: list[Part] = []
    for place, row in enumerate(rows):
        first = () if place else before
        if any(copy or (cut.losses and cost.first_reading(kind)) for _, cost, _, copy in row):
            found += (_part(items, index, kind, launch) for items in _chains(_items(row, kind, first), cut))
        else:
            found.append(_whole(row, index, kind, first))
    return tuple(found)


def _whole(blocks: list[_Block], index: int, kind: ActionKind, before: tuple[Step, ...]) -> Part:
    """Return a part of whole blocks, whose steps are looked at when its pieces are asked for."""
    ticks = chain_ticks(before) + sum(cost.ticks(kind) for _, cost, *_ in blocks)
    work = Work(_TASK_KIND[kind], index, ticks, Deferred(lambda: _pieces(_items(blocks, kind, before))))
    steps = chain(before, *(cost.steps_of(kind) for _, cost, *_ in blocks))
    communicates = any(step.collective is not None for step in steps)
    first, last = (blocks[0][0], blocks[-1][0]) if blocks else ("empty stage", None)
    return Part(first, work, None, last, ends_loss=False, lead=0, rest=0, communicates=communicates)


def _items(blocks: list[_Block], kind: ActionKind, before: tuple[Step, ...]) -> list[_Item]:
    """Return every step of a pass in order."""
    items = [_Item(step, None, (), (), None) for step in before]
    for block in blocks:
        items += _block(*block, kind)
    return items or [_Item(Step(_TASK_KIND[kind], 0, "empty stage", 0), None, (), (), None)]


known_parts = lru_cache(maxsize=1024)(parts)
"""The same, kept: plans that differ elsewhere share their passes."""


def _block(name: str, cost: BlockCost, besides: Changes, copy: int, kind: ActionKind) -> Iterator[_Item]:
    memory, steps = cost.memory, cost.steps_of(kind)
    taken, given = memory.changes(kind)
    working, of_loss, unmade = memory.working(kind), memory.of_loss(kind), min(taken, 0)
    begins = _changes(taken - unmade, working, unmade) + besides.acquired
    ends = _changes(given - unmade, working - of_loss, unmade) + besides.released
    reading = cost.first_reading(kind)
    for index, step in enumerate(steps):
        acquired = (begins if index == 0 else ()) + (besides.gathered if index == reading else ())
        ends_loss, last = index == reading - 1, index == len(steps) - 1
        released = (_changes(0, of_loss, 0) if ends_loss else ()) + (ends if last else ())
        yield _Item(step, name, acquired, released, name if last and not copy else None, ends_loss)
    if copy:
        step = Step(_TASK_KIND[kind], copy, "copy of gradients")
        copied = (Change(Category.BUFFERS, besides.copied),)
        yield _Item(step, name, copied, copied + besides.left, name, copies=True)


def _changes(activations: int, buffers: int, gradients: int) -> tuple[Change, ...]:
    """Return what a block takes or gives back; ``gradients``, below 0, are those that count already but come later."""
    sizes = ((Category.ACTIVATIONS, activations), (Category.BUFFERS, buffers), (Category.GRADIENTS, gradients))
    return tuple(Change(category, size) for category, size in sizes if size)


def _chains(items: list[_Item], cut: Cut) -> Iterator[list[_Item]]:
    found: list[_Item] = []
    meets = False  # whether the next step meets one beside it
    for item in items:
        joint = item.step.collective is not None and (cut.collectives or cut.every)
        if found and (cut.every or joint or item.copies):
            yield found
            found = []
        found.append(item)
        if joint or meets or item.completes in cut.blocks or (cut.losses and item.ends_loss):
            yield found
            found = []
        meets = joint and item.step.beside
    if found:
        yield found


def _part(items: list[_Item], index: int, kind: ActionKind, launch: float) -> Part:
    joint = len(items) == 1 and items[0].step.collective is not None
    ticks = items[0].step.ticks if joint else chain_ticks(item.step for item in items)
    work = Work(
        items[0].step.kind if joint else _TASK_KIND[kind], index, ticks, Deferred(lambda: _pieces(items, launch))
    )
    lead, rest = _launching(items, launch) if launch else (0, 0)
    communicates = any(item.step.collective is not None for item in items)
    step, last = items[0].step if joint else None, items[-1]
    return Part(items[0].label, work, step, last.completes, last.ends_loss, lead, rest, communicates)


def _pieces(items: list[_Item], launch: float = 0.0) -> list[Piece]:
    pieces, start, end, launched = [], 0, 0, 0
    for item in items:
        step = item.step
        launched += to_ticks(launch * step.launches)
        stream = StreamKind.COMPUTE if step.collective is None else _stream(step)
        moved = step.size if step.collective is not None else 0.0
        changes = item.acquired, item.released
        waits = launched if step.launches else 0  # a kernel that is launched with an earlier one waits for none itself
        pieces.append(Piece(step.kind, item.label, start, start + step.ticks, stream, *changes, moved, waits))
        end = max(end, start + step.ticks)
        start = start if step.beside else end
    return pieces


def _stream(collective: Step) -> StreamKind:
    """Return the stream of a collective inside a pass: one beside computing has its own."""
    return StreamKind.CONTEXT if collective.beside else StreamKind.TENSOR


def _launching(items: list[_Item], launch: float) -> tuple[int, int]:
    """Return how long the host launches before a chain can run without a stop, and how long after that.

    With launches l_i, and e_i ticks from the start of kernel i to the end of the chain, it ends at
    max(t + e_1, h + max_i(l_1 + .. + l_i + e_i)) where it is reached at time t and its first launch begins at
    time h: as if it could begin at h + lead with lead = max_i(l_1 + .. + l_i + e_i) - e_1.
    """
    launched = done = lead = 0
    together: list[tuple[int, int]] = []  # kernels that start at once: when each is launched, and its ticks
    for item in items:
        launched += to_ticks(launch * item.step.launches)
        together.append((launched if item.step.launches else 0, item.step.ticks))
        if not item.step.beside or item is items[-1]:
            done += max(ticks for _, ticks in together)
            lead = max(lead, *(at + ticks - done for at, ticks in together))
            together = []
    return lead, launched - lead


_TASK_KIND = {
    ActionKind.FORWARD: TaskKind.FORWARD,
    ActionKind.BACKWARD: TaskKind.BACKWARD,
    ActionKind.INPUT: TaskKind.BACKWARD,
    ActionKind.WEIGHT: TaskKind.WEIGHT_GRADIENT,
}
