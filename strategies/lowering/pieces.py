"""How one pass through a stage becomes tasks: every operator one, or chains contracted exactly.

A chain of operators and collectives that nothing can disturb is one task; its pieces keep
where each operator starts and ends. Chains are cut where a collective must wait for other
ranks or share links, and where gradients are ready to leave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import NamedTuple

from simulator.deferred import Deferred
from simulator.program import Category, Change, Piece, StreamKind, TaskKind, Work
from simulator.units import to_ticks
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
        After the backward of these blocks: their gradients leave.
    """

    every: bool
    collectives: bool
    blocks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Part:
    """One task to be of a pass.

    Parameters
    ----------
    work
        What the task does; for a collective of its own, without its bytes.
    collective
        The step that is a task of the whole tensor group; ``None`` for a rank's own part.
    completes
        The block whose backward ends with it, if one does.
    lead, rest
        Ticks of launching before the part can run, and until the host has launched all of it.
    communicates
        Whether a collective runs inside the part.
    """

    work: Work
    collective: Step | None
    completes: str | None
    lead: int
    rest: int
    communicates: bool

    @property
    def beside(self) -> bool:
        """Whether the part starts with the next one, and what follows waits for both."""
        return self.collective is not None and self.collective.beside


class _Item(NamedTuple):
    """One step of a pass on its way into a part."""

    step: Step
    label: str
    acquired: tuple[Change, ...]
    released: tuple[Change, ...]
    completes: str | None


def parts(
    names: Sequence[str],
    stage: StageCost,
    index: int,
    kind: ActionKind,
    cut: Cut,
    launch: float,
    before: tuple[Step, ...] = (),
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
    """
    items = partial(_items, names, stage, kind, before)
    if launch or cut.every or cut.collectives or cut.blocks:
        return tuple(_part(chain, index, kind, launch) for chain in _chains(items(), cut))
    ticks = stage.forward_ticks if kind is ActionKind.FORWARD else stage.backward_ticks
    steps = [*before, *(step for cost in dict.fromkeys(stage.blocks) for step in _steps(cost, kind))]
    whole = chain_ticks(before) + ticks
    work = Work(_task_kind(kind), index, whole, Deferred(lambda: _pieces(items())))
    completes = None if not names else names[-1] if kind is ActionKind.FORWARD else names[0]
    return (Part(work, None, completes, 0, 0, any(step.collective is not None for step in steps)),)


def _items(names: Sequence[str], stage: StageCost, kind: ActionKind, before: tuple[Step, ...]) -> "list[_Item]":
    """Return every step of a pass in order."""
    items = [_Item(step, step.operators, (), (), None) for step in before]
    blocks = list(zip(names, stage.blocks, strict=True))
    for name, cost in blocks if kind is ActionKind.FORWARD else reversed(blocks):
        items += _block(name, cost, kind)
    return items or [_Item(Step(_task_kind(kind), 0, "empty stage", 0), "empty stage", (), (), None)]


def _steps(cost: BlockCost, kind: ActionKind) -> tuple[Step, ...]:
    return cost.steps.forward if kind is ActionKind.FORWARD else cost.steps.backward


known_parts = lru_cache(maxsize=1024)(parts)
"""The same, kept: plans that differ elsewhere share their passes."""


def _block(name: str, cost: BlockCost, kind: ActionKind) -> Iterator[_Item]:
    memory, forward = cost.memory, kind is ActionKind.FORWARD
    steps = _steps(cost, kind)
    held = memory.kept if forward else memory.recomputed
    back = 0 if forward else memory.recomputed + memory.kept
    acquired, released = _changes(held, memory.working), _changes(back, memory.working)
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        label = f"{name}: {step.operators}"
        yield _Item(step, label, acquired if index == 0 else (), released if last else (), name if last else None)


def _changes(activations: int, buffers: int) -> tuple[Change, ...]:
    sizes = ((Category.ACTIVATIONS, activations), (Category.BUFFERS, buffers))
    return tuple(Change(category, size) for category, size in sizes if size)


def _chains(items: list[_Item], cut: Cut) -> Iterator[list[_Item]]:
    chain: list[_Item] = []
    meets = False  # whether the next step meets one beside it
    for item in items:
        joint = item.step.collective is not None and (cut.collectives or cut.every)
        if chain and (cut.every or joint):
            yield chain
            chain = []
        chain.append(item)
        if joint or meets or item.completes in cut.blocks:
            yield chain
            chain = []
        meets = joint and item.step.beside
    if chain:
        yield chain


def _part(chain: list[_Item], index: int, kind: ActionKind, launch: float) -> Part:
    joint = len(chain) == 1 and chain[0].step.collective is not None
    ticks = chain[0].step.ticks if joint else chain_ticks(item.step for item in chain)
    work = Work(chain[0].step.kind if joint else _task_kind(kind), index, ticks, Deferred(lambda: _pieces(chain)))
    lead, rest = _launching(chain, launch) if launch else (0, 0)
    communicates = any(item.step.collective is not None for item in chain)
    return Part(work, chain[0].step if joint else None, chain[-1].completes, lead, rest, communicates)


def _pieces(chain: list[_Item]) -> list[Piece]:
    pieces, start, end = [], 0, 0
    for item in chain:
        step = item.step
        stream = stream_of(step) if step.collective is not None else StreamKind.COMPUTE
        pieces.append(Piece(step.kind, item.label, start, start + step.ticks, stream, item.acquired, item.released))
        end = max(end, start + step.ticks)
        start = start if step.beside else end
    return pieces


def stream_of(collective: Step) -> StreamKind:
    """Return the stream of a collective inside a pass: one beside computing has its own."""
    return StreamKind.CONTEXT if collective.beside else StreamKind.TENSOR


def _launching(chain: list[_Item], launch: float) -> tuple[int, int]:
    """Return how long the host launches before a chain can run without a stop, and how long after that.

    With launches l_i and kernels d_i a chain that is reached at time t, its first launch begun at
    time h, ends at max(t + sum d, h + max_i(l_1 + .. + l_i + d_i + .. + d_n)): as if it could begin
    at h + lead with lead = max_i(l_1 + .. + l_i - d_1 - .. - d_{i-1}).
    """
    launched = done = lead = 0
    for item in chain:
        launched += to_ticks(launch * item.step.launches)
        lead = max(lead, launched - done)
        done += 0 if item.step.beside else item.step.ticks
    return lead, launched - lead


def _task_kind(kind: ActionKind) -> TaskKind:
    return TaskKind.FORWARD if kind is ActionKind.FORWARD else TaskKind.BACKWARD
