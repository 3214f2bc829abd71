"""Random programs: several rank classes and streams, rendezvous, shared links, any order of tasks."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hypothesis import strategies as st

from meshwise.simulator.program import (
    Category,
    Change,
    LinkClass,
    Program,
    RankClass,
    Stream,
    StreamKind,
    Task,
    TaskKind,
    program_of,
)

KINDS = (
    TaskKind.FORWARD,
    TaskKind.BACKWARD,
    TaskKind.DATA_COMMUNICATION,
    TaskKind.TENSOR_COMMUNICATION,
    TaskKind.HOST_COPY,
)
STREAMS = (
    StreamKind.COMPUTE,
    StreamKind.TENSOR,
    StreamKind.DATA,
    StreamKind.SEND_FORWARD,
    StreamKind.RECEIVE_FORWARD,
    StreamKind.SEND_BACKWARD,
    StreamKind.RECEIVE_BACKWARD,
)
DURATIONS = (0, 0, 1, 2, 3, 1000, 2500, 4999)
TICK = 1e-12
"""Bytes that a link of 1 byte/s moves in one tick."""
USAGES = (
    (),
    ((0, 1000 * TICK),),
    ((0, 3001 * TICK), (1, 500 * TICK)),
    ((1, 2000 * TICK),),
    ((1, 777 * TICK), (2, 777 * TICK)),
    ((2, 0.0),),
)
LINKS = tuple(LinkClass(f"link {index}", 1.0) for index in range(3))
MEMORY = (
    (),
    (),
    (Change(Category.ACTIVATIONS, 7),),
    (Change(Category.BUFFERS, 5), Change(Category.GRADIENTS, 2, True)),
)

FIELDS = {"stream": 9, "second": 12, "duration": len(DURATIONS), "near": 7, "far": 13}
MORE = {"usage": len(USAGES), "kind": len(KINDS), "memory": len(MEMORY), "place": 10}
"""What a task is drawn from: a stream, a second where there is one of that number, predecessors so many
tasks before, and its place among tasks that streams do not order. Two numbers hold it: fewer draws, faster."""


class Row(NamedTuple):
    stream: int
    second: int
    duration: int
    near: int
    far: int
    usage: int
    kind: int
    memory: int
    place: int


def _row(codes: tuple[int, int]) -> Row:
    digits = []
    for code, sizes in zip(codes, (FIELDS, MORE), strict=True):
        for size in sizes.values():
            code, digit = divmod(code, size)
            digits.append(digit)
    return Row(*digits)


_ROWS = st.lists(
    st.tuples(st.integers(0, prod(FIELDS.values()) - 1), st.integers(0, prod(MORE.values()) - 1)),
    min_size=1,
    max_size=14,
)


@st.composite
def programs(draw: st.DrawFn, flows: bool = False) -> Program:
    """Return a program that can finish; tasks are not in topological order, streams are kept."""
    classes, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = [_row(codes) for codes in draw(_ROWS)]
    tasks = in_other_order([_task(row, index, classes * kinds, flows) for index, row in enumerate(rows)], rows)
    return program(tasks, classes, kinds)


def program(tasks: Sequence[Task], classes: int = 1, kinds: int = 1) -> Program:
    """Return the program of tasks on ``classes`` rank classes with ``kinds`` streams each."""
    streams = [Stream(index, kind) for index in range(classes) for kind in STREAMS[:kinds]]
    members = [RankClass(f"stage {index}", (index,), (2 * index, 2 * index + 1)) for index in range(classes)]
    return program_of(members, streams, tasks, links=LINKS)


def _task(row: Row, index: int, num_streams: int, flows: bool) -> Task:
    streams = {row.stream % num_streams} | ({row.second} if row.second < num_streams else set())
    before = {index - distance for distance in (row.near, row.far) if 0 < distance <= index}
    return Task(
        KINDS[row.kind],
        tuple(sorted(streams)),
        DURATIONS[row.duration],
        tuple(sorted(before)),
        USAGES[row.usage] if flows else (),
        stage=row.stream % 3,
        microbatch=index % 4 - 1,
        operators=f"operator {index}",
        acquisitions=MEMORY[row.memory],
        releases=MEMORY[row.memory],
    )


def in_other_order(tasks: Sequence[Task], rows: Sequence[Row]) -> list[Task]:
    """Return the tasks in an order that keeps every stream's, but not that of predecessors."""
    order: list[int] = []
    left = list(range(len(tasks)))
    while left:
        held: set[int] = set()
        free = []
        for index in left:
            if held.isdisjoint(tasks[index].streams):
                free.append(index)
            held |= set(tasks[index].streams)
        chosen = min(free, key=lambda index: rows[index].place)
        order.append(chosen)
        left.remove(chosen)
    place = {old: new for new, old in enumerate(order)}
    return [tasks[old]._replace(predecessors=tuple(place[p] for p in tasks[old].predecessors)) for old in order]
