"""A predicted and a measured step compared operation by operation: which operations caused the error.

Every instant of a rank's step is assigned to exactly one operation, in this order: computation, communication inside
passes, other communication, a copy to or from the host, a launch; an instant in which nothing runs is waiting. The
times of all operations therefore add up to the step on both sides, and their differences to the error of the step.
Communication that computation hides costs nothing; its full duration is reported as `busy`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from meshwise.reports.lanes import lane_labels
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_time

WAITING = "waiting"
"""Kind and operation of the instants in which nothing runs."""
_MIN_SHOWN_SHARE = 1e-3
"""Operations that cost less than this fraction of the predicted step get no line in a report."""
_BACKWARD = (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD)
_OTHER_KINDS = (TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION, TaskKind.HOST_COPY, TaskKind.LAUNCH)


class OperationUse(NamedTuple):
    """Time, runs and bytes of an operation on one rank in a step.

    Parameters
    ----------
    time
        Seconds of the step that are assigned to it; over all operations they add up to the step.
    busy
        Seconds of its spans, hidden ones included.
    runs
        How often it ran; a pass counts once per microbatch.
    bytes
        Bytes of its messages.
    """

    time: float = 0.0
    busy: float = 0.0
    runs: float = 0.0
    bytes: float = 0.0

    def plus(self, added: "OperationUse", weight: float = 1.0) -> "OperationUse":
        """Return the sum of this use and ``weight`` times another."""
        return OperationUse(*(value + weight * increment for value, increment in zip(self, added, strict=True)))


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One operation of one rank class: its predicted and measured use of a rank, and what the difference costs.

    Parameters
    ----------
    ranks
        Number of ranks in the class.
    cost
        Seconds by which it makes the mean rank's step longer than predicted; negative where shorter.
    share
        Share of the step's error; 0 where the step has no error.
    """

    rank_class: str
    ranks: int
    kind: str
    operation: str
    predicted: OperationUse
    measured: OperationUse
    cost: float
    share: float

    @property
    def difference(self) -> float:
        """Measured minus predicted seconds of a rank of the class."""
        return self.measured.time - self.predicted.time

    @property
    def verdict(self) -> str:
        """What went wrong in words: ``not predicted``, ``did not happen``, or by how much its time differs."""
        if self.kind != WAITING and not self.predicted.runs:
            return "not predicted"
        if self.kind != WAITING and not self.measured.runs:
            return "did not happen"
        longer = "longer" if self.difference > 0 else "shorter"
        return f"{format_time(abs(self.difference))} {longer}" if self.difference else "as predicted"


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two timelines of the same ranks; rows that cost the step most come first."""

    predicted: float
    measured: float
    rows: tuple[DifferenceRow, ...]

    __repr__ = brief_repr()

    @property
    def error(self) -> float:
        """Seconds by which the measured step is longer than the predicted one."""
        return self.measured - self.predicted

    def operations(self) -> tuple[DifferenceRow, ...]:
        """Return one row per operation, averaged over all ranks."""
        return self._merge_rows(lambda row: (row.kind, row.operation))

    def kinds(self) -> tuple[DifferenceRow, ...]:
        """Return one row per kind of operation, averaged over all ranks."""
        return self._merge_rows(lambda row: (row.kind, row.kind))

    def _merge_rows(self, key: Any) -> tuple[DifferenceRow, ...]:
        total = _count_ranks(self.rows)
        row_groups: dict[tuple[str, str], list[DifferenceRow]] = {}
        for row in self.rows:
            row_groups.setdefault(key(row), []).append(row)
        merged_rows = []
        for (kind, operation), rows in row_groups.items():
            predicted = measured = OperationUse()
            for row in rows:
                predicted = predicted.plus(row.predicted, row.ranks / total)
                measured = measured.plus(row.measured, row.ranks / total)
            cost, share = sum(row.cost for row in rows), sum(row.share for row in rows)
            merged_rows.append(DifferenceRow("all ranks", total, kind, operation, predicted, measured, cost, share))
        return tuple(sorted(merged_rows, key=_cost_key))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready data; seconds and bytes are per rank."""
        operations = self.operations()
        return {
            "predicted_step_time": self.predicted,
            "measured_step_time": self.measured,
            "error": self.error,
            "kinds": [_document(row) for row in self.kinds()],
            "operations": [_document(row) for row in self.rows],
            "not_predicted": [row.operation for row in operations if row.verdict == "not predicted"],
            "did_not_happen": [row.operation for row in operations if row.verdict == "did not happen"],
        }

    def lines(self, max_rows: int = 6) -> list[tuple[str, ...]]:
        """Return the operations that cost the step most, as rows of text under `HEAD`."""
        rows = [row for row in self.operations() if abs(row.cost) > _MIN_SHOWN_SHARE * self.predicted][:max_rows]
        return [
            (row.operation, *map(format_time, (row.predicted.time, row.measured.time)), *_format_cost(row), row.verdict)
            for row in rows
        ]


