"""Joins what a rank recorded of a profiled step with what the profiler saw, into spans; for ranks on cores.

The profiler shows communication as ``gloo:*`` events. Sends and receives start inside the ``PP:`` actions of torch's
pipeline runtime. Collectives run on gloo's own threads, so their technique follows from where they were launched:

* between the launch of a functional collective and the end of its wait: tensor parallelism, by DTensor;
* in a region that `meshwise.executor.parallel.exchange` marks: along the axis that the region names (context, expert
  or tensor);
* anywhere else: data parallelism.

A tensor collective belongs to the pass that launches it, whenever gloo's threads run it. Messages round a ring run
beneath a pass. A collective of data parallelism is waiting time of its pass from the last operator that the pass ran
before the collective ended.

Spans have the names, kinds and streams of the simulator's, so that both can be compared: a transfer has the stage that
sends it, gathers of ``fully_shard`` run on a stream of their own, and its reductions are called ``reduce_scatter``,
which gloo runs as ``all_reduce``.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from meshwise.executor.recording.recorder import Record
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.strategies.plan.mesh import COMMUNICATION

TRANSFER = re.compile(r"PP:(\d+)(SEND|RECV)_([FB])(\d+)")
GLOO = "gloo:"
FULLY_SHARDED = re.compile(r"FSDP::(?:all_gather|post_backward_reduce) \((.*)\)")
_OPERATOR = "aten::"
_POINT_TO_POINT = ("gloo:send", "gloo:recv")
FUNCTIONAL = "_c10d_functional::"
_end = attrgetter("end")
_SUFFIX = re.compile(r"(_into)?_tensor$|_single$")
_WRAP = "_wrap_tensor_autograd"
"""An operator that follows a launch where autograd records; it communicates nothing."""
_STREAMS = {
    ("SEND", "F"): StreamKind.SEND_FORWARD,
    ("RECV", "F"): StreamKind.RECEIVE_FORWARD,
    ("SEND", "B"): StreamKind.SEND_BACKWARD,
    ("RECV", "B"): StreamKind.RECEIVE_BACKWARD,
}


MOVING = "meshwise moving "
"""Prefix of the names of regions in which ranks along an axis communicate; the axis and the collective follow."""
SHIFT = "shift"
"""The name, instead of a collective's, of a region that posts sends and receives, which end later."""

PASSES = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.OPTIMIZER)


HOST = -1
"""The stream number of an event of the host."""


class TraceEvent(NamedTuple):
    """One event of the profiler: times in ns of the profiler's clock, ``size`` the bytes of a communication.

    An event of a GPU has the number of its ``stream``, and ``launch_time``, at which the host launched it.
    """

    name: str
    start: int
    end: int
    size: int
    stream: int = HOST
    launched: int = 0

    def later(self, offset: int) -> "TraceEvent":
        """Return the event on another clock, which is ``offset`` ns ahead."""
        return self._replace(start=self.start + offset, end=self.end + offset, launched=self.launched + offset)


class Allocation(NamedTuple):
    """An allocation of ``size`` bytes at an address, or a free with a negative size; ``time`` in ns."""

    time: int
    address: int
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


class Blocking(NamedTuple):
    """A collective that a pass waits for, from its launch to the end of the wait; times in ns, size in bytes."""

    kind: TaskKind
    name: str
    start: int
    end: int
    size: int


class Intervals:
    """Intervals of one thread, which do not overlap; finds the interval at an instant."""

    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        self.rows = sorted(rows)
        self.starts = [start for start, _, _ in self.rows]

    def at(self, instant: int) -> int | None:
        """Return the number of the interval at an instant; ``None`` outside all of them."""
        index = bisect_right(self.starts, instant) - 1
        return self.rows[index][2] if index >= 0 and instant <= self.rows[index][1] else None


def rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes, cut where they wait for communication, and the communication."""
    communication = list(_communication(records, events))
    copies = [row_of(record) for record in records if record.kind is TaskKind.HOST_COPY]
    blocking = {
        TaskKind.OPTIMIZER: [r for r in communication if r.kind is not TaskKind.PIPELINE_COMMUNICATION],
        TaskKind.RECOMPUTE: sorted(
            [r for r in communication if r.stream is StreamKind.TENSOR] + _waits(communication, events),
            key=attrgetter("start"),
        ),
    }
    inside = blocking[TaskKind.RECOMPUTE]
    recomputed = [row_of(record) for record in records if record.kind is TaskKind.RECOMPUTE]
    again = sorted(inside + recomputed, key=attrgetter("start"))
    blocking |= {TaskKind.FORWARD: inside, TaskKind.BACKWARD: again, TaskKind.WEIGHT_GRADIENT: again}
    passes = [record for record in records if record.kind is not TaskKind.HOST_COPY]
    holes = {kind: sorted(rows + copies, key=attrgetter("start")) for kind, rows in blocking.items()}
    result = communication + copies + [piece for r in passes for piece in without(row_of(r), holes[r.kind])]
    return sorted(result, key=lambda row: (row.start, row.end))


def row_of(record: Record) -> Row:
    """Return a record as a span."""
    return Row(_host_stream(record.operators) if record.kind is TaskKind.HOST_COPY else StreamKind.COMPUTE, *record)


def _host_stream(name: str) -> StreamKind:
    """Return the stream of a host copy, whose name ends in ``to host``, ``from host`` or ``on host``.

    >>> _host_stream("activations of layers.0 to host")
    <StreamKind.TO_HOST: 'to host'>
    """
    words = " ".join(name.split()[-2:])
    return StreamKind.HOST if words == "on host" else StreamKind(words)


def without(row: Row, holes: Sequence[Row]) -> list[Row]:
    """Return the parts of ``row`` outside ``holes``.

    A row that holes cover entirely is left as a span of length 0, so that every pass stays in the order.
    """
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
    """Return the end of every span of data parallelism in which no operator runs: there the pass waits for it."""
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
    passes = [r for r in records if r.kind in PASSES]
    passing = Intervals((r.start, r.end, index) for index, r in enumerate(passes))
    actions = [(event, match) for event in events if (match := TRANSFER.fullmatch(event.name))]
    moving = Intervals((event.start, event.end, index) for index, (event, _) in enumerate(actions))
    shifts = [event for event in events if event.name.startswith(MOVING) and moved(event)[1] == SHIFT]
    posting = Intervals((event.start, event.end, index) for index, event in enumerate(shifts))
    for each in _blocking_collectives(events):
        origin = _pass_at(passes, passing, each.start)
        inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
        yield blocking_row(each, origin) if inside else sum_of_replicated(each)
    launches = _launches(events)
    for event in _outside_blocking_collectives(events):
        name = event.name.removeprefix(GLOO)
        if name in ("send", "recv") and (region := posting.at(event.start)) is not None:
            yield _shift(event, shifts[region], _pass_at(passes, passing, event.start))
        elif name in ("send", "recv") and (action := moving.at(event.start)) is not None:
            yield transfer_row(event, *actions[action])
        elif name != "barrier":
            yield data_row(event, _taken(launches, event), _pass_at(passes, passing, event.start))


def blocking_row(each: Blocking, origin: Record | None) -> Row:
    """Return a collective as a span of the pass that waits for it."""
    where = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    return Row(StreamKind.TENSOR, each.kind, *where, each.name, each.start, each.end, each.size)


def sum_of_replicated(each: Blocking) -> Row:
    """Return a collective outside of passes as a span: a sum of gradients of replicated parameters."""
    what = f"{each.name} gradients of replicated parameters"
    return Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, -1, -1, what, each.start, each.end, each.size)


def _shift(event: TraceEvent, region: TraceEvent, origin: Record | None) -> Row:
    """Return a message round a ring as a span, from when it was posted."""
    where = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    what = f"{SHIFT} {event.name.removeprefix(GLOO)}"
    return Row(StreamKind.CONTEXT, COMMUNICATION[moved(region)[0]], *where, what, region.start, event.end, event.size)


def transfer_row(event: TraceEvent, action: TraceEvent, match: re.Match[str]) -> Row:
    """Return a send or receive as a span of the stage that sends, from when it was posted."""
    stage, way, direction, microbatch = match.groups()
    ahead = (1 if direction == "F" else -1) if way == "RECV" else 0
    what = "send activations" if direction == "F" else "send gradients"
    sender, kind = int(stage) - ahead, TaskKind.PIPELINE_COMMUNICATION
    return Row(_STREAMS[way, direction], kind, sender, int(microbatch), what, action.start, event.end, event.size)


class Launch(NamedTuple):
    """The launch of a collective of ``fully_shard``, which gathers ``unit`` or reduces its gradients."""

    gathers: bool
    unit: str
    start: int
    size: int


_LAUNCHES = {"c10d::_allgather_base_": True, "c10d::_reduce_scatter_base_": False}


def _launches(events: Sequence[TraceEvent]) -> list[Launch]:
    named = [(event, match[1]) for event in events if (match := FULLY_SHARDED.fullmatch(event.name))]
    units = Intervals((event.start, event.end, index) for index, (event, _) in enumerate(named))
    found = []
    for event in events:
        if event.name in _LAUNCHES and (index := units.at(event.start)) is not None:
            unit = named[index][1].removeprefix("network.")
            found.append(Launch(_LAUNCHES[event.name], unit, event.start, event.size))
    return found


def _taken(launches: list[Launch], event: TraceEvent) -> Launch | None:
    """Remove and return the first launch that fits an event of gloo; ``None`` where none does."""
    gathers = event.name == "gloo:all_gather"
    for launch in launches:
        same = gathers or (event.name == "gloo:all_reduce" and launch.size == event.size)
        if launch.gathers == gathers and same and launch.start <= event.start:
            launches.remove(launch)
            return launch
    return None


def data_row(event: TraceEvent, launch: Launch | None, origin: Record | None) -> Row:
    """Return a collective of data parallelism as a span, named as the simulator names it."""
    kind, name = TaskKind.DATA_COMMUNICATION, event.name.removeprefix(GLOO)
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


def _pass_at(passes: Sequence[Record], passing: Intervals, instant: int) -> Record | None:
    """Return the pass at ``instant``; ``None`` outside of passes."""
    origin = passing.at(instant)
    return None if origin is None else passes[origin]


def moved(region: TraceEvent) -> tuple[str, str]:
    """Return the axis and the collective that a region names."""
    axis, _, collective = region.name.removeprefix(MOVING).partition(" ")
    return axis, collective


def _blocking_collectives(events: Sequence[TraceEvent]) -> list[Blocking]:
    """Return all functional collectives, and those that marked regions name."""
    functional = [event for event in events if event.name.startswith(FUNCTIONAL)]
    waits = [event for event in functional if event.name.endswith("wait_tensor")]
    starts = [event.start for event in waits]
    regions = [(*moved(event), event) for event in events if event.name.startswith(MOVING)]
    return [
        Blocking(
            TaskKind.TENSOR_COMMUNICATION,
            _SUFFIX.sub("", event.name.removeprefix(FUNCTIONAL)),
            event.start,
            end,
            event.size,
        )
        for event in functional
        if not event.name.endswith(("wait_tensor", _WRAP))
        and (index := bisect_left(starts, event.start)) < len(waits)
        and (end := waits[index].end)
    ] + [
        Blocking(COMMUNICATION[axis], name, event.start, event.end, _largest(events, event))
        for axis, name, event in regions
        if name != SHIFT
    ]


def _largest(events: Sequence[TraceEvent], region: TraceEvent) -> int:
    """Return the bytes of the largest message in a region."""
    return max((event.size for event in events if region.start <= event.start <= region.end), default=0)


def _outside_blocking_collectives(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return gloo's events that belong to no blocking collective.

    Each blocking collective takes one event inside it: the last that ended, or the next to end where none has.
    """
    left = [event for event in events if event.name.startswith(GLOO)]
    for _, _, start, end, _ in _blocking_collectives(events):
        inside = [event for event in left if start <= event.start <= end and event.name not in _POINT_TO_POINT]
        ended = [event for event in inside if event.end <= end]
        if inside:
            left.remove(max(ended, key=_end) if ended else min(inside, key=_end))
    return left
