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
from meshwise.strategies.plan.mesh import PASS_AXES

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
    """Intervals of one thread, which do not overlap; finds the interval at an instant."""

    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        self.rows = sorted(rows)
        self.starts = [start for start, _, _ in self.rows]

    def find_index(self, instant: int) -> int | None:
        """Return the number of the interval at an instant; ``None`` outside all of them."""
        index = bisect_right(self.starts, instant) - 1
        return self.rows[index][2] if index >= 0 and instant <= self.rows[index][1] else None


def build_rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes, cut where they wait for communication, and the communication."""
    communication = list(_list_communication(records, events))
    copies = [to_row(record) for record in records if record.kind is TaskKind.HOST_COPY]
    blocking = {
        TaskKind.OPTIMIZER: [r for r in communication if r.kind is not TaskKind.PIPELINE_COMMUNICATION],
        TaskKind.RECOMPUTE: sorted(
            [r for r in communication if r.stream is StreamKind.TENSOR] + _find_waits(communication, events),
            key=attrgetter("start"),
        ),
    }
    tensor_rows = blocking[TaskKind.RECOMPUTE]
    recompute_rows = [to_row(record) for record in records if record.kind is TaskKind.RECOMPUTE]
    backward_holes = sorted(tensor_rows + recompute_rows, key=attrgetter("start"))
    blocking |= {
        TaskKind.FORWARD: tensor_rows,
        TaskKind.BACKWARD: backward_holes,
        TaskKind.WEIGHT_GRADIENT: backward_holes,
    }
    passes = [record for record in records if record.kind is not TaskKind.HOST_COPY]
    holes = {kind: sorted(rows + copies, key=attrgetter("start")) for kind, rows in blocking.items()}
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
    passes = [r for r in records if r.kind in PASSES]
    pass_intervals = Intervals((r.start, r.end, index) for index, r in enumerate(passes))
    actions = [(event, match) for event in events if (match := TRANSFER.fullmatch(event.name))]
    action_intervals = Intervals((event.start, event.end, index) for index, (event, _) in enumerate(actions))
    shifts = [event for event in events if event.name.startswith(MOVING) and parse_region(event)[1] == SHIFT]
    shift_intervals = Intervals((event.start, event.end, index) for index, event in enumerate(shifts))
    for collective in _list_blocking_collectives(events):
        origin = _find_pass(passes, pass_intervals, collective.start)
        is_inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
        yield blocking_row(collective, origin) if is_inside else replicated_sum_row(collective)
    launches = _list_launches(events)
    for event in _list_other_events(events):
        name = event.name.removeprefix(GLOO)
        if name in ("send", "recv") and (region := shift_intervals.find_index(event.start)) is not None:
            yield _shift_row(event, shifts[region], _find_pass(passes, pass_intervals, event.start))
        elif name in ("send", "recv") and (action := action_intervals.find_index(event.start)) is not None:
            yield transfer_row(event, *actions[action])
        elif name != "barrier":
            yield data_row(event, _pop_launch(launches, event), _find_pass(passes, pass_intervals, event.start))


def blocking_row(collective: BlockingCollective, origin: Record | None) -> Row:
    """Return a collective as a span of the pass that waits for it."""
    stage_microbatch = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    return Row(
        StreamKind.TENSOR,
        collective.kind,
        *stage_microbatch,
        collective.name,
        collective.start,
        collective.end,
        collective.size,
    )


def replicated_sum_row(collective: BlockingCollective) -> Row:
    """Return a collective outside of passes as a span: a sum of gradients of replicated parameters."""
    operators = f"{collective.name} gradients of replicated parameters"
    return Row(
        StreamKind.DATA,
        TaskKind.DATA_COMMUNICATION,
        -1,
        -1,
        operators,
        collective.start,
        collective.end,
        collective.size,
    )


def _shift_row(event: TraceEvent, region: TraceEvent, origin: Record | None) -> Row:
    """Return a message round a ring as a span, from when it was posted."""
    stage_microbatch = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    operators = f"{SHIFT} {event.name.removeprefix(GLOO)}"
    return Row(
        StreamKind.CONTEXT,
        PASS_AXES[parse_region(region)[0]].task,
        *stage_microbatch,
        operators,
        region.start,
        event.end,
        event.size,
    )


def transfer_row(event: TraceEvent, action: TraceEvent, match: re.Match[str]) -> Row:
    """Return a send or receive as a span of the stage that sends, from when it was posted."""
    stage, operation, direction, microbatch = match.groups()
    stage_offset = (1 if direction == "F" else -1) if operation == "RECV" else 0
    operators = "send activations" if direction == "F" else "send gradients"
    sender, kind = int(stage) - stage_offset, TaskKind.PIPELINE_COMMUNICATION
    return Row(
        _STREAMS[operation, direction], kind, sender, int(microbatch), operators, action.start, event.end, event.size
    )


class Launch(NamedTuple):
    """The launch of a collective of ``fully_shard``, which gathers ``unit`` or reduces its gradients."""

    gathers: bool
    unit: str
    start: int
    size: int


_LAUNCHES = {"c10d::_allgather_base_": True, "c10d::_reduce_scatter_base_": False}


def _list_launches(events: Sequence[TraceEvent]) -> list[Launch]:
    regions = [(event, match[1]) for event in events if (match := FULLY_SHARDED.fullmatch(event.name))]
    units = Intervals((event.start, event.end, index) for index, (event, _) in enumerate(regions))
    launches = []
    for event in events:
        if event.name in _LAUNCHES and (index := units.find_index(event.start)) is not None:
            unit = regions[index][1].removeprefix("network.")
            launches.append(Launch(_LAUNCHES[event.name], unit, event.start, event.size))
    return launches


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
    stage_microbatch = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    if launch is not None:
        suffix = f" of {launch.unit}" if launch.unit else ""
        operators = f"all_gather parameters{suffix}" if launch.gathers else f"reduce_scatter gradients{suffix}"
        stream = StreamKind.GATHER if launch.gathers else StreamKind.DATA
        return Row(stream, kind, *stage_microbatch, operators, launch.start, event.end, launch.size)
    is_update = origin is not None and origin.kind is TaskKind.OPTIMIZER
    subject = "parameters" if name == "broadcast" else "norm of gradients"
    operators = f"{name} {subject if is_update else 'gradients'}"
    return Row(StreamKind.DATA, kind, *stage_microbatch, operators, event.start, event.end, event.size)


def _find_pass(passes: Sequence[Record], passing: Intervals, instant: int) -> Record | None:
    """Return the pass at ``instant``; ``None`` outside of passes."""
    origin = passing.find_index(instant)
    return None if origin is None else passes[origin]


def parse_region(region: TraceEvent) -> tuple[str, str]:
    """Return the axis and the collective that a region names."""
    axis, _, collective = region.name.removeprefix(MOVING).partition(" ")
    return axis, collective


def _list_blocking_collectives(events: Sequence[TraceEvent]) -> list[BlockingCollective]:
    """Return all functional collectives, and those that marked regions name."""
    functional = [event for event in events if event.name.startswith(FUNCTIONAL)]
    waits = [event for event in functional if event.name.endswith("wait_tensor")]
    starts = [event.start for event in waits]
    regions = [(*parse_region(event), event) for event in events if event.name.startswith(MOVING)]
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
