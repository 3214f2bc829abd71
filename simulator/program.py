"""The simulator's input language: tasks on in-order streams of rank classes.

A rank class stands for ranks that do the same at the same time; one of them is
simulated. Tasks that name several streams are a rendezvous: they start when all of
those streams reach them, and hold all of them.

A program is columns, not objects: what tasks do is said once in `Work`, what they move
once in a `Flow`, and each task points at both. Rows of different lengths are one column of
where each starts and one of all their values. `Task` and `program_of` are for programs
written by hand.

Two things make programs quickly: sequences that are made when they are first asked for, and the
cyclic garbage collector kept out of work that makes many objects and no cycles.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief, in_brief, items

IntArray = NDArray[np.int64]


class TaskKind(StrEnum):
    """What a task is, for lanes, colours and sums."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight gradient"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    TENSOR_COMMUNICATION = "tensor communication"
    EXPERT_COMMUNICATION = "expert communication"
    CONTEXT_COMMUNICATION = "context communication"
    PIPELINE_COMMUNICATION = "pipeline communication"
    DATA_COMMUNICATION = "data communication"
    HOST_COPY = "host copy"
    LAUNCH = "launch"

    @property
    def communicates(self) -> bool:
        """Whether the task moves data between ranks."""
        return self in _COMMUNICATION

    @property
    def inside_passes(self) -> bool:
        """Whether the task moves data between ranks of one stage while it runs a pass."""
        return self in _INSIDE

    @property
    def computes(self) -> bool:
        """Whether the task keeps the device's processors busy."""
        return self in _COMPUTE


_INSIDE = frozenset({TaskKind.TENSOR_COMMUNICATION, TaskKind.EXPERT_COMMUNICATION, TaskKind.CONTEXT_COMMUNICATION})
_COMMUNICATION = _INSIDE | {TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION}
_COMPUTE = frozenset(
    {TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.RECOMPUTE, TaskKind.OPTIMIZER}
)


class StreamKind(StrEnum):
    """The in-order queues of one rank."""

    COMPUTE = "compute"
    TENSOR = "tensor"
    CONTEXT = "context"
    SEND_FORWARD = "send forward"
    RECEIVE_FORWARD = "receive forward"
    SEND_BACKWARD = "send backward"
    RECEIVE_BACKWARD = "receive backward"
    DATA = "data"
    TO_HOST = "to host"
    FROM_HOST = "from host"
    LAUNCH = "launch"
    HOST = "host"
    GATHER = "gather"
    REPLICA = "replica"


class Category(StrEnum):
    """What memory holds."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"


class Stream(NamedTuple):
    """An in-order queue of one rank class."""

    rank_class: int
    kind: StreamKind


@in_brief
class RankClass(NamedTuple):
    """Ranks that behave alike: their pipeline ``stages`` (one a chunk) and who they are."""

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def representative(self) -> int:
        """The rank that is simulated for all."""
        return self.ranks[0]


@in_brief
class HostClass(NamedTuple):
    """Hosts that behave alike: ``members`` are (rank class, ranks of it on one such host)."""

    name: str
    capacity: float
    members: tuple[tuple[int, int], ...]


class Change(NamedTuple):
    """Bytes that a piece takes or gives back on every rank class of its task, on device or host."""

    category: Category
    size: int
    host: bool = False


@in_brief
class Piece(NamedTuple):
    """A stretch of a task: ticks from the task's start, and what it does.

    ``stream`` is the kind of stream that shows it, held or not; ``None`` for all that the task holds. ``bytes`` are
    those of the message that it communicates; phases after the first carry none, so that sums count a message once.
    ``launched`` are the ticks from when the host begins to launch its task until it has launched the piece, 0 where it
    need not.
    """

    kind: TaskKind
    operators: str
    start: int
    end: int
    stream: StreamKind | None = None
    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()
    bytes: float = 0.0
    launched: int = 0


@in_brief
class Work(NamedTuple):
    """What tasks do, the same for every microbatch.

    ``duration`` is in ticks; for a task with a flow, its latency before the bytes move.
    ``pieces`` cover it in order.
    """

    kind: TaskKind
    stage: int
    duration: int
    pieces: Sequence[Piece]


@in_brief
class Flow(NamedTuple):
    """Bytes over each link, by index into the program's links, all in proportion.

    A flow may stand for several equal transfers; ``unit`` are the bytes of one of them on its
    busiest link, for the network's fairness is among transfers. 0 stands for one transfer.
    """

    usage: tuple[tuple[int, float], ...]
    unit: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links that carry the same at the same time: a name, byte/s of one, and how many there are."""

    name: str
    bandwidth: float
    count: int = 1


class Background(NamedTuple):
    """A flow of another tenant: started at ``start`` and every ``period`` ticks, never twice at once.

    ``latency`` ticks pass before its bytes move.
    """

    name: str
    flow: Flow
    latency: int
    period: int
    start: int


class MemoryChange(NamedTuple):
    """Bytes that one rank class holds, on its device or on its host."""

    rank_class: int
    category: Category
    size: int
    host: bool = False


