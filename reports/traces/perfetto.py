"""Perfetto trace of a timeline in Protocol Buffers, for steps that are too large as JSON.

Field numbers are those of github.com/google/perfetto, protos/perfetto/trace: ``trace.proto``, ``trace_packet.proto``,
``interned_data/interned_data.proto`` and ``track_event/*.proto``. All packets form one sequence, whose names are
interned in its first packet. Ranks of a class differ only in their tracks: events are encoded once per class, with
track numbers as varints of fixed width, which are overwritten for every rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
from meshwise.reports.traces.protobuf import message, number, real, tag, text, varint
from meshwise.simulator.files import whole_file
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import IntArray, StreamKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60  # of TracePacket
_CLEARED, _NEEDS_STATE = 1, 2  # SequenceFlags
_CATEGORIES, _NAMES, _ANNOTATION_NAMES = 1, 2, 3  # of InternedData; entries have iid = 1 and name = 2
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _COUNTER = 3, 4, 9, 10, 11, 44  # of TrackEvent
_BEGIN, _END, _VALUE = 1, 2, 4  # TrackEvent.Type
_UUID, _TRACK_NAME, _PROCESS, _THREAD, _PARENT, _COUNTED = 1, 2, 3, 4, 5, 8  # of TrackDescriptor
_PID, _SORT, _PROCESS_NAME = 1, 3, 6  # of ProcessDescriptor
_THREAD_PID, _TID, _THREAD_SORT, _THREAD_NAME = 1, 2, 3, 5  # of ThreadDescriptor
_UNIT, _BYTES = 3, 3  # of CounterDescriptor: unit, and UNIT_SIZE_BYTES
_ARGUMENTS = ("stage", "microbatch", "bytes")
_SAMPLES = 500
_HEAD = number(_SEQUENCE, 1) + number(_FLAGS, _NEEDS_STATE)


class _Template(NamedTuple):
    """The encoded events of a process: the positions of its track numbers, and each track's offset in the process."""

    content: bytes
    places: IntArray
    tracks: IntArray


