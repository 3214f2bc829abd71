"""Programs, the input of the simulator: tasks on in-order streams of rank classes.

A rank class stands for ranks that do the same at the same time; one of them is simulated. A task of several streams
is a rendezvous: it starts when all of its streams reach it, and occupies all of them.

A program is stored in columns, not objects. `Work` describes once what equal tasks do, `Flow` what they move, and each
task has an index into both. Rows of different lengths are two columns: the start of every row, and the values of all
rows. `Task` and `program_of` are for programs written by hand.

Tools make programs fast to build: `Deferred` sequences, which are computed at their first use, and
`pause_collection`, which stops the cyclic garbage collector during work that creates many objects and no cycles;
`collect_rarely` is for searches, which keep much.
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

from meshwise.simulator.brief import brief_repr, format_items, with_brief_repr

IntArray = NDArray[np.int64]


class TaskKind(StrEnum):
    """Kind of a task, by which results are drawn and summed."""

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
        """Whether the task occupies the device's processors."""
        return self in _COMPUTE


_INSIDE = frozenset({TaskKind.TENSOR_COMMUNICATION, TaskKind.EXPERT_COMMUNICATION, TaskKind.CONTEXT_COMMUNICATION})
_COMMUNICATION = _INSIDE | {TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION}
_COMPUTE = frozenset(
    {TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.RECOMPUTE, TaskKind.OPTIMIZER}
)


