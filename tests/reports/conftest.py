"""Timelines made straight from a schedule: every rank starts each action as soon as it can."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from meshwise.simulator.memory import MemoryProfile
from meshwise.simulator.program import Category, HostClass, MemoryChange, RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.schedules.schedule import Action, ActionKind, Schedule, build_schedule

from ..simulator.profiles import sweep
from ..strategies.schedules.unit_time import held

GIB = 2**30


class Model(NamedTuple):
    """Seconds of the parts of a step, how finely passes are cut, and bytes of a rank on the only host."""

    forward: float = 0.010
    backward: float = 0.020
    recompute: float = 0.0
    send: float = 0.0005
    data: float = 0.060
    optimizer: float = 0.015
    launch: float = 0.0
    host_copy: float = 0.0
    offloaded: int = 0
    layers: int = 1
    tensor: bool = False
    group: int = 1
    source: str = "simulated"
    engine: str = "discrete_event"

    def length(self, action: Action) -> float:
        return self.forward if action.kind is ActionKind.FORWARD else self.backward + self.recompute


@pytest.fixture(scope="session")
def step() -> Callable[..., Timeline]:
    """Return a function of schedule name, ranks, microbatches, chunks and fields of `Model` to a timeline."""

    def build(name: str = "1f1b", ranks: int = 2, microbatches: int = 4, chunks: int = 1, **fields: object) -> Timeline:
        return timeline(build_schedule(name, ranks, microbatches, chunks), Model(**fields))  # type: ignore[arg-type]

    return build


def timeline(order: Schedule, model: Model) -> Timeline:
    ends = _finish(order, model)
    spans: list[Span] = []
    for rank, actions in enumerate(order.orders):
        for action in actions:
            spans += _pass(rank, action, ends[action], model)
            spans += _sends(order, rank, action, ends[action], model)
            spans += _launch(rank, action, ends[action], model)
        spans += _tail(rank, max(ends[a] for a in actions), model)
    spans.sort(key=lambda span: (span.start, span.end, span.rank_class))
    classes = tuple(
        RankClass(
            f"pipeline {rank}", order.list_stages(rank), tuple(range(rank * model.group, (rank + 1) * model.group))
        )
        for rank in range(order.num_ranks)
    )
    memory = tuple(_memory(order, rank, ends, model) for rank in range(order.num_ranks))
    host = HostClass("host 0", 1000 * GIB, tuple((rank, model.group) for rank in range(order.num_ranks)))
    held = MemoryChange(0, Category.OPTIMIZER, model.offloaded * model.group * order.num_ranks)
    return Timeline(
        model.source,
        classes,
        tuple(spans),
        memory,
        max(span.end for span in spans),
        model.engine,
        hosts=(host,),
        host_memory=(sweep(0, host.capacity, (held,), ()),),
    )


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    if action.kind is ActionKind.FORWARD:
        if action.stage:
            yield action._replace(stage=action.stage - 1)
    elif action.stage < num_stages - 1:
        yield action._replace(stage=action.stage + 1)
    else:
        yield action._replace(kind=ActionKind.FORWARD)


def _finish(order: Schedule, model: Model) -> dict[Action, float]:
    ends: dict[Action, float] = {}
    place, free = [0] * order.num_ranks, [0.0] * order.num_ranks
    while any(place[rank] < len(actions) for rank, actions in enumerate(order.orders)):
        for rank, actions in enumerate(order.orders):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                needs = list(_needs(action, order.num_stages))
                if any(need not in ends for need in needs):
                    break
                ready = (ends[need] + model.send * (need.stage != action.stage) for need in needs)
                ends[action] = free[rank] = round(max([free[rank], *ready]) + model.length(action), 9)
                place[rank] += 1
    return ends


def _pass(rank: int, action: Action, end: float, model: Model) -> Iterator[Span]:
    """Yield the spans of a pass: a layer's recomputation and compute, each with tensor communication after it."""
    parts = [(TaskKind.FORWARD, model.forward)]
    if action.kind is ActionKind.BACKWARD:
        parts = [(TaskKind.RECOMPUTE, model.recompute), (TaskKind.BACKWARD, model.backward)]
    clock = round(end - model.length(action), 9)
    who = (action.stage, action.microbatch)
    for layer in range(model.layers):
        for kind, total in parts:
            if total:
                after = clock + total / model.layers
                halfway = clock + 0.85 * (after - clock) if model.tensor else after
                yield Span(rank, StreamKind.COMPUTE, kind, *who, f"layers.{layer}", clock, halfway)
                if model.tensor:
                    tensor = (StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION)
                    yield Span(rank, *tensor, *who, f"layers.{layer}.output", halfway, after)
                clock = after


def _sends(order: Schedule, rank: int, action: Action, end: float, model: Model) -> Iterator[Span]:
    forward = action.kind is ActionKind.FORWARD
    target = action.stage + (1 if forward else -1)
    if 0 <= target < order.num_stages and order.num_ranks > 1 and model.send:
        streams = (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD)
        streams = streams if forward else (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD)
        for who, stream in zip((rank, order.find_rank(target)), streams, strict=True):
            kind = TaskKind.PIPELINE_COMMUNICATION
            yield Span(who, stream, kind, action.stage, action.microbatch, "activation", end, end + model.send)


def _launch(rank: int, action: Action, end: float, model: Model) -> Iterator[Span]:
    """Yield what the processor does to launch a pass, while it runs."""
    if model.launch:
        start = round(end - model.length(action), 9)
        who = (TaskKind.LAUNCH, action.stage, action.microbatch)
        yield Span(rank, StreamKind.LAUNCH, *who, "layers", start, start + model.launch)


def _tail(rank: int, end: float, model: Model) -> Iterator[Span]:
    """Yield the reduction of gradients, the optimizer, its copies to and from the host, and the gathering."""
    start = end + model.data / 2
    later = start + model.optimizer
    if model.data:
        yield Span(rank, StreamKind.DATA, TaskKind.DATA_COMMUNICATION, rank, -1, "reduce", end, start)
        yield Span(
            rank, StreamKind.DATA, TaskKind.DATA_COMMUNICATION, rank, -1, "gather", later, later + model.data / 2
        )
    if model.host_copy:
        for stream, moment in ((StreamKind.TO_HOST, start), (StreamKind.FROM_HOST, later)):
            yield Span(rank, stream, TaskKind.HOST_COPY, rank, -1, "states", moment, moment + model.host_copy)
    yield Span(rank, StreamKind.COMPUTE, TaskKind.OPTIMIZER, rank, -1, "adamw", start, later)


def _memory(order: Schedule, rank: int, ends: dict[Action, float], model: Model) -> MemoryProfile:
    sizes = ((Category.PARAMETERS, 6), (Category.GRADIENTS, 12), (Category.OPTIMIZER, 9), (Category.BUFFERS, 1))
    resident = [MemoryChange(rank, category, size * GIB) for category, size in sizes]
    size = 40 * GIB // max(held(order)[0], 1)
    changes = []
    for action in order.orders[rank]:
        start = round(ends[action] - model.length(action), 9)
        if action.kind is ActionKind.FORWARD:
            changes.append((start, MemoryChange(rank, Category.ACTIVATIONS, size)))
        else:
            changes.append((ends[action], MemoryChange(rank, Category.ACTIVATIONS, -size)))
            changes.append((start, MemoryChange(rank, Category.BUFFERS, GIB)))
            changes.append((ends[action], MemoryChange(rank, Category.BUFFERS, -GIB)))
    return sweep(rank, 80 * GIB, resident, changes)
