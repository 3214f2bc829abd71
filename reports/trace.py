"""Chrome trace of a timeline, written as it goes: what Perfetto and chrome://tracing open.

The format is described in "Trace Event Format", the document that belongs to chrome://tracing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reports.hosts import used_hosts
from reports.lanes import labels
from simulator.memory import CATEGORIES, MemoryProfile
from simulator.program import StreamKind, TaskKind
from simulator.timeline import Span, Timeline

_STREAMS = tuple(StreamKind)
_THREADS = 1000  # thread numbers of one stream: more than one is used where measured spans overlap
_LETTER = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT_GRADIENT: "W", TaskKind.RECOMPUTE: "R"}
Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path | str) -> None:
    """Write a Chrome trace: a process a rank class and a host, a thread a stream, spans, and memory as counters.

    Moments are whole nanoseconds, so that spans which touch still touch. Events are written
    one by one; the same timeline gives the same bytes.
    """
    other = {"source": timeline.source, "engine": timeline.engine, "step_time": timeline.step_time}
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(other) + ', "traceEvents": [')
        separator = "\n"
        for event in events(timeline):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def events(timeline: Timeline) -> Iterator[Event]:
    """Yield the events of a timeline: names of processes, spans with names of threads, memory.

    Hosts are processes after the rank classes; only those that hold memory are there.
    """
    hosts = used_hosts(timeline)
    for process, name in enumerate((*labels(timeline.rank_classes), *hosts)):
        yield _metadata("process_name", process, 0, name=name)
        yield _metadata("process_sort_index", process, 0, sort_index=process)
    yield from _spans(timeline)
    for profile in timeline.memory:
        yield from _memory(profile.rank_class, profile)
    for process, profile in enumerate(hosts.values(), len(timeline.rank_classes)):
        yield from _memory(process, profile)


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _spans(timeline: Timeline) -> Iterator[Event]:
    """Yield complete events; a span that overlaps another of its stream goes to a thread of its own."""
    busy_until: dict[tuple[int, StreamKind], list[int]] = {}
    for span in timeline.spans:
        start, end = _nanoseconds(span.start), _nanoseconds(span.end)
        threads = busy_until.setdefault((span.rank_class, span.stream), [])
        free = next((i for i, until in enumerate(threads) if until <= start), len(threads))
        thread = _STREAMS.index(span.stream) * _THREADS + free
        if free == len(threads):
            threads.append(end)
            name = span.stream.value + (f" ({free + 1})" if free else "")
            yield _metadata("thread_name", span.rank_class, thread, name=name)
            yield _metadata("thread_sort_index", span.rank_class, thread, sort_index=thread)
        threads[free] = end
        yield _complete(span, thread, start, end)


def _complete(span: Span, thread: int, start: int, end: int) -> Event:
    return {
        "name": _name(span),
        "cat": span.kind.value,
        "ph": "X",
        "pid": span.rank_class,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"stage": span.stage, "microbatch": span.microbatch, "operators": span.operators, **_bytes(span)},
    }


def _bytes(span: Span) -> dict[str, float]:
    return {"bytes": span.bytes} if span.bytes else {}


def _name(span: Span) -> str:
    """Return ``2F0`` with what was run for passes, the kind with it for the rest."""
    action = f"{span.stage}{_LETTER[span.kind]}{span.microbatch}" if span.kind in _LETTER else span.kind.value
    return f"{action} {span.operators}".strip()


def _memory(process: int, profile: MemoryProfile) -> Iterator[Event]:
    """Yield a counter by category at every moment at which memory changes."""
    for moment, usage in zip(profile.times, profile.usage, strict=True):
        yield {
            "name": "memory (byte)",
            "ph": "C",
            "pid": process,
            "tid": 0,
            "ts": _nanoseconds(moment) / 1000,
            "args": {category.value: size for category, size in zip(CATEGORIES, usage, strict=True)},
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
