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
from typing import Any, NamedTuple

from meshwise.executor.recording.recorder import Record
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.strategies.plan.mesh import PASS_AXES

TRANSFER = re.compile(r"PP:(\d+)(SEND|RECV)_([FB])(\d+)")
GLOO = "gloo:"
FULLY_SHARDED = re.compile(r"FSDP::(?:all_gather|post_backward_reduce) \((.*)\)")
_OPERATOR = "aten::"
_POINT_TO_POINT = ("gloo:send", "gloo:recv")
FUNCTIONAL = "_c10d_functional::"
_start, _end = attrgetter("start"), attrgetter("end")
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
    launch_time: int = 0

    def shift_clock(self, offset: int) -> "TraceEvent":
        """Return the event on another clock, which is ``offset`` ns ahead."""
        return self._replace(start=self.start + offset, end=self.end + offset, launch_time=self.launch_time + offset)


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


class BlockingCollective(NamedTuple):
    """A collective that a pass waits for, from its launch to the end of the wait; times in ns, size in bytes."""

    kind: TaskKind
    name: str
    start: int
    end: int
    size: int


class Intervals:
    """Intervals of one thread, which may be nested; finds the innermost interval at an instant."""

    def __init__(self, intervals: Iterable[Any]) -> None:
        self.intervals = sorted(intervals, key=lambda interval: (interval.start, -interval.end))
        self.starts = [interval.start for interval in self.intervals]
        # for each interval the number of the one around it: a search goes outward from the last that began
        self.parents: list[int] = []
        open_: list[int] = []
        for index, interval in enumerate(self.intervals):
            while open_ and self.intervals[open_[-1]].end < interval.end:
                open_.pop()
            self.parents.append(open_[-1] if open_ else -1)
            open_.append(index)

    def find_innermost(self, instant: int) -> Any:
        """Return the innermost interval; ``None`` outside all of them."""
        index = bisect_right(self.starts, instant) - 1
        while index >= 0 and self.intervals[index].end < instant:
            index = self.parents[index]
        return self.intervals[index] if index >= 0 else None


