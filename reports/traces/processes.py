"""The processes of a trace, which are rank classes or single ranks, the lanes of their spans, and events as JSON."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

from meshwise.reports.lanes import lane_labels
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

CLASSES, ALL_RANKS = "classes", "all"
PROCESS = "\x00"
"""Stands for the process in the text of events: JSON has no such character."""
_SAMPLES = 500
_RANKS = re.compile(r"[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*")
_LETTER = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT_GRADIENT: "W", TaskKind.RECOMPUTE: "R"}


class Process(NamedTuple):
    """One process of a trace: a rank, or a rank class represented by its first rank."""

    name: str
    rank_class: int
    rank: int


class Row(NamedTuple):
    """A span in whole nanoseconds, and its lane within its stream: above 0 where it overlaps others."""

    span: Span
    lane: int
    start: int
    end: int


def list_processes(timeline: Timeline, ranks: str = CLASSES) -> tuple[Process, ...]:
    """Return the processes of a trace.

    Parameters
    ----------
    ranks
        ``classes`` for one process per rank class, ``all`` for every rank, or ranks such as ``0-7,16``.

    Raises
    ------
    ValueError
        Where ``ranks`` is none of these, or names a rank that does not exist.
    """
    if ranks == CLASSES:
        names = lane_labels(timeline.rank_classes)
        representatives = (members.representative for members in timeline.rank_classes)
        return tuple(
            Process(name, index, rank) for index, (name, rank) in enumerate(zip(names, representatives, strict=True))
        )
    class_of_rank = {rank: index for index, members in enumerate(timeline.rank_classes) for rank in members.ranks}
    selection = sorted(class_of_rank) if ranks == ALL_RANKS else _parse_ranks(ranks, class_of_rank.keys())
    stages = [_format_stages(members.stages) for members in timeline.rank_classes]
    return tuple(Process(f"rank {rank}{stages[class_of_rank[rank]]}", class_of_rank[rank], rank) for rank in selection)


def _format_stages(stages: Sequence[int]) -> str:
    return f" (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})" if stages else ""


def _parse_ranks(text: str, known_ranks: Iterable[int]) -> list[int]:
    """Return the ranks that ``text`` names, in order."""
    if not _RANKS.fullmatch(text):
        raise ValueError(f"--ranks is {CLASSES}, {ALL_RANKS} or ranks as 0-7,16; met {text[:60]!r}")
    selected: set[int] = set()
    last_rank = max(known_ranks, default=-1)
    for part in text.split(","):
        begin, _, end = part.partition("-")
        low, high = int(begin), int(end or begin)
        if low > high or high > last_rank:
            raise ValueError(f"--ranks: ranks are 0 to {last_rank}, the lower first; met {part}")
        selected.update(range(low, high + 1))
    return sorted(selected)


def encode_events(events: Iterable[dict[str, Any]]) -> str:
    """Return events of process 0 as JSON in which `PROCESS` stands for that number."""
    return ",\n".join(
        json.dumps(event, separators=(",", ":")).replace('"pid":0', f'"pid":{PROCESS}', 1) for event in events
    )


def estimate_bytes(
    timeline: Timeline, selection: Sequence[Process], encode: Callable[[list[Span]], Sized], head: int, change: int = 0
) -> float:
    """Return the approximate bytes of a trace: the number of spans times their mean length that ``encode`` shows.

    Every process has ``head`` bytes besides, and ``change`` bytes for every change of its memory.
    """
    spans = timeline.spans
    sample = [spans[index] for index in range(0, len(spans), max(len(spans) // _SAMPLES, 1))]
    span_length = len(encode(sample)) / max(len(sample), 1)
    changes = {profile.rank_class: len(profile.times) for profile in timeline.memory}
    sizes = [
        head + span_length * len(class_spans) + change * changes.get(rank_class, 0)
        for rank_class, class_spans in enumerate(group_spans(timeline))
    ]
    return sum(sizes[process.rank_class] for process in selection)


def group_spans(timeline: Timeline) -> list[list[Span]]:
    """Return the spans of every rank class, in order of start."""
    class_spans: list[list[Span]] = [[] for _ in timeline.rank_classes]
    for span in timeline.spans:
        class_spans[span.rank_class].append(span)
    return class_spans


def arrange_rows(spans: Iterable[Span]) -> Iterator[Row]:
    """Yield the spans of one process; a span that overlaps another of its stream goes to a further lane."""
    busy_until: dict[StreamKind, list[int]] = {}
    for span in spans:
        start, end = to_nanoseconds(span.start), to_nanoseconds(span.end)
        lanes = busy_until.setdefault(span.stream, [])
        lane = next((index for index, busy_end in enumerate(lanes) if busy_end <= start), len(lanes))
        if lane == len(lanes):
            lanes.append(end)
        lanes[lane] = end
        yield Row(span, lane, start, end)


def lane_name(stream: StreamKind, lane: int) -> str:
    """Return the name of a lane of a stream.

    >>> lane_name(StreamKind.DATA, 0), lane_name(StreamKind.DATA, 1)
    ('data', 'data (2)')
    """
    return stream.value + (f" ({lane + 1})" if lane else "")


def span_name(span: Span) -> str:
    """Return the name of a span: ``2F0`` (stage, pass, microbatch) or the kind, followed by its operators."""
    action = f"{span.stage}{_LETTER[span.kind]}{span.microbatch}" if span.kind in _LETTER else span.kind.value
    return f"{action} {span.operators}".strip()


def to_nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, so that spans which touch still touch."""
    return round(seconds * 1e9)
