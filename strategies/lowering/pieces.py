"""How finely an action becomes tasks: every operator, every stretch of compute, or the whole action.

All three have the same ticks and the same peak of memory. A whole action hides the transfers of
its collectives: it is exact where nothing else uses the ports of the tensor axis.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from simulator.program import Category, TaskKind
from strategies.lowering.operator import Step
from strategies.lowering.stage import BlockCost, StageCost
from strategies.schedule import ActionKind


class Granularity(StrEnum):
    """What becomes one task."""

    OPERATOR = "operator"
    SEGMENT = "segment"
    ACTION = "action"


class Piece(NamedTuple):
    """One task to be: a step, the memory it changes, and the block that ends with it, if one does."""

    step: Step
    acquired: tuple[tuple[Category, int], ...] = ()
    released: tuple[tuple[Category, int], ...] = ()
    completes: tuple[str, ...] = ()


def pieces(stage: StageCost, kind: ActionKind, granularity: Granularity) -> tuple[Piece, ...]:
    """Return one action of a stage as pieces, in order."""
    if not stage.blocks:
        return (Piece(Step(_task_kind(kind), 0, "empty stage")),)
    if granularity is Granularity.ACTION:
        return (_whole(stage, kind),)
    blocks = stage.blocks if kind is ActionKind.FORWARD else tuple(reversed(stage.blocks))
    return tuple(piece for name, cost in blocks for piece in _block(name, cost, kind, granularity))


def split(stage: StageCost, granularity: Granularity, ends: Iterable[str]) -> tuple[Piece, ...]:
    """Return a backward whose pieces end where the blocks ``ends`` do, for gradients that leave early."""
    if granularity is not Granularity.ACTION or not stage.blocks:
        return pieces(stage, ActionKind.BACKWARD, granularity)
    result: list[Piece] = []
    names: list[str] = []
    ticks = 0
    boundary = set(ends)
    for name, cost in reversed(stage.blocks):
        names.append(name)
        ticks += cost.backward_ticks
        if name in boundary or name == stage.blocks[0][0]:
            result.append(Piece(Step(TaskKind.BACKWARD, ticks, _range(names)), completes=tuple(names)))
            names, ticks = [], 0
    acquired, released = _memory(stage, ActionKind.BACKWARD)
    result[0] = result[0]._replace(acquired=acquired)
    result[-1] = result[-1]._replace(released=released)
    return tuple(result)


def _whole(stage: StageCost, kind: ActionKind) -> Piece:
    ticks = stage.forward_ticks if kind is ActionKind.FORWARD else stage.backward_ticks
    names = [name for name, _ in stage.blocks]
    return Piece(Step(_task_kind(kind), ticks, _range(names)), *_memory(stage, kind), completes=tuple(names))


Change = tuple[tuple[Category, int], ...]


def _memory(stage: StageCost, kind: ActionKind) -> tuple[Change, Change]:
    if kind is ActionKind.FORWARD:
        extra = ((Category.BUFFERS, stage.forward_extra),)
        return ((Category.ACTIVATIONS, stage.kept), *extra), extra
    recomputed, working = stage.backward_extra
    acquired = ((Category.ACTIVATIONS, recomputed), (Category.BUFFERS, working))
    return acquired, ((Category.ACTIVATIONS, recomputed + stage.kept), (Category.BUFFERS, working))


def _block(name: str, cost: BlockCost, kind: ActionKind, granularity: Granularity) -> Iterator[Piece]:
    memory, forward = cost.memory, kind is ActionKind.FORWARD
    steps = list(_merged(cost.steps.forward if forward else cost.steps.backward, granularity))
    held = memory.kept if forward else memory.recomputed
    back = 0 if forward else memory.recomputed + memory.kept
    acquired: Change = ((Category.ACTIVATIONS, held), (Category.BUFFERS, memory.working))
    released: Change = ((Category.ACTIVATIONS, back), (Category.BUFFERS, memory.working))
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        yield Piece(
            step._replace(operators=f"{name}: {step.operators}"),
            acquired if index == 0 else (),
            released if last else (),
            (name,) if last else (),
        )


def _merged(steps: tuple[Step, ...], granularity: Granularity) -> Iterator[Step]:
    if granularity is Granularity.OPERATOR:
        yield from steps
        return
    for key, group in groupby(
        enumerate(steps), lambda pair: (pair[1].kind, pair[0] if pair[1].kind.communicates else -1)
    ):
        members = [step for _, step in group]
        if key[0].communicates:
            yield members[0]
        else:
            yield Step(key[0], sum(step.duration for step in members), _range([s.operators for s in members]))


def _range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _task_kind(kind: ActionKind) -> TaskKind:
    return TaskKind.FORWARD if kind is ActionKind.FORWARD else TaskKind.BACKWARD
