"""Joins kernels, messages and copies that torch's profiler saw on a GPU [1]_ into the spans of a rank's step.

The GPU runs behind the host, so a kernel belongs to the pass during which the host launched it. The kernels of a pass
on the compute stream are one span from the first to the last. It is cut where another pass came between, and where no
kernel ran during a message or a copy, for which the pass waited. Spans have the names, kinds and streams of
`meshwise.executor.recording.trace`.

References
----------
.. [1] torch, ``torch.profiler.profile.export_chrome_trace``; Kineto, ``libkineto/src/output_json.cpp`` (categories
   ``kernel``, ``gpu_memcpy``, ``cuda_runtime``, arguments ``correlation``, ``External id``, ``stream``, ``bytes``, and
   of NCCL's kernels ``Collective name``, ``In msg nelems``, ``dtype``).
"""

import json
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.trace import (
    FUNCTIONAL,
    HOST,
    MOVING,
    SHIFT,
    TRANSFER,
    BlockingCollective,
    Intervals,
    Launch,
    Row,
    TraceEvent,
    blocking_row,
    cut_holes,
    data_row,
    find_unit,
    message_row,
    parse_region,
    replicated_sum_row,
    to_row,
    transfer_row,
)
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.strategies.plan.mesh import PASS_AXES

MESSAGE = "message "
"""Prefix that NCCL's kernels get here, before the name of the collective."""
COPY = "Memcpy "
PAUSE = 10_000
"""Longest gap in ns between two kernels that counts as launch time, not as a wait."""
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_REGIONS = (MOVING, "PP:", "FSDP::", FUNCTIONAL)
_ITEMSIZE = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
"""Bytes of an element, by Kineto's name of the dtype; 1 for other names."""
_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send and receive"),
    ("send", "send"),
    ("recv", "receive"),
    ("reduce", "reduce"),
)
"""Letters in the names of collectives and of kernels, and the collective's name here; the first that occurs counts."""


def read_profiler(profiler: Any) -> list[TraceEvent]:
    """Return the events of a finished ``torch.profiler.profile`` that recorded a GPU."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parse_events(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def parse_events(document: Mapping[str, Any]) -> list[TraceEvent]:
    """Return the GPU's events in a Chrome trace, and the host's regions that name them, in order of start."""
    entries = [entry for entry in document["traceEvents"] if entry.get("ph") == "X"]
    launch_times: dict[int, int] = {}
    operator_times: dict[int, int] = {}
    for entry in entries:
        arguments = entry.get("args", {})
        if entry.get("cat") in _LAUNCHING and "correlation" in arguments:
            launch_times[arguments["correlation"]] = _ns(entry["ts"])
        elif entry.get("cat") == "cpu_op" and "External id" in arguments:
            operator_times[arguments["External id"]] = _ns(entry["ts"])
    result = []
    for entry in entries:
        name, start = str(entry["name"]), _ns(entry["ts"])
        if entry.get("cat") in _GPU:
            arguments = entry.get("args", {})
            operator_time = operator_times.get(arguments.get("External id", 0), start)
            instant = launch_times.get(arguments.get("correlation", 0), operator_time)
            label, size = _name_event(name, arguments)
            stream = int(arguments.get("stream", 0))
            result.append(TraceEvent(label, start, start + _ns(entry["dur"]), size, stream, instant))
        elif entry.get("cat") in ("cpu_op", "user_annotation") and name.startswith((*_REGIONS, "meshwise ")):
            result.append(TraceEvent(name, start, start + _ns(entry["dur"]), 0))
    return sorted(result, key=lambda event: event.start)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _name_event(name: str, arguments: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of a GPU's event here, and the bytes that it moves between devices."""
    if name.startswith(COPY):
        return name, int(arguments.get("bytes", 0))
    if not name.startswith("nccl"):
        return name, 0
    words = re.sub(r"[^a-z]", "", str(arguments.get("Collective name", name)).lower())
    kind = next((collective for pattern, collective in _COLLECTIVES if pattern in words), words)
    elements = max(int(arguments.get(f"{direction} msg nelems", 0)) for direction in ("In", "Out"))
    return MESSAGE + kind, elements * _ITEMSIZE.get(str(arguments.get("dtype", "")).lower(), 1)


def build_rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes, cut where they waited, and messages and copies."""
    device_events = [event for event in events if event.stream != HOST]
    passes = Intervals([record for record in records if record.kind is not TaskKind.HOST_COPY])
    regions = Intervals([event for event in events if event.name.startswith(_REGIONS)])
    kernels = _list_compute_kernels(device_events)
    messages = [_message_row(kernel, passes, regions) for kernel in device_events if kernel.name.startswith(MESSAGE)]
    copies = [*_list_copies(records, device_events), *_list_host_gathers(records, device_events, regions)]
    busy_intervals = _merge_kernels(kernels)
    holes = sorted(
        (gap for row in messages + copies for gap in _find_gaps(row, busy_intervals)), key=attrgetter("start")
    )
    compute_rows = [piece for row in _list_passes(kernels, passes, records) for piece in cut_holes(row, holes)]
    return sorted(messages + copies + compute_rows, key=lambda row: (row.start, row.end))


def _list_compute_kernels(device: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the kernels of the compute stream: the stream whose kernels run longest in sum."""
    streams: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in device:
        if not event.name.startswith((MESSAGE, COPY)):
            streams[event.stream].append(event)
    busiest = max(streams.values(), key=lambda kernels: sum(event.end - event.start for event in kernels), default=[])
    return sorted(busiest, key=attrgetter("start"))


