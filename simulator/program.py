"""The simulator's input language: tasks on in-order streams of rank classes.

A rank class stands for ranks that do the same at the same time; one of them is
simulated. Tasks that name several streams are a rendezvous: they start when all of
those streams reach them, and hold all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from simulator.cluster import Link, Port


class TaskKind(StrEnum):
    """What a task is, for lanes, colours and sums."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    TENSOR_COMMUNICATION = "tensor communication"
    PIPELINE_COMMUNICATION = "pipeline communication"
    DATA_COMMUNICATION = "data communication"

    @property
    def communicates(self) -> bool:
        """Whether the task moves data between ranks."""
        return self in _COMMUNICATION


_COMMUNICATION = frozenset(
    {TaskKind.TENSOR_COMMUNICATION, TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION}
)


class StreamKind(StrEnum):
    """The in-order queues of one rank."""

    COMPUTE = "compute"
    TENSOR = "tensor"
    SEND_FORWARD = "send forward"
    RECEIVE_FORWARD = "receive forward"
    SEND_BACKWARD = "send backward"
    RECEIVE_BACKWARD = "receive backward"
    DATA = "data"


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


class RankClass(NamedTuple):
    """Ranks that behave alike: their pipeline ``stages`` (one a chunk) and who they are."""

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def representative(self) -> int:
        """The rank that is simulated for all."""
        return self.ranks[0]


class Origin(NamedTuple):
    """Where a task came from: stage, microbatch (-1 for none), operators or tensors by name."""

    stage: int
    microbatch: int
    operators: str


class Transfer(NamedTuple):
    """Bytes that a communication moves over one port."""

    port: Port
    size: float


class MemoryChange(NamedTuple):
    """Bytes that a task takes (positive) or gives back (negative) on one rank class."""

    rank_class: int
    category: Category
    size: int


class Task(NamedTuple):
    """One unit of work.

    Parameters
    ----------
    streams
        Indices of the streams it holds while it runs.
    duration
        Ticks of its own; for a communication with ``transfers``, its latency.
    predecessors
        Indices of tasks that end before it starts, besides those before it on its streams.
    transfers
        What it moves over ports that other streams use too.
    acquired, released
        Memory taken at its start and given back at its end.
    """

    kind: TaskKind
    streams: tuple[int, ...]
    duration: int
    predecessors: tuple[int, ...]
    origin: Origin
    transfers: tuple[Transfer, ...] = ()
    acquired: tuple[MemoryChange, ...] = ()
    released: tuple[MemoryChange, ...] = ()


@dataclass(frozen=True)
class Program:
    """Tasks of one training step; a stream runs its tasks in the order of ``tasks``.

    Parameters
    ----------
    resident
        Memory that is held for the whole step.
    capacity
        Bytes of device memory.
    links
        The link behind every port that a transfer names.
    """

    rank_classes: tuple[RankClass, ...]
    streams: tuple[Stream, ...]
    tasks: tuple[Task, ...]
    resident: tuple[MemoryChange, ...]
    capacity: float
    links: tuple[tuple[Port, Link], ...] = ()


def dependencies(tasks: Sequence[Task], num_streams: int) -> tuple[list[list[int]], list[int]]:
    """Return the successors of each task, and the number of tasks each one waits for."""
    successors: list[list[int]] = [[] for _ in tasks]
    waiting = [0] * len(tasks)
    last = [-1] * num_streams
    for index, task in enumerate(tasks):
        before = set(task.predecessors)
        for stream in task.streams:
            if last[stream] >= 0:
                before.add(last[stream])
            last[stream] = index
        for predecessor in before:
            successors[predecessor].append(index)
        waiting[index] = len(before)
    return successors, waiting
