"""Chrome trace of a timeline, written as a stream of events; Perfetto and chrome://tracing open it.

The format is described in "Trace Event Format", the document of chrome://tracing.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwise.reports.lanes import used_hosts
from meshwise.reports.traces.processes import (
    PROCESS,
    Process,
    Row,
    arrange_rows,
    encode_events,
    estimate_bytes,
    group_spans,
    lane_name,
    list_processes,
    span_name,
    to_nanoseconds,
)
from meshwise.simulator.files import whole_file
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import StreamKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

_STREAMS = tuple(StreamKind)
_THREADS = 1000  # thread numbers of one stream: more than one is used where measured spans overlap
Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path | str, selection: Sequence[Process] | None = None) -> None:
    """Write a Chrome trace: one process per rank (class) and host, one thread per stream, memory as counters.

    Moments are whole nanoseconds, so that spans which touch still touch. Events are written class by class and
    process by process; the same timeline gives the same bytes.

    Parameters
    ----------
    selection
        The processes to write; ``None`` for one per rank class.
    """
    other_data = {"source": timeline.source, "engine": timeline.engine, "step_time": timeline.step_time}
    with whole_file(path) as draft, draft.open("x", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(other_data) + ', "traceEvents": [')
        separator = "\n"
        for text in _texts(timeline, list_processes(timeline) if selection is None else selection):
            file.write(separator + text)
            separator = ",\n"
        file.write("\n]}\n")


def estimate_size(timeline: Timeline, selection: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_trace`."""
    return round(estimate_bytes(timeline, selection, lambda sample: encode_events(_span_events(sample)), 300, 190))


def _texts(timeline: Timeline, selection: Sequence[Process]) -> Iterator[str]:
    """Yield the events of a trace as text, many at once: names of processes, then the spans and memory of each.

    Hosts follow the ranks as processes; only hosts whose memory is used are written. Ranks of a class share their
    events, so these are encoded once and only the number of the process is replaced.
    """
    hosts = used_hosts(timeline)
    for number, name in enumerate((*(process.name for process in selection), *hosts)):
        yield encode_events(_process_events(name, number)).replace(PROCESS, str(number))
    memory = {profile.rank_class: profile for profile in timeline.memory}
    spans = group_spans(timeline)
    numbers: dict[int, list[int]] = {}
    for number, process in enumerate(selection):
        numbers.setdefault(process.rank_class, []).append(number)
    for rank_class, members in numbers.items():
        for events in (_span_events(spans[rank_class]), _memory_events(memory.get(rank_class))):
            if text := encode_events(events):
                yield from (text.replace(PROCESS, str(number)) for number in members)
    for number, profile in enumerate(hosts.values(), len(selection)):
        yield encode_events(_memory_events(profile)).replace(PROCESS, str(number))


def _process_events(name: str, order: int) -> Iterator[Event]:
    yield _metadata_event("process_name", 0, name=name)
    yield _metadata_event("process_sort_index", 0, sort_index=order)


def _metadata_event(kind: str, thread: int, **arguments: object) -> Event:
    return {"pid": 0, "name": kind, "ph": "M", "tid": thread, "args": arguments}


def _span_events(spans: Iterable[Span]) -> Iterator[Event]:
    """Yield the complete events of spans; the name of a thread comes before its first event."""
    threads: set[int] = set()
    for row in arrange_rows(spans):
        thread = _STREAMS.index(row.span.stream) * _THREADS + row.lane
        if thread not in threads:
            threads.add(thread)
            yield _metadata_event("thread_name", thread, name=lane_name(row.span.stream, row.lane))
            yield _metadata_event("thread_sort_index", thread, sort_index=thread)
        yield _complete_event(row, thread)


def _complete_event(row: Row, thread: int) -> Event:
    span = row.span
    return {
        "pid": 0,
        "name": span_name(span),
        "cat": span.kind.value,
        "ph": "X",
        "tid": thread,
        "ts": row.start / 1000,
        "dur": (row.end - row.start) / 1000,
        "args": {
            "stage": span.stage,
            "microbatch": span.microbatch,
            "operators": span.operators,
            **({"bytes": span.bytes} if span.bytes else {}),
        },
    }


def _memory_events(profile: MemoryProfile | None) -> Iterator[Event]:
    """Yield a counter event with all categories at every moment at which memory changes."""
    if profile is None:
        return
    for moment, usage in zip(profile.times, profile.usage, strict=True):
        yield {
            "pid": 0,
            "name": "memory (byte)",
            "ph": "C",
            "tid": 0,
            "ts": to_nanoseconds(moment) / 1000,
            "args": {category.value: size for category, size in zip(CATEGORIES, usage, strict=True)},
        }
