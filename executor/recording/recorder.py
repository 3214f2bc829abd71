"""Collects what a rank does and when, in nanoseconds of the host's monotonic clock."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple

from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.simulator.program import TaskKind


class Record(NamedTuple):
    """One thing a rank did, from ``start`` to ``end`` ns."""

    kind: TaskKind
    stage: int
    microbatch: int
    operators: str
    start: int
    end: int


_LETTER = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT_GRADIENT: "W"}


class Recorder:
    """Notes spans of one rank, while `records` is a list, and beats its heart at each.

    ``synchronise`` returns when the device has done all that it was given. Where spans are to be ``exact`` by the
    host's clock, it is called where they begin and end.
    """

    def __init__(self, heartbeat: Heartbeat, synchronise: Callable[[], None] = lambda: None) -> None:
        self.heartbeat, self.synchronise = heartbeat, synchronise
        self.exact = False
        self.records: list[Record] | None = None
        self._stage, self._microbatch = -1, -1

    def now(self) -> int:
        """Return the instant of the host's clock, in ns; where spans are exact when the device is done."""
        if self.exact and self.records is not None:
            self.synchronise()
        return perf_counter_ns()

    @contextmanager
    def span(self, kind: TaskKind, stage: int = -1, microbatch: int = -1, operators: str = "") -> Iterator[None]:
        """Record the body as one span."""
        self.heartbeat.beat(f"{kind} {stage}{_LETTER[kind]}{microbatch}" if kind in _LETTER else str(kind))
        self._stage, self._microbatch = stage, microbatch
        start = self.now()
        yield
        if self.records is not None:
            self.records.append(Record(kind, stage, microbatch, operators, start, self.now()))

    @contextmanager
    def loss_span(self) -> Iterator[None]:
        """Lengthen the forward span before it by the body, which belongs to the same pass."""
        yield
        if self.records:
            self.records[-1] = self.records[-1]._replace(end=self.now())

    def recomputed(self, start: int) -> None:
        """Record what has been recomputed since ``start`` ns for the pass at hand."""
        if self.records is not None:
            end = self.now()
            self.records.append(Record(TaskKind.RECOMPUTE, self._stage, self._microbatch, "", start, end))

    @contextmanager
    def host_copy(self, name: str, stage: int, microbatch: int) -> Iterator[None]:
        """Record the body as a copy to, on or from the host: inside a pass, which waits for it, or outside of all."""
        self.heartbeat.beat(name)
        start = self.now()
        yield
        if self.records is not None:
            self.records.append(Record(TaskKind.HOST_COPY, stage, microbatch, name, start, self.now()))

    @property
    def current(self) -> tuple[int, int]:
        """Stage and microbatch of the pass that runs."""
        return self._stage, self._microbatch

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts for a checkpointed forward pass and for its recomputation."""
        return nullcontext(), _Recomputing(self)


class _Recomputing(AbstractContextManager[None]):
    """Records a recomputation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._start = recorder, 0

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, *_: object) -> None:
        self._recorder.recomputed(self._start)  # it may end early, by an exception, when it has what it needs
