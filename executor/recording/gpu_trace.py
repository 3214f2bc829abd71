"""One rank's profiled step on a GPU: kernels, messages and copies of torch's profiler, joined into spans.

The GPU runs behind the host, so a kernel belongs to the pass during which the host launched it. What one pass launches
on the stream that computes is one span from its first kernel to its last, cut where another pass came between, and
where no kernel ran while a message or a copy was under way: that is what the pass waited for. Spans have the names,
kinds and streams of `meshwise.executor.recording.trace`.

References
----------
torch, ``torch.profiler.profile.export_chrome_trace``; Kineto, ``libkineto/src/output_json.cpp`` (categories
``kernel``, ``gpu_memcpy``, ``cuda_runtime``, arguments ``correlation``, ``External id``, ``stream``, ``bytes``, and of
NCCL's kernels ``Collective name``, ``In msg nelems``, ``dtype``).
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
"""Begins the names of NCCL's kernels, before the collective."""
COPY = "Memcpy "
PAUSE = 10_000
"""Ns between two kernels that are a launch rather than a wait."""
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_REGIONS = (MOVING, "PP:", "FSDP::", FUNCTIONAL)
_ITEMSIZE = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
"""Bytes of an element of what Kineto calls a dtype; others have 1."""
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
"""What names of collectives and of kernels hold, without marks, and what they are here."""


def of_profiler(profiler: Any) -> list[TraceEvent]:
    """Return the events of a finished ``torch.profiler.profile`` that minds a GPU."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return events(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def events(document: Mapping[str, Any]) -> list[TraceEvent]:
    """Return what a Chrome trace of torch's profiler has of a GPU, and of the host what names it, in order of start."""
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
    """Return what an event of a GPU is called here, and the bytes that it moves between devices."""
    if name.startswith(COPY):
        return name, int(arguments.get("bytes", 0))
    if not name.startswith("nccl"):
        return name, 0
    words = re.sub(r"[^a-z]", "", str(arguments.get("Collective name", name)).lower())
    kind = next((here for there, here in _COLLECTIVES if there in words), words)
    elements = max(int(arguments.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
    return MESSAGE + kind, elements * _ITEMSIZE.get(str(arguments.get("dtype", "")).lower(), 1)


def rows(records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
    """Return the spans of a rank: passes without what they waited for, and messages and copies."""
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
    """Stretches of the host's time that may lie inside each other; finds the innermost one at an instant."""

    def __init__(self, stretches: Iterable[Any]) -> None:
        self.stretches = sorted(stretches, key=lambda each: (each.start, -each.end))
        self.starts = [each.start for each in self.stretches]
        self.around: list[int] = []
        open_: list[int] = []
        for index, each in enumerate(self.stretches):
            while open_ and self.stretches[open_[-1]].end < each.end:
                open_.pop()
            self.around.append(open_[-1] if open_ else -1)
            open_.append(index)

    def at(self, instant: int) -> Any:
        """Return the innermost stretch, or ``None`` outside of all."""
        index = bisect_right(self.starts, instant) - 1
        while index >= 0 and self.stretches[index].end < instant:
            index = self.around[index]
        return self.stretches[index] if index >= 0 else None


def _computing(device: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the kernels of the stream that computes longest."""
    streams: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in device:
        if not event.name.startswith((MESSAGE, COPY)):
            streams[event.stream].append(event)
    spent = {stream: sum(event.end - event.start for event in each) for stream, each in streams.items()}
    return sorted(streams[max(spent, key=lambda stream: spent[stream])], key=attrgetter("start")) if spent else []


def _passes(kernels: Sequence[TraceEvent], passes: _Nested, records: Sequence[Record]) -> Iterator[Row]:
    """Yield a span for every pass and each time it goes on; where a pass has no kernels it was the host's."""
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
    """Return a kernel of NCCL's as what the region says in which the host launched it."""
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
    """Yield what was recorded as copies: as long as the GPU copied, or as the host was busy."""
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
    """Yield the copies with which ``fully_shard`` gathers units whose shards are on the host."""
    recorded = _Nested([record for record in records if record.kind is TaskKind.HOST_COPY])
    for event in device:
        if event.name.startswith(f"{COPY}HtoD") and recorded.at(event.launched) is None:
            region = regions.at(event.launched)
            if region is not None and (match := FULLY_SHARDED.fullmatch(region.name)):
                what = f"parameters of {match[1].removeprefix('network.')} from host"
                kind = TaskKind.HOST_COPY
                yield Row(StreamKind.FROM_HOST, kind, -1, -1, what, event.start, event.end, event.size)


def _merged(kernels: Sequence[TraceEvent]) -> list[tuple[int, int]]:
    """Return when kernels run, those one that launches alone hold apart."""
    result: list[tuple[int, int]] = []
    for event in kernels:
        if result and event.start <= result[-1][1] + PAUSE:
            result[-1] = result[-1][0], max(result[-1][1], event.end)
        else:
            result.append((event.start, event.end))
    return result


def _gaps(row: Row, busy: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Yield the parts of a message or copy in which no kernel runs."""
    first = max(bisect_right(busy, (row.start, row.start)) - 1, 0)
    last = bisect_left(busy, (row.end, row.end))
    edges = [(row.start, row.start), *busy[first:last], (row.end, row.end)]
    for (_, before), (after, _) in pairwise(edges):
        start, end = max(before, row.start), min(after, row.end)
        if start < end:
            yield row._replace(start=start, end=end)