@in_brief
class Steps(NamedTuple):
    """Steps that a program runs in a row without a flush.

    Parameters
    ----------
    tasks
        For every step its tasks, those of all steps in the same order: [step, task]. What waits for no other stream,
        and so may be ever further ahead, is left out.
    depth
        How many steps before its own a task waits for at most; so many of the last ones feel that no more follow.
    """

    tasks: IntArray
    depth: int


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks of one training step, or of several in a row; a stream runs its tasks in the order of their index.

    Parameters
    ----------
    work_of, flow_of, microbatch_of
        For every task: index into ``work``; into ``flows``, -1 for none; microbatch, -1 for none.
    stream_start, stream_of
        Task ``t`` holds the streams ``stream_of[stream_start[t]:stream_start[t + 1]]``.
    predecessor_start, predecessor_of
        The same for tasks that end before it starts, besides those before it on its streams.
    resident
        Memory that is held for the whole step.
    capacity
        Bytes of device memory of every rank class.
    links
        What flows share.
    traffic
        Bytes that each link carries in one step inside tasks whose transfers nothing can disturb.
    slowdown
        Factor by which computing of a rank class takes longer while one of its data
        communications moves bytes; only tasks of one piece and one class are slowed.
    steps
        Where it is several steps, the tasks of each; ``None`` for one.
    """

    rank_classes: tuple[RankClass, ...]
    streams: tuple[Stream, ...]
    work: tuple[Work, ...]
    flows: tuple[Flow, ...]
    work_of: IntArray
    flow_of: IntArray
    microbatch_of: IntArray
    stream_start: IntArray
    stream_of: IntArray
    predecessor_start: IntArray
    predecessor_of: IntArray
    resident: tuple[MemoryChange, ...]
    capacity: tuple[float, ...]
    links: tuple[LinkClass, ...] = ()
    traffic: tuple[float, ...] = ()
    hosts: tuple[HostClass, ...] = ()
    background: tuple[Background, ...] = ()
    slowdown: float = 1.0
    steps: Steps | None = None

    __repr__ = brief("num_tasks", "rank_classes", "work", "hosts", "links", "steps")

    @property
    def num_tasks(self) -> int:
        """Tasks in all."""
        return len(self.work_of)

    def streams_of(self, task: int) -> tuple[int, ...]:
        """Return the streams that a task holds."""
        return tuple(self.stream_of[self.stream_start[task] : self.stream_start[task + 1]].tolist())

    def predecessors_of(self, task: int) -> tuple[int, ...]:
        """Return the tasks that end before ``task`` starts, besides those before it on its streams."""
        return tuple(self.predecessor_of[self.predecessor_start[task] : self.predecessor_start[task + 1]].tolist())


@in_brief
class Task(NamedTuple):
    """One unit of work of a program written by hand.

    Parameters
    ----------
    streams
        Indices of the streams it holds while it runs.
    duration
        Ticks of its own; for a communication with a ``usage``, its latency.
    predecessors
        Indices of tasks that end before it starts, besides those before it on its streams.
    usage
        Bytes that it moves over links, by index.
    acquired, released
        Memory taken at its start and given back at its end, on every rank class of its streams.
    """

    kind: TaskKind
    streams: tuple[int, ...]
    duration: int
    predecessors: tuple[int, ...] = ()
    usage: tuple[tuple[int, float], ...] = ()
    stage: int = 0
    microbatch: int = -1
    operators: str = ""
    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()


def program_of(
    rank_classes: Sequence[RankClass],
    streams: Sequence[Stream],
    tasks: Sequence[Task],
    *,
    resident: Sequence[MemoryChange] = (),
    capacity: float = float("inf"),
    links: Sequence[LinkClass] = (),
    hosts: Sequence[HostClass] = (),
) -> Program:
    """Return the program of tasks written by hand."""
    work: dict[Work, int] = {}
    flows: dict[Flow, int] = {}
    work_of, flow_of = [], []
    for task in tasks:
        piece = Piece(task.kind, task.operators, 0, task.duration, None, task.acquired, task.released)
        item = Work(task.kind, task.stage, task.duration, (piece,))
        work_of.append(work.setdefault(item, len(work)))
        flow_of.append(flows.setdefault(Flow(task.usage), len(flows)) if task.usage else -1)
    stream_start, stream_of = ragged([task.streams for task in tasks])
    predecessor_start, predecessor_of = ragged([task.predecessors for task in tasks])
    return Program(
        tuple(rank_classes),
        tuple(streams),
        tuple(work),
        tuple(flows),
        np.array(work_of, dtype=np.int64),
        np.array(flow_of, dtype=np.int64),
        np.array([task.microbatch for task in tasks], dtype=np.int64),
        stream_start,
        stream_of,
        predecessor_start,
        predecessor_of,
        tuple(resident),
        (capacity,) * len(rank_classes),
        tuple(links),
        hosts=tuple(hosts),
    )


def ragged(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return rows of different lengths as where each starts (and the last ends), and all of them.

    >>> [column.tolist() for column in ragged([(3, 4), (), (5,)])]
    [[0, 2, 2, 3], [3, 4, 5]]
    """
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([value for row in rows for value in row], dtype=np.int64)


def expand(start: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """Return for the rows ``chosen`` the place in ``chosen`` and the index of each of their values.

    >>> [column.tolist() for column in expand(np.array([0, 2, 2, 3]), np.array([2, 0]))]
    [[0, 1, 1], [2, 0, 1]]
    """
    first = start[chosen]
    length = start[chosen + 1] - first
    place = np.repeat(np.arange(len(chosen)), length)
    return place, np.arange(len(place)) + np.repeat(first - np.cumsum(length) + length, length)


T = TypeVar("T")


class Deferred(Sequence[T], Generic[T]):
    """The values that ``make`` returns, when they are first asked for; equal to any sequence of the same.

    >>> from functools import partial
    >>> Deferred(partial(range, 3)) == (0, 1, 2)
    True
    """

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make = make

    @cached_property
    def _values(self) -> tuple[T, ...]:
        return tuple(self._make())

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._values[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._values == tuple(other)

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return items(self)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector out: it walks all objects again and again, and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