class StreamKind(StrEnum):
    """Kind of an in-order queue of a rank."""

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
    """Category of memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"


class Stream(NamedTuple):
    """An in-order queue of one rank class."""

    rank_class: int
    kind: StreamKind


@with_brief_repr
class RankClass(NamedTuple):
    """Ranks that behave alike, with their pipeline ``stages``, one for each model chunk of a rank."""

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def representative(self) -> int:
        """The rank that is simulated on behalf of all."""
        return self.ranks[0]


@with_brief_repr
class HostClass(NamedTuple):
    """Hosts that behave alike; ``members`` are pairs (rank class, number of its ranks on one such host)."""

    name: str
    capacity: float
    members: tuple[tuple[int, int], ...]


class Change(NamedTuple):
    """Bytes that a piece allocates or releases on every rank class of its task, on the device or the host."""

    category: Category
    size: int
    host: bool = False


@with_brief_repr
class Piece(NamedTuple):
    """A part of a task, from ``start`` to ``end`` in ticks after the start of the task.

    Parameters
    ----------
    stream
        Kind of the stream on which the piece is shown, whether the task occupies it or not; ``None`` for all streams
        of the task.
    acquisitions, releases
        Memory allocated at its start and released at its end, on every rank class of the task.
    bytes
        Size of the message that it communicates. Only the first phase of a message has one, so that sums count a
        message once.
    launch_end
        Ticks from the first launch of the task to the end of the launch of this piece; 0 if the host launches nothing
        for it.
    """

    kind: TaskKind
    operators: str
    start: int
    end: int
    stream: StreamKind | None = None
    acquisitions: tuple[Change, ...] = ()
    releases: tuple[Change, ...] = ()
    bytes: float = 0.0
    launch_end: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """What a task does; tasks of different microbatches share it, so that it is compared and hashed by identity.

    ``duration`` is in ticks; of a task with a flow it is the latency before its bytes move. ``pieces`` cover the
    duration in order.
    """

    kind: TaskKind
    stage: int
    duration: int
    pieces: Sequence[Piece]

    __repr__ = brief_repr()


@with_brief_repr
class Flow(NamedTuple):
    """Bytes over links, ``usage`` of (index into the program's links, bytes); all links advance in proportion.

    A flow may stand for several equal transfers. The network shares links fairly among transfers, not flows, so
    ``unit`` has the bytes of one transfer on its busiest link; 0 stands for a single transfer.
    """

    usage: tuple[tuple[int, float], ...]
    unit: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkClass:
    """``count`` links that carry the same bytes at the same time; ``bandwidth`` is the byte/s of each."""

    name: str
    bandwidth: float
    count: int = 1


class Background(NamedTuple):
    """A flow of another tenant, which begins at tick ``start`` and then every ``period`` ticks, never twice at once.

    Its bytes move ``latency`` ticks after it begins.
    """

    name: str
    flow: Flow
    latency: int
    period: int
    start: int


class MemoryChange(NamedTuple):
    """Bytes that one rank class uses, on its device or its host; negative if it releases them."""

    rank_class: int
    category: Category
    size: int
    host: bool = False


@with_brief_repr
class Steps(NamedTuple):
    """Training steps that a program runs one after another without a pipeline flush.

    Parameters
    ----------
    tasks
        Tasks [step, task] of every step, in the same order for all steps. Tasks that wait for no other stream are left
        out: they may run ever further ahead.
    depth
        A task waits for tasks of at most this many steps before its own. Hence as many of the last steps differ from
        the others, as no step follows them.
    """

    tasks: IntArray
    depth: int


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks of one training step, or of several; a stream runs its tasks in the order of their index.

    Parameters
    ----------
    work_of, flow_of, microbatch_of
        For every task its index into ``work``, its index into ``flows`` (-1 for no flow) and its microbatch (-1 for
        none).
    stream_start, stream_of
        Task ``t`` occupies the streams ``stream_of[stream_start[t]:stream_start[t + 1]]``.
    predecessor_start, predecessor_of
        The same for the tasks that end before it starts, besides the earlier tasks of its streams.
    resident_memory
        Memory in use during the whole step.
    capacity
        Bytes of device memory of every rank class.
    links
        Links that flows share.
    traffic
        Bytes that each link carries in one step inside tasks whose transfers nothing can disturb.
    steps
        The tasks of each step, for a program of several; ``None`` for one step.
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
    resident_memory: tuple[MemoryChange, ...]
    capacity: tuple[float, ...]
    links: tuple[LinkClass, ...] = ()
    traffic: tuple[float, ...] = ()
    hosts: tuple[HostClass, ...] = ()
    background: tuple[Background, ...] = ()
    steps: Steps | None = None

    __repr__ = brief_repr("num_tasks", "rank_classes", "work", "hosts", "links", "steps")

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.work_of)

    def streams_of(self, task: int) -> tuple[int, ...]:
        """Return the streams that a task occupies."""
        return tuple(self.stream_of[self.stream_start[task] : self.stream_start[task + 1]].tolist())

    def predecessors_of(self, task: int) -> tuple[int, ...]:
        """Return the tasks that end before ``task`` starts, besides the earlier tasks of its streams."""
        return tuple(self.predecessor_of[self.predecessor_start[task] : self.predecessor_start[task + 1]].tolist())


@with_brief_repr
class Task(NamedTuple):
    """A task of a program written by hand.

    Parameters
    ----------
    streams
        Indices of the streams that it occupies while it runs.
    duration
        Ticks that it takes; of a communication with a ``usage``, its latency.
    predecessors
        Indices of the tasks that end before it starts, besides the earlier tasks of its streams.
    usage
        Bytes that it moves, as pairs (index of a link, bytes).
    acquisitions, releases
        Memory allocated at its start and released at its end, on every rank class of its streams.
    """

    kind: TaskKind
    streams: tuple[int, ...]
    duration: int
    predecessors: tuple[int, ...] = ()
    usage: tuple[tuple[int, float], ...] = ()
    stage: int = 0
    microbatch: int = -1
    operators: str = ""
    acquisitions: tuple[Change, ...] = ()
    releases: tuple[Change, ...] = ()


def program_of(
    rank_classes: Sequence[RankClass],
    streams: Sequence[Stream],
    tasks: Sequence[Task],
    *,
    resident_memory: Sequence[MemoryChange] = (),
    capacity: float = float("inf"),
    links: Sequence[LinkClass] = (),
    hosts: Sequence[HostClass] = (),
) -> Program:
    """Return a program of tasks written by hand."""
    work: dict[Work, int] = {}
    flows: dict[Flow, int] = {}
    work_of, flow_of = [], []
    for task in tasks:
        piece = Piece(task.kind, task.operators, 0, task.duration, None, task.acquisitions, task.releases)
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
        tuple(resident_memory),
        (capacity,) * len(rank_classes),
        tuple(links),
        hosts=tuple(hosts),
    )


def ragged(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return rows of different lengths as two columns: the start of every row and the end of the last, and all values.

    >>> [column.tolist() for column in ragged([(3, 4), (), (5,)])]
    [[0, 2, 2, 3], [3, 4, 5]]
    """
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([value for row in rows for value in row], dtype=np.int64)


def expand_rows(start: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return pairs (position in ``rows``, index of a value): one pair for each value of these rows of a ragged column.

    >>> [column.tolist() for column in expand_rows(np.array([0, 2, 2, 3]), np.array([2, 0]))]
    [[0, 1, 1], [2, 0, 1]]
    """
    row_start = start[rows]
    length = start[rows + 1] - row_start
    place = np.repeat(np.arange(len(rows)), length)
    return place, np.arange(len(place)) + np.repeat(row_start - np.cumsum(length) + length, length)


T = TypeVar("T")


class Deferred(Sequence[T], Generic[T]):
    """Sequence of the values of ``make``, which is called at the first use; equal to any sequence of the same values.

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

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Sequence) and self._values == tuple(value)

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return format_items(self)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Stop the cyclic garbage collector during a block: it would walk all objects again and again, and find nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


NEW_OBJECTS = 50_000
"""Objects that are made between two collections of young garbage where `collect_rarely` says so; Python's are 700."""


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Let the cyclic garbage collector run seldom during a block: what a search keeps is much, and has few cycles.

    It took a fifth of a search's time.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0 stands for never
        gc.set_threshold(max(thresholds[0], NEW_OBJECTS), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