HEAD = ("operation", "predicted", "measured", "costs the step", "of its error", "")
"""Headings of `Difference.lines`; times are those of the mean rank."""


def difference(
    predicted: Timeline, measured: Timeline, name_span: Callable[[Span], tuple[str, str]] | None = None
) -> Difference:
    """Return the predicted and the measured use of every operation, per rank class of the prediction.

    Measured ranks that share a predicted class are averaged.

    Parameters
    ----------
    name_span
        Returns kind and operation of a span; default: its kind and `operation`.

    Raises
    ------
    ValueError
        Where the two are not of the same ranks.
    """
    measured_class = {
        rank: index for index, rank_class in enumerate(measured.rank_classes) for rank in rank_class.ranks
    }
    predicted_ranks = {rank for rank_class in predicted.rank_classes for rank in rank_class.ranks}
    if predicted_ranks != measured_class.keys():
        num_common = len(predicted_ranks & measured_class.keys())
        finding = f"met {len(predicted_ranks)} and {len(measured_class)} of which {num_common} are the same"
        raise ValueError(f"a predicted and a measured timeline are of the same ranks, {finding}")
    error = measured.step_time - predicted.step_time
    naming = name_span or _name_operation
    predicted_uses, measured_uses = _measure_uses(predicted, naming), _measure_uses(measured, naming)
    rows = []
    for index, (name, members) in enumerate(
        zip(lane_labels(predicted.rank_classes), predicted.rank_classes, strict=True)
    ):
        measured_mean: dict[tuple[str, str], OperationUse] = {}
        for measured_index, num_ranks in Counter(measured_class[rank] for rank in members.ranks).items():
            for key, use in measured_uses[measured_index].items():
                measured_mean[key] = measured_mean.get(key, OperationUse()).plus(use, num_ranks / len(members.ranks))
        for key in {**predicted_uses[index], **measured_mean}:
            predicted_use = predicted_uses[index].get(key, OperationUse())
            measured_use = measured_mean.get(key, OperationUse())
            cost = (measured_use.time - predicted_use.time) * len(members.ranks) / len(predicted_ranks)
            share = cost / error if error else 0.0
            rows.append(DifferenceRow(name, len(members.ranks), *key, predicted_use, measured_use, cost, share))
    return Difference(predicted.step_time, measured.step_time, tuple(sorted(rows, key=_cost_key)))


def operation(span: Span) -> str:
    """Return the name of a span's operation, the same for predicted and measured spans.

    >>> operation(Span(0, StreamKind.SEND_FORWARD, TaskKind.PIPELINE_COMMUNICATION, 0, 3, "send activations", 0, 1))
    'send activations 0 -> 1'
    >>> operation(Span(0, StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 1, 3, "head: all_reduce loss", 0, 1))
    'tensor all_reduce, stage 1'
    """
    if span.kind is TaskKind.OPTIMIZER:
        return "optimizer"
    if span.kind is TaskKind.PIPELINE_COMMUNICATION:
        backward = span.stream in _BACKWARD
        content, neighbour = ("gradients", span.stage - 1) if backward else ("activations", span.stage + 1)
        return f"send {content} {span.stage} -> {neighbour}"
    words = span.operators.rpartition(": ")[2].split()
    if span.kind is TaskKind.DATA_COMMUNICATION:
        suffix = " over replicas" if span.stream is StreamKind.REPLICA else ""
        return " ".join(words[:2] if "norm" not in words else words) + suffix
    if span.kind.inside_passes:
        return f"{span.kind.value.removesuffix(' communication')} {' '.join(words[:1])}, stage {span.stage}"
    if span.kind is TaskKind.HOST_COPY:
        return f"host copy: {' '.join(words[:1])} {span.stream.value}"
    return f"{span.kind} of stage {span.stage}"


