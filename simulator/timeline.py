"""What happened in a step, simulated or measured: spans on streams, and memory over time."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from simulator.memory import MemoryProfile, peak_total
from simulator.program import RankClass, StreamKind, TaskKind

if TYPE_CHECKING:
    import pandas as pd


class Span(NamedTuple):
    """One task on one rank class: seconds from the start of the step."""

    rank_class: int
    stream: StreamKind
    kind: TaskKind
    stage: int
    microbatch: int
    operators: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Spans and memory of one step.

    Parameters
    ----------
    source
        ``"simulated"`` or ``"measured"``.
    rank_classes
        Who the spans' ``rank_class`` indices are; measured timelines have one rank a class.
    spans
        In order of start.
    step_time
        Seconds from the start of the step to the end of its last task.
    engine
        What made it: ``discrete_event``, ``longest_path``, ``gloo``, ``nccl``.
    """

    source: str
    rank_classes: tuple[RankClass, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemoryProfile, ...]
    step_time: float
    engine: str

    @property
    def peak_memory(self) -> float:
        """Largest bytes held by any rank."""
        return peak_total(self.memory)

    @cached_property
    def _computing(self) -> tuple[list[tuple[float, float]], ...]:
        return tuple(_union((s.start, s.end) for s in spans if not s.kind.communicates) for spans in self._by_class)

    @cached_property
    def _by_class(self) -> tuple[list[Span], ...]:
        rows: tuple[list[Span], ...] = tuple([] for _ in self.rank_classes)
        for span in self.spans:
            rows[span.rank_class].append(span)
        return rows

    def busy(self, rank_class: int, kinds: Iterable[TaskKind] | None = None) -> float:
        """Return the seconds in which ``rank_class`` runs at least one span of ``kinds`` (all: None)."""
        chosen = frozenset(kinds) if kinds is not None else frozenset(TaskKind)
        spans = ((s.start, s.end) for s in self._by_class[rank_class] if s.kind in chosen)
        return sum(end - start for start, end in _union(spans))

    @cached_property
    def bubble(self) -> float:
        """Fraction of the ranks' step in which they neither compute nor communicate within a stage."""
        working = frozenset(TaskKind) - {TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION}
        total = sum(len(c.ranks) for c in self.rank_classes) * self.step_time
        used = sum(self.busy(i, working) * len(c.ranks) for i, c in enumerate(self.rank_classes))
        return 1 - used / total if total else 0.0

    def exposed_communication(self) -> dict[TaskKind, float]:
        """Return by kind the seconds of communication with no compute under it, averaged over ranks."""
        ranks = sum(len(c.ranks) for c in self.rank_classes)
        result: dict[TaskKind, float] = {}
        for kind in TaskKind:
            if kind.communicates:
                exposed = 0.0
                for index, members in enumerate(self.rank_classes):
                    spans = ((s.start, s.end) for s in self._by_class[index] if s.kind == kind)
                    exposed += _outside(_union(spans), self._computing[index]) * len(members.ranks)
                result[kind] = exposed / ranks if ranks else 0.0
        return result

    def order(self, rank_class: int) -> tuple[tuple[TaskKind, int, int], ...]:
        """Return (kind, stage, microbatch) of the forwards and backwards of a rank, in order of start."""
        rows = [
            (s.start, s.end, (s.kind, s.stage, s.microbatch))
            for s in self._by_class[rank_class]
            if s.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        ]
        result: list[tuple[TaskKind, int, int]] = []
        for _, _, action in sorted(rows, key=lambda row: row[:2]):
            if not result or result[-1] != action:
                result.append(action)
        return tuple(result)

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a span."""
        import pandas as pd

        return pd.DataFrame(self.spans, columns=list(Span._fields))


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _outside(intervals: list[tuple[float, float]], cover: list[tuple[float, float]]) -> float:
    """Return the length of ``intervals`` that no interval of ``cover`` touches; both are unions."""
    total = sum(end - start for start, end in intervals)
    position = 0
    for start, end in intervals:
        while position < len(cover) and cover[position][1] <= start:
            position += 1
        look = position
        while look < len(cover) and cover[look][0] < end:
            total -= min(end, cover[look][1]) - max(start, cover[look][0])
            look += 1
    return total
