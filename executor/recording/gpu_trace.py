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
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.trace import (
    FULLY_SHARDED,
    FUNCTIONAL,
    HOST,
    MOVING,
    SHIFT,
    TRANSFER,
    Blocking,
    Launch,
    Row,
    TraceEvent,
    blocking_row,
    data_row,
    moved,
    row_of,
    sum_of_replicated,
    transfer_row,
    without,
)
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.strategies.plan.mesh import COMMUNICATION

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


def of_profiler(profiler: Any) -> list[TraceEvent]:
    """Return the events of a finished ``torch.profiler.profile`` that recorded a GPU."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return events(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def events(document: Mapping[str, Any]) -> list[TraceEvent]:
    """Return the GPU's events in a Chrome trace, and the host's regions that name them, in order of start."""
    whole = [each for each in document["traceEvents"] if each.get("ph") == "X"]
    launched: dict[int, int] = {}
    operators: dict[int, int] = {}
    for each in whole:
        arguments = each.get("args", {})
        if each.get("cat") in _LAUNCHING and "correlation" in arguments:
            launched[arguments["correlation"]] = _ns(each["ts"])
        elif each.get("cat") == "cpu_op" and "External id" in arguments:
            operators[arguments["External id"]] = _ns(each["ts"])
    found = []
    for each in whole:
        name, start = str(each["name"]), _ns(each["ts"])
        if each.get("cat") in _GPU:
            arguments = each.get("args", {})
            by_operator = operators.get(arguments.get("External id", 0), start)
            instant = launched.get(arguments.get("correlation", 0), by_operator)
            what, size = _named(name, arguments)
            stream = int(arguments.get("stream", 0))
            found.append(TraceEvent(what, start, start + _ns(each["dur"]), size, stream, instant))
        elif each.get("cat") in ("cpu_op", "user_annotation") and name.startswith((*_REGIONS, "meshwise ")):
            found.append(TraceEvent(name, start, start + _ns(each["dur"]), 0))
    return sorted(found, key=lambda event: event.start)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _named(name: str, arguments: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of a GPU's event here, and the bytes that it moves between devices."""
    if name.startswith(COPY):
        return name, int(arguments.get("bytes", 0))
    if not name.startswith("nccl"):
        return name, 0
    words = re.sub(r"[^a-z]", "", str(arguments.get("Collective name", name)).lower())
    kind = next((here for there, here in _COLLECTIVES if there in words), words)
    elements = max(int(arguments.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
    return MESSAGE + kind, elements * _ITEMSIZE.get(str(arguments.get("dtype", "")).lower(), 1)


def rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes, cut where they waited, and messages and copies."""
    device = [event for event in events if event.stream != HOST]
    passes = _Nested([record for record in records if record.kind is not TaskKind.HOST_COPY])
    regions = _Nested([event for event in events if event.name.startswith(_REGIONS)])
    kernels = _computing(device)
    messages = [_message(each, passes, regions) for each in device if each.name.startswith(MESSAGE)]
    copies = [*_copies(records, device), *_gathered_from_host(records, device, regions)]
    busy = _merged(kernels)
    holes = sorted((gap for row in messages + copies for gap in _gaps(row, busy)), key=attrgetter("start"))
    computed = [piece for row in _passes(kernels, passes, records) for piece in without(row, holes)]
    return sorted(messages + copies + computed, key=lambda row: (row.start, row.end))


class _Nested:
    """Intervals of the host's time, which may be nested; finds the innermost interval at an instant."""

    def __init__(self, stretches: Iterable[Any]) -> None:
        self.stretches = sorted(stretches, key=lambda each: (each.start, -each.end))
        self.starts = [each.start for each in self.stretches]
        # for each interval the number of the one around it: a search goes outward from the last that began
        self.around: list[int] = []
        open_: list[int] = []
        for index, each in enumerate(self.stretches):
            while open_ and self.stretches[open_[-1]].end < each.end:
                open_.pop()
            self.around.append(open_[-1] if open_ else -1)
            open_.append(index)

    def at(self, instant: int) -> Any:
        """Return the innermost interval; ``None`` outside all of them."""
        index = bisect_right(self.starts, instant) - 1
        while index >= 0 and self.stretches[index].end < instant:
            index = self.around[index]
        return self.stretches[index] if index >= 0 else None


def _computing(device: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the kernels of the compute stream: the stream whose kernels run longest in sum."""
    streams: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in device:
        if not event.name.startswith((MESSAGE, COPY)):
            streams[event.stream].append(event)
    spent = {stream: sum(event.end - event.start for event in each) for stream, each in streams.items()}
    return sorted(streams[max(spent, key=lambda stream: spent[stream])], key=attrgetter("start")) if spent else []


def _passes(kernels: Sequence[TraceEvent], passes: _Nested, records: Sequence[Record]) -> Iterator[Row]:
    """Yield a span for every run of kernels of one pass in a row; a pass without kernels has its time on the host."""
    owned = [(passes.at(event.launched), event) for event in kernels]
    seen: set[Record] = set()
    for record, group in groupby(((record, event) for record, event in owned if record is not None), lambda x: x[0]):
        own = [event for _, event in group]
        seen.add(record)
        yield row_of(record)._replace(start=own[0].start, end=max(event.end for event in own))
    for record in records:
        if record not in seen and record.kind is not TaskKind.HOST_COPY:
            yield row_of(record)


def _message(event: TraceEvent, passes: _Nested, regions: _Nested) -> Row:
    """Return a kernel of NCCL as a span, named by the region in which the host launched it."""
    event = event._replace(name=event.name.removeprefix(MESSAGE))
    region: TraceEvent | None = regions.at(event.launched)
    origin: Record | None = passes.at(event.launched)
    name = region.name if region is not None else ""
    where = (-1, -1) if origin is None else (origin.stage, origin.microbatch)
    inside = origin is not None and origin.kind is not TaskKind.OPTIMIZER
    if match := TRANSFER.fullmatch(name):
        return transfer_row(event, event, match)
    if region is not None and name.startswith(MOVING):
        axis, collective = moved(region)
        kind = COMMUNICATION[axis]
        if collective == SHIFT:
            return Row(StreamKind.CONTEXT, kind, *where, SHIFT, event.start, event.end, event.size)
        return blocking_row(Blocking(kind, collective, event.start, event.end, event.size), origin)
    if name.startswith(FUNCTIONAL):
        each = Blocking(TaskKind.TENSOR_COMMUNICATION, event.name, event.start, event.end, event.size)
        return blocking_row(each, origin) if inside else sum_of_replicated(each)
    if match := FULLY_SHARDED.fullmatch(name):
        launch = Launch("all_gather" in name, match[1].removeprefix("network."), event.start, event.size)
        return data_row(event, launch, origin)
    return data_row(event, None, origin)


def _copies(records: Iterable[Record], device: Sequence[TraceEvent]) -> Iterator[Row]:
    """Yield a span for every recorded copy: while the GPU copied or, without copies of the GPU, while the host did."""
    copies = sorted((event for event in device if event.name.startswith(COPY)), key=lambda event: event.launched)
    launched = [event.launched for event in copies]
    for record in records:
        if record.kind is TaskKind.HOST_COPY:
            row = row_of(record)
            own = copies[bisect_left(launched, record.start) : bisect_right(launched, record.end)]
            if own and row.stream is not StreamKind.HOST:
                size = sum(event.size for event in own)
                row = row._replace(start=min(e.start for e in own), end=max(e.end for e in own), bytes=size)
            yield row


def _gathered_from_host(records: Iterable[Record], device: Iterable[TraceEvent], regions: _Nested) -> Iterator[Row]:
    """Yield the copies by which ``fully_shard`` gathers units whose shards are on the host."""
    recorded = _Nested([record for record in records if record.kind is TaskKind.HOST_COPY])
    for event in device:
        if event.name.startswith(f"{COPY}HtoD") and recorded.at(event.launched) is None:
            region = regions.at(event.launched)
            if region is not None and (match := FULLY_SHARDED.fullmatch(region.name)):
                what = f"parameters of {match[1].removeprefix('network.')} from host"
                kind = TaskKind.HOST_COPY
                yield Row(StreamKind.FROM_HOST, kind, -1, -1, what, event.start, event.end, event.size)


def _merged(kernels: Sequence[TraceEvent]) -> list[tuple[int, int]]:
    """Return the intervals (start, end) in which kernels run; gaps up to `PAUSE` do not split them."""
    result: list[tuple[int, int]] = []
    for event in kernels:
        if result and event.start <= result[-1][1] + PAUSE:
            result[-1] = result[-1][0], max(result[-1][1], event.end)
        else:
            result.append((event.start, event.end))
    return result


def _gaps(row: Row, busy: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Yield the parts of a message or copy during which no kernel runs."""
    first = max(bisect_right(busy, (row.start, row.start)) - 1, 0)
    last = bisect_left(busy, (row.end, row.end))
    edges = [(row.start, row.start), *busy[first:last], (row.end, row.end)]
    for (_, before), (after, _) in pairwise(edges):
        start, end = max(before, row.start), min(after, row.end)
        if start < end:
            yield row._replace(start=start, end=end)