def build_rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes, cut where they wait for communication, and the communication."""
    communication = _end_before_updates(records, _list_communication(records, events))
    copies = [to_row(record) for record in records if record.kind is TaskKind.HOST_COPY]
    waits = [r for r in communication if r.stream is StreamKind.TENSOR] + _find_waits(communication, events)
    tensor_rows = sorted(waits, key=_start)
    recompute_rows = [to_row(record) for record in records if record.kind is TaskKind.RECOMPUTE]
    backward_holes = sorted(tensor_rows + recompute_rows, key=_start)
    blocking = {
        TaskKind.OPTIMIZER: [r for r in communication if r.kind is not TaskKind.PIPELINE_COMMUNICATION],
        TaskKind.RECOMPUTE: tensor_rows,
        TaskKind.FORWARD: tensor_rows,
        TaskKind.BACKWARD: backward_holes,
        TaskKind.WEIGHT_GRADIENT: backward_holes,
    }
    passes = [record for record in records if record.kind is not TaskKind.HOST_COPY]
    holes = {kind: sorted(rows + copies, key=_start) for kind, rows in blocking.items()}
    result = communication + copies + [piece for r in passes for piece in cut_holes(to_row(r), holes[r.kind])]
    return sorted(result, key=lambda row: (row.start, row.end))


def to_row(record: Record) -> Row:
    """Return a record as a span."""
    return Row(_host_stream(record.operators) if record.kind is TaskKind.HOST_COPY else StreamKind.COMPUTE, *record)


def _host_stream(name: str) -> StreamKind:
    """Return the stream of a host copy, whose name ends in ``to host``, ``from host`` or ``on host``.

    >>> _host_stream("activations of layers.0 to host")
    <StreamKind.TO_HOST: 'to host'>
    """
    words = " ".join(name.split()[-2:])
    return StreamKind.HOST if words == "on host" else StreamKind(words)


def cut_holes(row: Row, holes: Sequence[Row]) -> list[Row]:
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


def _end_before_updates(records: Sequence[Record], rows: Iterable[Row]) -> list[Row]:
    """Return the rows with every communication of data parallelism ended where the next update begins.

    An update begins when all gradients are there. gloo's thread wakes those that wait for a collective before it notes
    its end, so that on a busy host the end can be noted when the update is over.
    """
    update_starts = sorted(record.start for record in records if record.kind is TaskKind.OPTIMIZER)
    result = []
    for row in rows:
        index = bisect_right(update_starts, row.start)
        is_cut = row.kind is TaskKind.DATA_COMMUNICATION and index < len(update_starts)
        result.append(row._replace(end=min(row.end, update_starts[index])) if is_cut else row)
    return result


def _find_waits(communication: Sequence[Row], events: Sequence[TraceEvent]) -> list[Row]:
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


def _list_communication(records: Sequence[Record], events: Sequence[TraceEvent]) -> Iterator[Row]:
    passes = Intervals(record for record in records if record.kind in PASSES)
    actions = Intervals(event for event in events if TRANSFER.fullmatch(event.name))
    shifts = Intervals(e for e in events if e.name.startswith(MOVING) and parse_region(e.name)[1] == SHIFT)
    for collective in _list_blocking_collectives(events):
        origin = passes.find_innermost(collective.start)
        is_inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
        yield blocking_row(collective, origin) if is_inside else replicated_sum_row(collective)
    launches = _list_launches(events)
    for event in _list_other_events(events):
        name, origin = event.name.removeprefix(GLOO), passes.find_innermost(event.start)
        if name in ("send", "recv") and (region := shifts.find_innermost(event.start)) is not None:
            axis, shift = parse_region(region.name)  # a message round a ring lasts from when it was posted
            yield message_row(StreamKind.CONTEXT, PASS_AXES[axis].task, origin, f"{shift} {name}", region.start, event)
        elif name in ("send", "recv") and (action := actions.find_innermost(event.start)) is not None:
            yield transfer_row(action.name, action.start, event)
        elif name != "barrier":
            yield data_row(event, _pop_launch(launches, event), origin)


def locate(origin: Record | None) -> tuple[int, int]:
    """Return the stage and microbatch of a pass, -1 outside of passes."""
    return (-1, -1) if origin is None else (origin.stage, origin.microbatch)


def message_row(
    stream: StreamKind, kind: TaskKind, origin: Record | None, operators: str, start: int, event: TraceEvent
) -> Row:
    """Return a communication of a pass as a span, from ``start`` to the end of its event."""
    return Row(stream, kind, *locate(origin), operators, start, event.end, event.size)


def blocking_row(collective: BlockingCollective, origin: Record | None) -> Row:
    """Return a collective as a span of the pass that waits for it."""
    kind, name, start, end, size = collective
    return Row(StreamKind.TENSOR, kind, *locate(origin), name, start, end, size)


def replicated_sum_row(collective: BlockingCollective) -> Row:
    """Return a collective outside of passes as a span: a sum of gradients of replicated parameters."""
    operators = f"{collective.name} gradients of replicated parameters"
    kind = TaskKind.DATA_COMMUNICATION
    return blocking_row(collective, None)._replace(stream=StreamKind.DATA, kind=kind, operators=operators)


def transfer_row(action: str, start: int, event: TraceEvent) -> Row:
    """Return a send or receive as a span of the stage that sends, from when the action of its name was posted."""
    ((stage, operation, direction, microbatch),) = TRANSFER.findall(action)
    stage_offset = (1 if direction == "F" else -1) if operation == "RECV" else 0
    operators = "send activations" if direction == "F" else "send gradients"
    sender, kind = int(stage) - stage_offset, TaskKind.PIPELINE_COMMUNICATION
    return Row(_STREAMS[operation, direction], kind, sender, int(microbatch), operators, start, event.end, event.size)


class Launch(NamedTuple):
    """The launch of a collective of ``fully_shard``, which gathers ``unit`` or reduces its gradients."""

    gathers: bool
    unit: str
    start: int
    size: int


_LAUNCHES = {"c10d::_allgather_base_": True, "c10d::_reduce_scatter_base_": False}


def _list_launches(events: Sequence[TraceEvent]) -> list[Launch]:
    regions = Intervals(event for event in events if find_unit(event.name) is not None)
    launches = []
    for event in events:
        if event.name in _LAUNCHES and (region := regions.find_innermost(event.start)) is not None:
            launches.append(Launch(_LAUNCHES[event.name], find_unit(region.name) or "", event.start, event.size))
    return launches


def find_unit(region: str) -> str | None:
    """Return the unit that ``fully_shard`` gathers or reduces in a region; ``None`` where the region is another."""
    match = FULLY_SHARDED.fullmatch(region)
    return match[1].removeprefix("network.") if match else None


def _pop_launch(launches: list[Launch], event: TraceEvent) -> Launch | None:
    """Remove and return the first launch that fits an event of gloo; ``None`` where none does."""
    gathers = event.name == "gloo:all_gather"
    for launch in launches:
        is_match = gathers or (event.name == "gloo:all_reduce" and launch.size == event.size)
        if launch.gathers == gathers and is_match and launch.start <= event.start:
            launches.remove(launch)
            return launch
    return None


def data_row(event: TraceEvent, launch: Launch | None, origin: Record | None) -> Row:
    """Return a collective of data parallelism as a span, named as the simulator names it."""
    kind, name = TaskKind.DATA_COMMUNICATION, event.name.removeprefix(GLOO)
    if launch is not None:
        suffix = f" of {launch.unit}" if launch.unit else ""
        operators = f"all_gather parameters{suffix}" if launch.gathers else f"reduce_scatter gradients{suffix}"
        stream = StreamKind.GATHER if launch.gathers else StreamKind.DATA
        return Row(stream, kind, *locate(origin), operators, launch.start, event.end, launch.size)
    is_update = origin is not None and origin.kind is TaskKind.OPTIMIZER
    subject = "parameters" if name == "broadcast" else "norm of gradients"
    operators = f"{name} {subject if is_update else 'gradients'}"
    return message_row(StreamKind.DATA, kind, origin, operators, event.start, event)


def parse_region(region: str) -> tuple[str, str]:
    """Return the axis and the collective that a marked region names."""
    axis, _, collective = region.removeprefix(MOVING).partition(" ")
    return axis, collective


def _list_blocking_collectives(events: Sequence[TraceEvent]) -> list[BlockingCollective]:
    """Return all functional collectives, and those that marked regions name."""
    functional = [event for event in events if event.name.startswith(FUNCTIONAL)]
    waits = [event for event in functional if event.name.endswith("wait_tensor")]
    starts = [event.start for event in waits]
    regions = [(*parse_region(event.name), event) for event in events if event.name.startswith(MOVING)]
    return [
        BlockingCollective(
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
        BlockingCollective(PASS_AXES[axis].task, name, event.start, event.end, _find_largest(events, event))
        for axis, name, event in regions
        if name != SHIFT
    ]


def _find_largest(events: Sequence[TraceEvent], region: TraceEvent) -> int:
    """Return the bytes of the largest message in a region."""
    return max((event.size for event in events if region.start <= event.start <= region.end), default=0)


def _list_other_events(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return gloo's events that belong to no blocking collective.

    Each blocking collective takes one event inside it: the last that ended, or the next to end where none has.
    """
    remaining_events = [event for event in events if event.name.startswith(GLOO)]
    for _, _, start, end, _ in _list_blocking_collectives(events):
        inside_events = [
            event for event in remaining_events if start <= event.start <= end and event.name not in _POINT_TO_POINT
        ]
        ended_events = [event for event in inside_events if event.end <= end]
        if inside_events:
            remaining_events.remove(max(ended_events, key=_end) if ended_events else min(inside_events, key=_end))
    return remaining_events
