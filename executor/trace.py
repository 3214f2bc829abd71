"""One rank's profiled step: what it recorded and what the profiler saw, joined into spans.

The profiler sees what gloo does as ``gloo:*`` spans. Sends and receives start inside the
pipeline runtime's ``PP:`` actions. Collectives run on gloo's own threads: those between the
launch of a functional collective and the end of its wait are DTensor's (tensor parallelism),
the others are data parallelism. A tensor collective belongs to the pass that launches it, whenever
gloo's threads come to it. A span of data parallelism is a wait of its pass from the last operator that the pass
ran before it ended.

Spans have the names, kinds and streams of the simulator's own, so that the two can be set side by side: a transfer
has the stage that sends, what ``fully_shard`` gathers runs on a stream of its own, and its reductions are
``reduce_scatter``, which gloo does as ``all_reduce``.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from executor.recorder import Record
from simulator.program import StreamKind, TaskKind

_TRANSFER = re.compile(r"PP:(\d+)(SEND|RECV)_([FB])(\d+)")
_GLOO = "gloo:"
_FULLY_SHARDED = re.compile(r"FSDP::(?:all_gather|post_backward_reduce) \((.*)\)")
_OPERATOR = "aten::"
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


_PASSES = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.OPTIMIZER)


class TraceEvent(NamedTuple):
    """One event of the profiler: ns of its own clock; ``size`` bytes of the message of a communication."""

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
    bytes: int = 0


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
    blocking = {
        TaskKind.OPTIMIZER: [r for r in communication if r.kind is not TaskKind.PIPELINE_COMMUNICATION],
        TaskKind.RECOMPUTE: sorted(
            [r for r in communication if r.kind is TaskKind.TENSOR_COMMUNICATION] + _waits(communication, events),
            key=attrgetter("start"),
        ),
    }
    inside = blocking[TaskKind.RECOMPUTE]
    recomputed = [_row(record) for record in records if record.kind is TaskKind.RECOMPUTE]
    again = sorted(inside + recomputed, key=attrgetter("start"))
    blocking |= {TaskKind.FORWARD: inside, TaskKind.BACKWARD: again, TaskKind.WEIGHT_GRADIENT: again}
    result = communication + [piece for r in records for piece in without(_row(r), blocking[r.kind])]
    return sorted(result, key=lambda row: (row.start, row.end))


def _row(record: Record) -> Row:
    return Row(StreamKind.COMPUTE, *record)


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


def _waits(communication: Sequence[Row], events: Sequence[TraceEvent]) -> list[Row]:
    """Return of every span of data parallelism the end in which no operator runs: who runs a pass waits for it."""
    operators = [event for event in events if event.name.startswith(_OPERATOR)]
    starts = [event.start for event in operators]
    ends = list(accumulate((event.end for event in operators), max, initial=0))
    result = []
    for row in communication:
        if row.kind is TaskKind.DATA_COMMUNICATION:
            begin = max(row.start, ends[bisect_left(starts, row.end)])
            if begin < row.end:
                result.append(row._replace(start=begin))
    return result


def _communication(records: Sequence[Record], events: Sequence[TraceEvent]) -> Iterator[Row]:
    passes = [r for r in records if r.kind in _PASSES]
    passing = _Intervals((r.start, r.end, index) for index, r in enumerate(passes))
    actions = [(event, match) for event in events if (match := _TRANSFER.fullmatch(event.name))]
    moving = _Intervals((event.start, event.end, index) for index, (event, _) in enumerate(actions))
    for name, start, end, size in _tensor_collectives(events):
        origin = _pass_at(passes, passing, start)
        inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
        yield _tensor_row(name, start, end, size, origin) if inside else _sum_of_replicated(name, start, end, size)
    launches = _launches(events)
    for event in _outside_tensor_collectives(events):
        name = event.name.removeprefix(_GLOO)
        if name in ("send", "recv") and (action := moving.at(event.start)) is not None:
            yield _transfer(event, *actions[action])
        elif name != "barrier":
            yield _data_row(event, _taken(launches, event), _pass_at(passes, passing, event.start))


def _tensor_row(name: str, start: int, end: int, size: int, origin: Record | None) -> Row:
    where = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    return Row(StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, *where, name, start, end, size)


def _sum_of_replicated(name: str, start: int, end: int, size: int) -> Row:
    """Return a tensor collective outside of passes: of gradients of what every tensor rank holds."""
    what = f"{name} gradients of replicated parameters"
    return Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, -1, -1, what, start, end, size)


def _transfer(event: TraceEvent, action: TraceEvent, match: re.Match[str]) -> Row:
    """Return a send or receive, of the stage that sends, from when it was posted."""
    stage, way, direction, microbatch = match.groups()
    ahead = (1 if direction == "F" else -1) if way == "RECV" else 0
    what = "send activations" if direction == "F" else "send gradients"
    sender, kind = int(stage) - ahead, TaskKind.PIPELINE_COMMUNICATION
    return Row(_STREAMS[way, direction], kind, sender, int(microbatch), what, action.start, event.end, event.size)


class _Launch(NamedTuple):
    """A collective of ``fully_shard`` as it is launched: gathers ``unit`` or reduces its gradients."""

    gathers: bool
    unit: str
    start: int
    size: int


_LAUNCHES = {"c10d::_allgather_base_": True, "c10d::_reduce_scatter_base_": False}


def _launches(events: Sequence[TraceEvent]) -> list[_Launch]:
    named = [(event, match[1]) for event in events if (match := _FULLY_SHARDED.fullmatch(event.name))]
    units = _Intervals((event.start, event.end, index) for index, (event, _) in enumerate(named))
    found = []
    for event in events:
        if event.name in _LAUNCHES and (index := units.at(event.start)) is not None:
            unit = named[index][1].removeprefix("network.")
            found.append(_Launch(_LAUNCHES[event.name], unit, event.start, event.size))
    return found


def _taken(launches: list[_Launch], event: TraceEvent) -> _Launch | None:
    """Return the first launch, which is taken from the list, of what gloo runs in ``event``."""
    gathers = event.name == "gloo:all_gather"
    for launch in launches:
        same = gathers or (event.name == "gloo:all_reduce" and launch.size == event.size)
        if launch.gathers == gathers and same and launch.start <= event.start:
            launches.remove(launch)
            return launch
    return None


def _data_row(event: TraceEvent, launch: _Launch | None, origin: Record | None) -> Row:
    """Return a collective of data parallelism, named as the simulator names it."""
    kind, name = TaskKind.DATA_COMMUNICATION, event.name.removeprefix(_GLOO)
    where = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    if launch is not None:
        of = f" of {launch.unit}" if launch.unit else ""
        what = f"all_gather parameters{of}" if launch.gathers else f"reduce_scatter gradients{of}"
        stream = StreamKind.GATHER if launch.gathers else StreamKind.DATA
        return Row(stream, kind, *where, what, launch.start, event.end, launch.size)
    updating = origin is not None and origin.kind is TaskKind.OPTIMIZER
    of_update = "parameters" if name == "broadcast" else "norm of gradients"
    what = f"{name} {of_update if updating else 'gradients'}"
    return Row(StreamKind.DATA, kind, *where, what, event.start, event.end, event.size)


def _pass_at(passes: Sequence[Record], passing: _Intervals, instant: int) -> Record | None:
    """Return the pass at ``instant``; ``None`` outside of all."""
    origin = passing.at(instant)
    return None if origin is None else passes[origin]


def _tensor_collectives(events: Sequence[TraceEvent]) -> list[tuple[str, int, int, int]]:
    """Return (name, launch, end of wait, bytes) of every functional collective."""
    functional = [event for event in events if event.name.startswith(_FUNCTIONAL)]
    waits = [event for event in functional if event.name.endswith("wait_tensor")]
    starts = [event.start for event in waits]
    return [
        (_SUFFIX.sub("", event.name.removeprefix(_FUNCTIONAL)), event.start, waits[index].end, event.size)
        for event in functional
        if not event.name.endswith(("wait_tensor", _WRAP)) and (index := bisect_left(starts, event.start)) < len(waits)
    ]


def _outside_tensor_collectives(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return gloo's events but one for each tensor collective: of those inside it, the one it ends with."""
    left = [event for event in events if event.name.startswith(_GLOO)]
    for _, start, end, _ in _tensor_collectives(events):
        inside = [event for event in left if start <= event.start <= end and event.name not in _POINT_TO_POINT]
        ended = [event for event in inside if event.end <= end]
        if inside:
            left.remove(max(ended, key=_end) if ended else min(inside, key=_end))
    return left