def _list_passes(kernels: Sequence[TraceEvent], passes: Intervals, records: Sequence[Record]) -> Iterator[Row]:
    """Yield a span for every run of kernels of one pass in a row; a pass without kernels has its time on the host."""
    kernel_passes = ((passes.find_innermost(event.launch_time), event) for event in kernels)
    records_seen: set[Record] = set()
    for record, group in groupby((pair for pair in kernel_passes if pair[0] is not None), itemgetter(0)):
        pass_kernels = [event for _, event in group]
        records_seen.add(record)
        yield to_row(record)._replace(start=pass_kernels[0].start, end=max(event.end for event in pass_kernels))
    for record in records:
        if record not in records_seen and record.kind is not TaskKind.HOST_COPY:
            yield to_row(record)


def _message_row(event: TraceEvent, passes: Intervals, regions: Intervals) -> Row:
    """Return a kernel of NCCL as a span, named by the region in which the host launched it."""
    event = event._replace(name=event.name.removeprefix(MESSAGE))
    region: TraceEvent | None = regions.find_innermost(event.launch_time)
    origin: Record | None = passes.find_innermost(event.launch_time)
    name = region.name if region is not None else ""
    is_inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
    if TRANSFER.fullmatch(name):
        return transfer_row(name, event.start, event)
    if name.startswith(MOVING):
        axis, collective = parse_region(name)
        kind = PASS_AXES[axis].task
        if collective == SHIFT:
            return message_row(StreamKind.CONTEXT, kind, origin, SHIFT, event.start, event)
        return message_row(StreamKind.TENSOR, kind, origin, collective, event.start, event)
    if name.startswith(FUNCTIONAL):
        blocking = BlockingCollective(TaskKind.TENSOR_COMMUNICATION, event.name, event.start, event.end, event.size)
        return blocking_row(blocking, origin) if is_inside else replicated_sum_row(blocking)
    unit = find_unit(name)
    launch = None if unit is None else Launch("all_gather" in name, unit, event.start, event.size)
    return data_row(event, launch, origin)


def _list_copies(records: Iterable[Record], device: Sequence[TraceEvent]) -> Iterator[Row]:
    """Yield a span for every recorded copy: while the GPU copied or, without copies of the GPU, while the host did."""
    copies = sorted((event for event in device if event.name.startswith(COPY)), key=lambda event: event.launch_time)
    launch_times = [event.launch_time for event in copies]
    for record in records:
        if record.kind is TaskKind.HOST_COPY:
            row = to_row(record)
            copy_events = copies[bisect_left(launch_times, record.start) : bisect_right(launch_times, record.end)]
            if copy_events and row.stream is not StreamKind.HOST:
                size = sum(event.size for event in copy_events)
                row = row._replace(
                    start=min(e.start for e in copy_events), end=max(e.end for e in copy_events), bytes=size
                )
            yield row


def _list_host_gathers(records: Iterable[Record], device: Iterable[TraceEvent], regions: Intervals) -> Iterator[Row]:
    """Yield the copies by which ``fully_shard`` gathers units whose shards are on the host."""
    recorded_copies = Intervals([record for record in records if record.kind is TaskKind.HOST_COPY])
    for event in device:
        if event.name.startswith(f"{COPY}HtoD") and recorded_copies.find_innermost(event.launch_time) is None:
            region = regions.find_innermost(event.launch_time)
            if region is not None and (unit := find_unit(region.name)) is not None:
                operators = f"parameters of {unit} from host"
                kind = TaskKind.HOST_COPY
                yield Row(StreamKind.FROM_HOST, kind, -1, -1, operators, event.start, event.end, event.size)


def _merge_kernels(kernels: Sequence[TraceEvent]) -> list[tuple[int, int]]:
    """Return the intervals (start, end) in which kernels run; gaps up to `PAUSE` do not split them."""
    result: list[tuple[int, int]] = []
    for event in kernels:
        if result and event.start <= result[-1][1] + PAUSE:
            result[-1] = result[-1][0], max(result[-1][1], event.end)
        else:
            result.append((event.start, event.end))
    return result


def _find_gaps(row: Row, busy: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Yield the parts of a message or copy during which no kernel runs."""
    first_index = max(bisect_right(busy, (row.start, row.start)) - 1, 0)
    last_index = bisect_left(busy, (row.end, row.end))
    edges = [(row.start, row.start), *busy[first_index:last_index], (row.end, row.end)]
    for (_, gap_start), (gap_end, _) in pairwise(edges):
        start, end = max(gap_start, row.start), min(gap_end, row.end)
        if start < end:
            yield row._replace(start=start, end=end)
