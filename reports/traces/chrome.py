"""Chrome trace of a timeline, written as a stream of events; Perfetto and chrome://tracing open it.

The format is described in "Trace Event Format", the document of chrome://tracing.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwise.reports.lanes import used_hosts
from meshwise.reports.traces.processes import (
    Process,
    Row,
    lane_name,
    nanoseconds,
    processes,
    rows,
    span_name,
    spans_by_class,
)
from meshwise.simulator.files import whole_file
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import StreamKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

_STREAMS = tuple(StreamKind)
_THREADS = 1000  # thread numbers of one stream: more than one is used where measured spans overlap
_SAMPLES = 500
_PROCESS = "\x00"  # stands for the process in the text of events: JSON has no such character
Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path | str, chosen: Sequence[Process] | None = None) -> None:
    """Write a Chrome trace: one process per rank (class) and host, one thread per stream, memory as counters.

    Moments are whole nanoseconds, so that spans which touch still touch. Events are written class by class and
    process by process; the same timeline gives the same bytes.

    Parameters
    ----------
    selection
        The processes to write; ``None`` for one per rank class.
    """
    other = {"source": timeline.source, "engine": timeline.engine, "step_time": timeline.step_time}
    with whole_file(path) as draft, draft.open("x", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(other) + ', "traceEvents": [')
        separator = "\n"
        for text in _texts(timeline, processes(timeline) if chosen is None else chosen):
            file.write(separator + text)
            separator = ",\n"
        file.write("\n]}\n")


def estimated_size(timeline: Timeline, chosen: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_trace`: the number of events times their mean length in a sample."""
    spans = timeline.spans
    sample = [spans[index] for index in range(0, len(spans), max(len(spans) // _SAMPLES, 1))]
    each = len(_text(_spans(sample))) / max(len(sample), 1)
    total = 0.0
    counted = [len(found) for found in spans_by_class(timeline)]
    for process in chosen:
        total += 300 + each * counted[process.rank_class]
    moments = {profile.rank_class: len(profile.times) for profile in timeline.memory}
    return round(total + 190 * sum(moments.get(process.rank_class, 0) for process in chosen))


def _texts(timeline: Timeline, chosen: Sequence[Process]) -> Iterator[str]:
    """Yield the events of a trace as text, many at once: names of processes, then the spans and memory of each.

    Hosts follow the ranks as processes; only hosts whose memory is used are written. Ranks of a class share their
    events, so these are encoded once and only the number of the process is replaced.
    """
    hosts = used_hosts(timeline)
    for number, name in enumerate((*(process.name for process in chosen), *hosts)):
        yield _text(_named(name, number)).replace(_PROCESS, str(number))
    memory = {profile.rank_class: profile for profile in timeline.memory}
    numbers: dict[int, list[int]] = {}
    for number, process in enumerate(chosen):
        numbers.setdefault(process.rank_class, []).append(number)
    spans = spans_by_class(timeline)
    for rank_class, members in numbers.items():
        for events in (_spans(spans[rank_class]), _memory(memory.get(rank_class))):
            if text := _text(events):
                yield from (text.replace(_PROCESS, str(number)) for number in members)
    for number, profile in enumerate(hosts.values(), len(chosen)):
        yield _text(_memory(profile)).replace(_PROCESS, str(number))


def _text(events: Iterable[Event]) -> str:
    """Return events as text in which `_PROCESS` stands for the number of their process."""
    return ",\n".join(
        json.dumps(event, separators=(",", ":")).replace('"pid":0', f'"pid":{_PROCESS}', 1) for event in events
    )


def _named(name: str, order: int) -> Iterator[Event]:
    yield _metadata("process_name", 0, name=name)
    yield _metadata("process_sort_index", 0, sort_index=order)


def _metadata(kind: str, thread: int, **arguments: object) -> Event:
    return {"pid": 0, "name": kind, "ph": "M", "tid": thread, "args": arguments}


def _spans(spans: Iterable[Span]) -> Iterator[Event]:
    """Yield the complete events of spans; the name of a thread comes before its first event."""
    seen: set[int] = set()
    for row in rows(spans):
        thread = _STREAMS.index(row.span.stream) * _THREADS + row.lane
        if thread not in seen:
            seen.add(thread)
            yield _metadata("thread_name", thread, name=lane_name(row.span.stream, row.lane))
            yield _metadata("thread_sort_index", thread, sort_index=thread)
        yield _complete(row, thread)


def _complete(row: Row, thread: int) -> Event:
    span = row.span
    return {
        "pid": 0,
        "name": span_name(span),
        "cat": span.kind.value,
        "ph": "X",
        "tid": thread,
        "ts": row.start / 1000,
        "dur": (row.end - row.start) / 1000,
        "args": {"stage": span.stage, "microbatch": span.microbatch, "operators": span.operators, **_bytes(span)},
    }


def _bytes(span: Span) -> dict[str, float]:
    return {"bytes": span.bytes} if span.bytes else {}


def _memory(profile: MemoryProfile | None) -> Iterator[Event]:
    """Yield a counter event with all categories at every moment at which memory changes."""
    if profile is None:
        return
    for moment, usage in zip(profile.times, profile.usage, strict=True):
        yield {
            "pid": 0,
            "name": "memory (byte)",
            "ph": "C",
            "tid": 0,
            "ts": nanoseconds(moment) / 1000,
            "args": {category.value: size for category, size in zip(CATEGORIES, usage, strict=True)},
        }
