"""Records what a rank does and when, in nanoseconds of the host's monotonic clock."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple

from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.simulator.program import TaskKind


class Record(NamedTuple):
    """One pass, recomputation, update or copy of a rank, from ``start`` to ``end`` in ns."""

    kind: TaskKind
    stage: int
    microbatch: int
    operators: str
    start: int
    end: int


_LETTER = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT_GRADIENT: "W"}


class Recorder:
    """Records spans of one rank while `records` is a list, and writes the rank's heartbeat at the start of each.

    ``synchronise`` returns when the device has finished all work. With ``exact``, it is called where spans begin and
    end, so that they are right by the host's clock though the device runs behind the host.
    """

    def __init__(self, heartbeat: Heartbeat, synchronise: Callable[[], None] = lambda: None) -> None:
        self.heartbeat, self.synchronise = heartbeat, synchronise
        self.exact = False
        self.records: list[Record] | None = None
        self.current_pass = -1, -1
        """The stage and the microbatch of the pass that runs."""

    def read_clock(self) -> int:
        """Return the host's clock in ns; where spans are exact, after the device has finished."""
        if self.exact and self.records is not None:
            self.synchronise()
        return perf_counter_ns()

    def span(self, kind: TaskKind, stage: int = -1, microbatch: int = -1) -> AbstractContextManager[None]:
        """Record the body as one span."""
        self.heartbeat.beat(f"{kind} {stage}{_LETTER[kind]}{microbatch}" if kind in _LETTER else str(kind))
        self.current_pass = stage, microbatch
        return self._record(kind, stage, microbatch, "")

    def record_host_copy(self, name: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Record the body as a copy to, on or from the host: in a pass, which waits for it, or outside of passes."""
        self.heartbeat.beat(name)
        return self._record(TaskKind.HOST_COPY, stage, microbatch, name)

    @contextmanager
    def _record(self, kind: TaskKind, stage: int, microbatch: int, operators: str) -> Iterator[None]:
        start = self.read_clock()
        yield
        if self.records is not None:
            self.records.append(Record(kind, stage, microbatch, operators, start, self.read_clock()))

    @contextmanager
    def loss_span(self) -> Iterator[None]:
        """Extend the forward span before it by the body, the loss, which belongs to the same pass."""
        yield
        if self.records:
            self.records[-1] = self.records[-1]._replace(end=self.read_clock())

    def make_checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a checkpointed forward pass and of its recomputation, which is recorded."""
        return nullcontext(), _RecomputeSpan(self)


class _RecomputeSpan(AbstractContextManager[None]):
    """Records a recomputation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._start = recorder, 0

    def __enter__(self) -> None:
        self._start = self._recorder.read_clock()

    def __exit__(self, *_: object) -> None:
        # also after an exception: a checkpoint stops its recomputation by one when it has all that it needs
        recorder = self._recorder
        if recorder.records is not None:
            place = recorder.current_pass
            recorder.records.append(Record(TaskKind.RECOMPUTE, *place, "", self._start, recorder.read_clock()))