def assign_owners(spans: Sequence[Span], length: float) -> Iterator[tuple[float, Span | None]]:
    """Yield durations in s, in order, with the span each is assigned to; ``None`` where nothing runs.

    The durations sum to ``length``: of spans that stick out of the step, only what lies in it counts. Among spans of
    one kind the one that started first owns the instant.
    """
    by_start = sorted(spans, key=lambda span: span.start)
    bounds = (moment for span in spans for moment in (span.start, span.end))
    moments = sorted({0.0, length, *(moment for moment in bounds if 0.0 <= moment <= length)})
    # a heap by (priority of the kind, order of start): its top owns the current instant
    running: list[tuple[int, int, Span]] = []
    position = 0
    for begin, end in pairwise(moments):
        while position < len(by_start) and by_start[position].start <= begin:
            heappush(running, (_priority(by_start[position].kind), position, by_start[position]))
            position += 1
        while running and running[0][2].end <= begin:
            heappop(running)
        yield end - begin, running[0][2] if running else None


def _priority(kind: TaskKind) -> int:
    return 0 if kind.computes else 1 if kind.inside_passes else 2 + _OTHER_KINDS.index(kind)


def _name_operation(span: Span) -> tuple[str, str]:
    return str(span.kind), operation(span)


def _measure_uses(
    timeline: Timeline, name_span: Callable[[Span], tuple[str, str]]
) -> list[dict[tuple[str, str], OperationUse]]:
    """Return for every rank class the use of each operation (kind, name) in one step."""
    class_spans: list[list[Span]] = [[] for _ in timeline.rank_classes]
    for span in timeline.spans:
        class_spans[span.rank_class].append(span)
    return [_sum_uses(spans, timeline.length, timeline.steps, name_span) for spans in class_spans]


def _sum_uses(
    spans: Sequence[Span], length: float, steps: int, name_span: Callable[[Span], tuple[str, str]]
) -> dict[tuple[str, str], OperationUse]:
    uses: dict[tuple[str, str], OperationUse] = {}
    passes: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for span in spans:
        key = name_span(span)
        # a pass has several spans; only the first one of a microbatch counts as a run
        is_repeated = span.kind.computes and (span.stage, span.microbatch) in passes.setdefault(key, set())
        passes.setdefault(key, set()).add((span.stage, span.microbatch))
        is_counted = not is_repeated and (bool(span.bytes) or not span.kind.communicates)
        use = OperationUse(0.0, span.duration, is_counted, span.bytes)
        uses[key] = uses.get(key, OperationUse()).plus(use, 1 / steps)
    for seconds, owner in assign_owners(spans, length):
        key = (WAITING, WAITING) if owner is None else name_span(owner)
        uses[key] = uses.get(key, OperationUse()).plus(OperationUse(seconds), 1 / steps)
    return uses


def _count_ranks(rows: Sequence[DifferenceRow]) -> int:
    return sum({row.rank_class: row.ranks for row in rows}.values())


def _cost_key(row: DifferenceRow) -> tuple[float, str, str]:
    return -abs(row.cost), row.rank_class, row.operation


def _format_cost(row: DifferenceRow) -> tuple[str, str]:
    sign = "+" if row.cost > 0 else "-"
    return f"{sign}{format_time(abs(row.cost))}", f"{row.share:.0%}"


def _document(row: DifferenceRow) -> dict[str, Any]:
    use_keys = "time", "busy", "count", "bytes"
    uses = {name: dict(zip(use_keys, getattr(row, name), strict=True)) for name in ("predicted", "measured")}
    operation = {name: getattr(row, name) for name in ("rank_class", "ranks", "kind", "operation")}
    return operation | uses | {name: getattr(row, name) for name in ("difference", "cost", "share", "verdict")}