class _Names:
    """Interned texts, numbered from 1 in order of first use."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.of.setdefault(name, len(self.of) + 1)

    def entries(self, field: int) -> bytes:
        return b"".join(message(field, number(1, iid), text(2, name)) for name, iid in self.of.items())


def write_perfetto(timeline: Timeline, path: Path | str, chosen: Sequence[Process] | None = None) -> None:
    """Write a Perfetto trace: one process per rank (class) and host, one thread per stream, memory as counters.

    Only one class's events are in memory at a time; the same timeline gives the same bytes.

    Parameters
    ----------
    selection
        The processes to write; ``None`` for one per rank class.
    """
    found = _Layout(timeline, processes(timeline) if chosen is None else chosen)
    with whole_file(path) as draft, draft.open("xb") as file:
        file.write(found.interned())
        for process in range(found.count):
            file.write(found.descriptors(process))
        for part in found.events():
            file.write(part)


def estimated_size(timeline: Timeline, chosen: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_perfetto`: the number of events times their mean length in a sample."""
    spans = timeline.spans
    sample = [spans[index] for index in range(0, len(spans), max(len(spans) // _SAMPLES, 1))]
    layout = _Layout(timeline, chosen, sample)
    each = len(layout.slices(sample).content) / max(len(sample), 1)
    counted = [len(found) for found in spans_by_class(timeline)]
    moments = {profile.rank_class: len(profile.times) for profile in timeline.memory}
    names = sum(14 + len(name) for name in {span.operators for span in spans}) + 20 * len(set(map(span_name, spans)))
    each_process = (250 + each * counted[p.rank_class] + 60 * moments.get(p.rank_class, 0) for p in chosen)
    return round(names + sum(each_process))


class _Layout:
    """The tracks of a trace: those of process p are numbered from ``(p + 1) * stride`` on, the process itself first."""

    def __init__(self, timeline: Timeline, chosen: Sequence[Process], only: Sequence[Span] | None = None) -> None:
        self.timeline, self.chosen = timeline, chosen
        self.hosts = used_hosts(timeline)
        self.count = len(chosen) + len(self.hosts)
        self.spans = spans_by_class(timeline) if only is None else [list(only)]
        self.memory = {profile.rank_class: profile for profile in timeline.memory}
        lanes = [list(dict.fromkeys((row.span.stream, row.lane) for row in rows(spans))) for spans in self.spans]
        self.lanes = [sorted(found, key=lambda lane: (list(StreamKind).index(lane[0]), lane[1])) for found in lanes]
        self.stride = 1 + len(CATEGORIES) + max(map(len, self.lanes), default=0)
        self.width = len(varint((self.count + 1) * self.stride))
        self.names, self.categories, self.arguments = _Names(), _Names(), _Names()
        for name in _ARGUMENTS:
            self.arguments(name)

    def interned(self) -> bytes:
        """Return the first packet, which interns all names of events."""
        used = {process.rank_class for process in self.chosen}
        for index in sorted(used):
            for span in self.spans[index]:
                self.names(span_name(span))
                self.categories(span.kind.value)
        entries = (
            self.categories.entries(_CATEGORIES),
            self.names.entries(_NAMES),
            self.arguments.entries(_ANNOTATION_NAMES),
        )
        flags = number(_FLAGS, _CLEARED | _NEEDS_STATE)
        return message(_PACKET, number(_SEQUENCE, 1), flags, message(_INTERNED, *entries))

    def descriptors(self, process: int) -> bytes:
        """Return the packets that describe the tracks of a process."""
        own = (process + 1) * self.stride
        host = process >= len(self.chosen)
        name = tuple(self.hosts)[process - len(self.chosen)] if host else self.chosen[process].name
        about = message(_PROCESS, number(_PID, own), number(_SORT, process), text(_PROCESS_NAME, name))
        tracks = [message(_TRACK_DESCRIPTOR, number(_UUID, own), about)]
        for index, category in enumerate(CATEGORIES, 1):
            counted = message(_COUNTED, number(_UNIT, _BYTES))
            parts = number(_UUID, own + index), number(_PARENT, own), text(_TRACK_NAME, category.value), counted
            tracks.append(message(_TRACK_DESCRIPTOR, *parts))
        lanes = () if host else self.lanes[self.chosen[process].rank_class]
        for index, (stream, lane) in enumerate(lanes, 1 + len(CATEGORIES)):
            ids = number(_THREAD_PID, own), number(_TID, own + index), number(_THREAD_SORT, index)
            thread = message(_THREAD, *ids, text(_THREAD_NAME, lane_name(stream, lane)))
            tracks.append(message(_TRACK_DESCRIPTOR, number(_UUID, own + index), number(_PARENT, own), thread))
        return b"".join(message(_PACKET, number(_SEQUENCE, 1), track) for track in tracks)

    def events(self) -> Iterator[bytes]:
        """Yield the events of every process, class by class."""
        numbers: dict[int, list[int]] = {}
        for index, process in enumerate(self.chosen):
            numbers.setdefault(process.rank_class, []).append(index)
        for rank_class, members in numbers.items():
            parts = self.slices(self.spans[rank_class], rank_class), self.counters(self.memory.get(rank_class))
            for index in members:
                yield from (self._of_process(part, index) for part in parts)
        for index, profile in enumerate(self.hosts.values(), len(self.chosen)):
            yield self._of_process(self.counters(profile), index)

    def _of_process(self, template: _Template, process: int) -> bytes:
        """Return the events of a template with the track numbers of a process filled in."""
        # all varints of track numbers are overwritten at once, one byte position after the other
        content = np.frombuffer(template.content, np.uint8).copy()
        values = template.tracks + (process + 1) * self.stride
        for byte in range(self.width):
            more = 0x80 if byte < self.width - 1 else 0
            content[template.places + byte] = values >> 7 * byte & 0x7F | more
        return content.tobytes()

    def slices(self, spans: Iterable[Span], rank_class: int = 0) -> _Template:
        """Return the begin and end events of every span."""
        tracks = {lane: index for index, lane in enumerate(self.lanes[rank_class], 1 + len(CATEGORIES))}
        return self._template(self._slices(spans, tracks))

    def _slices(
        self, spans: Iterable[Span], tracks: dict[tuple[StreamKind, int], int]
    ) -> Iterator[tuple[int, int, bytes]]:
        ends = number(_TYPE, _END)
        for row in rows(spans):
            track = tracks[row.span.stream, row.lane]
            yield row.start, track, self._begin(row)
            yield row.end, track, ends

    def _begin(self, row: Row) -> bytes:
        span = row.span
        values = {"stage": span.stage, "microbatch": span.microbatch}
        found = [_annotation(self.arguments(name), number(3, value)) for name, value in values.items() if value >= 0]
        if span.bytes:
            found.append(_annotation(self.arguments("bytes"), real(5, span.bytes)))
        names = number(_NAME, self.names(span_name(span))), number(_CATEGORY, self.categories(span.kind.value))
        return b"".join((number(_TYPE, _BEGIN), *names, *found))

    def counters(self, profile: MemoryProfile | None) -> _Template:
        """Return counter events with the bytes of a category whenever they change."""
        return self._template(() if profile is None else _counters(profile))

    def _template(self, events: Iterable[tuple[int, int, bytes]]) -> _Template:
        """Return the packets of events, which are (moment in ns, track, other fields)."""
        content, places, tracks = bytearray(), [], []
        own = tag(_TRACK, 0)
        for moment, track, fields in events:
            event = tag(_TRACK_EVENT, 2) + varint(len(own) + self.width + len(fields)) + own
            before = number(_TIMESTAMP, moment) + _HEAD + event
            content += tag(_PACKET, 2) + varint(len(before) + self.width + len(fields)) + before
            places.append(len(content))
            tracks.append(track)
            content += bytes(self.width) + fields
        return _Template(bytes(content), np.array(places, np.int64), np.array(tracks, np.int64))


def _annotation(name: int, value: bytes) -> bytes:
    return message(_ANNOTATION, number(1, name), value)


def _counters(profile: MemoryProfile) -> Iterator[tuple[int, int, bytes]]:
    shown: tuple[float, ...] = ()
    for moment, usage in zip(profile.times, profile.usage, strict=True):
        for index, size in enumerate(usage):
            if not shown or shown[index] != size:
                yield nanoseconds(moment), index + 1, number(_TYPE, _VALUE) + real(_COUNTER, size)
        shown = usage
