"""The processes of a trace, which are rank classes or single ranks, and the lanes of their spans."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshwise.reports.lanes import labels
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

CLASSES, ALL = "classes", "all"
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


def processes(timeline: Timeline, ranks: str = CLASSES) -> tuple[Process, ...]:
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
        names = labels(timeline.rank_classes)
        firsts = (members.representative for members in timeline.rank_classes)
        return tuple(Process(name, index, rank) for index, (name, rank) in enumerate(zip(names, firsts, strict=True)))
    home = {rank: index for index, members in enumerate(timeline.rank_classes) for rank in members.ranks}
    chosen = sorted(home) if ranks == ALL else _numbers(ranks, home.keys())
    stages = [_stages(members.stages) for members in timeline.rank_classes]
    return tuple(Process(f"rank {rank}{stages[home[rank]]}", home[rank], rank) for rank in chosen)


def _stages(stages: Sequence[int]) -> str:
    return f" (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})" if stages else ""


def _numbers(text: str, known: Iterable[int]) -> list[int]:
    """Return the ranks that ``text`` names, in order."""
    if not _RANKS.fullmatch(text):
        raise ValueError(f"--ranks is {CLASSES}, {ALL} or ranks as 0-7,16; met {text[:60]!r}")
    found: set[int] = set()
    last = max(known, default=-1)
    for part in text.split(","):
        first, _, end = part.partition("-")
        low, high = int(first), int(end or first)
        if low > high or high > last:
            raise ValueError(f"--ranks: ranks are 0 to {last}, the lower first; met {part}")
        found.update(range(low, high + 1))
    return sorted(found)


def spans_by_class(timeline: Timeline) -> list[list[Span]]:
    """Return the spans of every rank class, in order of start."""
    found: list[list[Span]] = [[] for _ in timeline.rank_classes]
    for span in timeline.spans:
        found[span.rank_class].append(span)
    return found


def rows(spans: Iterable[Span]) -> Iterator[Row]:
    """Yield the spans of one process; a span that overlaps another of its stream goes to a further lane."""
    busy_until: dict[StreamKind, list[int]] = {}
    for span in spans:
        start, end = nanoseconds(span.start), nanoseconds(span.end)
        lanes = busy_until.setdefault(span.stream, [])
        lane = next((i for i, until in enumerate(lanes) if until <= start), len(lanes))
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


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, so that spans which touch still touch."""
    return round(seconds * 1e9)
