"""One rank's profiled step: what it recorded and what the profiler saw, joined into spans and memory.

The profiler sees what gloo does as ``gloo:*`` spans. Sends and receives start inside the
pipeline runtime's ``PP:`` actions. Collectives run on gloo's own threads: those between the
launch of a functional collective and the end of its wait are DTensor's (tensor parallelism),
those in a region that `executor.exchange` marks run along the axis that it names (context, expert
and tensor), the others are data parallelism. A tensor collective belongs to the pass that launches
it, whenever gloo's threads come to it. What goes round a ring runs beside a pass.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from executor.recorder import Record
from simulator.program import StreamKind, TaskKind
from strategies.lowering.step import COMMUNICATION

_TRANSFER = re.compile(r"PP:(\d+)(SEND|RECV)_([FB])(\d+)")
_GLOO = "gloo:"
_POINT_TO_POINT = ("gloo:send", "gloo:recv")
_FUNCTIONAL = "_c10d_functional::"
_end = attrgetter("end")
_SUFFIX = re.compile(r"(_into)?_tensor$|_single$")
_WRAP = "_wrap_tensor_autograd"
"""What follows a launch where gradients are recorded; it communicates nothing."""
_STREAMS = {
    ("SEND", "F"): StreamKind.SEND_FORWARD,
    ("RECV", "F"): StreamKind.RECEIVE_FORWARD,
    ("SEND", "B"): StreamKind.SEND_BACKWARD,
    ("RECV", "B"): StreamKind.RECEIVE_BACKWARD,
}


MOVING = "meshwise moving "
"""Begins the names of regions in which ranks along an axis communicate: then come the axis and the collective."""
SHIFT = "shift"
"""The collective of a region that posts sends and receives, which end later."""

_PASSES = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.OPTIMIZER)


class TraceEvent(NamedTuple):
    """One event of the profiler: ns of its own clock; ``size`` is what an allocation adds, in bytes."""

    name: str
    start: int
    end: int
    size: int


class Row(NamedTuple):
    """One span of one rank; ``start`` and ``end`` in ns of the host's monotonic clock."""

    stream: StreamKind
    kind: TaskKind
    stage: int
    microbatch: int
    operators: str
    start: int
    end: int


class _Intervals:
    """Intervals of one thread that do not overlap; finds the one that holds an instant."""

    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        self.rows = sorted(rows)
        self.starts = [start for start, _, _ in self.rows]

    def at(self, instant: int) -> int | None:
        index = bisect_right(self.starts, instant) - 1
        return self.rows[index][2] if index >= 0 and instant <= self.rows[index][1] else None


def rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes without the communication they wait for, and that communication."""
    communication = list(_communication(records, events))
    copies = [_row(record) for record in records if record.kind is TaskKind.HOST_COPY]
    blocking = {
        TaskKind.OPTIMIZER: [r for r in communication if r.kind is not TaskKind.PIPELINE_COMMUNICATION],
        TaskKind.RECOMPUTE: [r for r in communication if r.stream is StreamKind.TENSOR],
    }
    tensor = blocking[TaskKind.RECOMPUTE]
    recomputed = [_row(record) for record in records if record.kind is TaskKind.RECOMPUTE]
    again = sorted(tensor + recomputed, key=lambda r: r.start)
    blocking |= {TaskKind.FORWARD: tensor, TaskKind.BACKWARD: again, TaskKind.WEIGHT_GRADIENT: again}
    passes = [record for record in records if record.kind is not TaskKind.HOST_COPY]
    holes = {kind: sorted(blocking[kind] + copies, key=lambda r: r.start) for kind in blocking} if copies else blocking
    result = communication + copies + [piece for r in passes for piece in without(_row(r), holes[r.kind])]
    return sorted(result, key=lambda row: (row.start, row.end))


def _row(record: Record) -> Row:
    return Row(_host_stream(record.operators) if record.kind is TaskKind.HOST_COPY else StreamKind.COMPUTE, *record)


def _host_stream(name: str) -> StreamKind:
    """Return the stream of a host copy, whose name ends in ``to host``, ``from host`` or ``on host``.

    >>> _host_stream("activations of layers.0 to host")
    <StreamKind.TO_HOST: 'to host'>
    """
    words = " ".join(name.split()[-2:])
    return StreamKind.HOST if words == "on host" else StreamKind(words)


def without(row: Row, holes: Sequence[Row]) -> list[Row]:
    """Return what is left of ``row`` outside ``holes``; never nothing, so that an order is complete."""
    result, start = [], row.start
    for hole in holes:
        if hole.end <= start or hole.start >= row.end:
            continue
        if hole.start > start:
            result.append(row._replace(start=start, end=hole.start))
        start = max(start, hole.end)
    if start < row.end:
        result.append(row._replace(start=start))
    return result or [row._replace(end=row.start)]


def _communication(records: Sequence[Record], events: Sequence[TraceEvent]) -> Iterator[Row]:
    passes = [r for r in records if r.kind in _PASSES]
    passing = _Intervals((r.start, r.end, index) for index, r in enumerate(passes))
    actions = [(event, match) for event in events if (match := _TRANSFER.fullmatch(event.name))]
    moving = _Intervals((event.start, event.end, index) for index, (event, _) in enumerate(actions))
    shifts = [event for event in events if event.name.startswith(MOVING) and _moved(event)[1] == SHIFT]
    posting = _Intervals((event.start, event.end, index) for index, event in enumerate(shifts))
    for kind, name, start, end in _blocking_collectives(events):
        yield Row(StreamKind.TENSOR, kind, *_pass_at(passes, passing, start), name, start, end)
    for event in _outside_blocking_collectives(events):
        name = event.name.removeprefix(_GLOO)
        if name in ("send", "recv") and (region := posting.at(event.start)) is not None:
            where, posted = _pass_at(passes, passing, event.start), shifts[region].start
            kind = COMMUNICATION[_moved(shifts[region])[0]]
            yield Row(StreamKind.CONTEXT, kind, *where, f"{SHIFT} {name}", posted, event.end)
        elif name in ("send", "recv") and (action := moving.at(event.start)) is not None:
            posted, (stage, way, direction, microbatch) = actions[action][0].start, actions[action][1].groups()
            kind, stream = TaskKind.PIPELINE_COMMUNICATION, _STREAMS[way, direction]
            yield Row(stream, kind, int(stage), int(microbatch), name, posted, event.end)
        elif name != "barrier":
            where = _pass_at(passes, passing, event.start)
            yield Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, *where, name, event.start, event.end)


def _pass_at(passes: Sequence[Record], passing: _Intervals, instant: int) -> tuple[int, int]:
    """Return (stage, microbatch) of the pass at ``instant``, -1 outside of all."""
    origin = passing.at(instant)
    return (-1, -1) if origin is None else (passes[origin].stage, passes[origin].microbatch)


def _moved(region: TraceEvent) -> tuple[str, str]:
    """Return the axis and the collective that a region names."""
    axis, _, collective = region.name.removeprefix(MOVING).partition(" ")
    return axis, collective


def _blocking_collectives(events: Sequence[TraceEvent]) -> list[tuple[TaskKind, str, int, int]]:
    """Return (kind, name, launch, end of wait) of every functional collective, and of those that regions name."""
    functional = [event for event in events if event.name.startswith(_FUNCTIONAL)]
    waits = [event for event in functional if event.name.endswith("wait_tensor")]
    starts = [event.start for event in waits]
    regions = [(*_moved(event), event) for event in events if event.name.startswith(MOVING)]
    return [
        (TaskKind.TENSOR_COMMUNICATION, _SUFFIX.sub("", event.name.removeprefix(_FUNCTIONAL)), event.start, end)
        for event in functional
        if not event.name.endswith(("wait_tensor", _WRAP))
        and (index := bisect_left(starts, event.start)) < len(waits)
        and (end := waits[index].end)
    ] + [(COMMUNICATION[axis], name, event.start, event.end) for axis, name, event in regions if name != SHIFT]


def _outside_blocking_collectives(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return gloo's events but one for each blocking collective: of those inside it, the one it ends with."""
    left = [event for event in events if event.name.startswith(_GLOO)]
    for _, _, start, end in _blocking_collectives(events):
        inside = [event for event in left if start <= event.start <= end and event.name not in _POINT_TO_POINT]
        ended = [event for event in inside if event.end <= end]
        if inside:
            left.remove(max(ended, key=_end) if ended else min(inside, key=_end))
    return left


def memory(events: Sequence[TraceEvent], start: int) -> list[tuple[int, int]]:
    """Return (ns, bytes beyond what was held before) where the allocated total turns, from ``start`` on."""
    result, level = [(start, 0)], 0
    rising = True
    for event in events:
        if event.size and event.start >= start:
            level += event.size
            if (event.size > 0) == rising and len(result) > 1:
                result[-1] = (event.start, level)
            else:
                result.append((event.start, level))
            rising = event.size > 0
    return result
