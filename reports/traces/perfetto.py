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
    arrange_rows,
    estimate_bytes,
    group_spans,
    lane_name,
    list_processes,
    span_name,
    to_nanoseconds,
)
from meshwise.reports.traces.protobuf import (
    encode_double,
    encode_message,
    encode_number,
    encode_tag,
    encode_text,
    encode_varint,
)
from meshwise.simulator.files import whole_file
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import IntArray, StreamKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60  # of TracePacket
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # SequenceFlags
_CATEGORIES, _NAMES, _ANNOTATION_NAMES = 1, 2, 3  # of InternedData; entries have iid = 1 and name = 2
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _COUNTER = 3, 4, 9, 10, 11, 44  # of TrackEvent
_BEGIN, _END, _VALUE = 1, 2, 4  # TrackEvent.Type
_UUID, _TRACK_NAME, _PROCESS, _THREAD, _PARENT, _COUNTER_DESCRIPTOR = 1, 2, 3, 4, 5, 8  # of TrackDescriptor
_PID, _SORT, _PROCESS_NAME = 1, 3, 6  # of ProcessDescriptor
_THREAD_PID, _TID, _THREAD_SORT, _THREAD_NAME = 1, 2, 3, 5  # of ThreadDescriptor
_UNIT, _BYTES = 3, 3  # of CounterDescriptor: unit, and UNIT_SIZE_BYTES
_ARGUMENTS = ("stage", "microbatch", "bytes")
_HEAD = encode_number(_SEQUENCE, 1) + encode_number(_FLAGS, _NEEDS_STATE)


class _Template(NamedTuple):
    """The encoded events of a process: the positions of its track numbers, and each track's offset in the process."""

    content: bytes
    places: IntArray
    tracks: IntArray


class _Names:
    """Interned texts, numbered from 1 in order of first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers) + 1)

    def encode_entries(self, field: int) -> bytes:
        return b"".join(
            encode_message(field, encode_number(1, iid), encode_text(2, name)) for name, iid in self.numbers.items()
        )


def write_perfetto(timeline: Timeline, path: Path | str, selection: Sequence[Process] | None = None) -> None:
    """Write a Perfetto trace: one process per rank (class) and host, one thread per stream, memory as counters.

    Only one class's events are in memory at a time; the same timeline gives the same bytes.

    Parameters
    ----------
    selection
        The processes to write; ``None`` for one per rank class.
    """
    layout = _Layout(timeline, list_processes(timeline) if selection is None else selection)
    with whole_file(path) as draft, draft.open("xb") as file:
        file.write(layout.encode_names())
        for process in range(layout.count):
            file.write(layout.encode_descriptors(process))
        for part in layout.list_events():
            file.write(part)


def estimate_size(timeline: Timeline, selection: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_perfetto`."""
    spans = timeline.spans
    names = sum(14 + len(name) for name in {span.operators for span in spans}) + 20 * len(set(map(span_name, spans)))
    size = estimate_bytes(
        timeline, selection, lambda spans: _Layout(timeline, selection, spans).encode_slices(spans).content, 250, 60
    )
    return round(names + size)


class _Layout:
    """The tracks of a trace: those of process p are numbered from ``(p + 1) * stride`` on, the process itself first."""

    def __init__(self, timeline: Timeline, selection: Sequence[Process], sample: Sequence[Span] | None = None) -> None:
        self.timeline, self.selection = timeline, selection
        self.hosts = used_hosts(timeline)
        self.count = len(selection) + len(self.hosts)
        self.spans = group_spans(timeline) if sample is None else [list(sample)]
        self.memory = {profile.rank_class: profile for profile in timeline.memory}
        lanes = [
            list(dict.fromkeys((row.span.stream, row.lane) for row in arrange_rows(spans))) for spans in self.spans
        ]
        self.lanes = [
            sorted(class_lanes, key=lambda lane: (list(StreamKind).index(lane[0]), lane[1])) for class_lanes in lanes
        ]
        self.stride = 1 + len(CATEGORIES) + max(map(len, self.lanes), default=0)
        self.width = len(encode_varint((self.count + 1) * self.stride))
        self.names, self.categories, self.arguments = _Names(), _Names(), _Names()
        for name in _ARGUMENTS:
            self.arguments(name)

    def encode_names(self) -> bytes:
        """Return the first packet, which interns all names of events."""
        used_classes = {process.rank_class for process in self.selection}
        for index in sorted(used_classes):
            for span in self.spans[index]:
                self.names(span_name(span))
                self.categories(span.kind.value)
        entries = (
            self.categories.encode_entries(_CATEGORIES),
            self.names.encode_entries(_NAMES),
            self.arguments.encode_entries(_ANNOTATION_NAMES),
        )
        flags = encode_number(_FLAGS, _STATE_CLEARED | _NEEDS_STATE)
        return encode_message(_PACKET, encode_number(_SEQUENCE, 1), flags, encode_message(_INTERNED, *entries))

    def encode_descriptors(self, process: int) -> bytes:
        """Return the packets that describe the tracks of a process."""
        uuid = (process + 1) * self.stride
        is_host = process >= len(self.selection)
        name = tuple(self.hosts)[process - len(self.selection)] if is_host else self.selection[process].name
        process_descriptor = encode_message(
            _PROCESS, encode_number(_PID, uuid), encode_number(_SORT, process), encode_text(_PROCESS_NAME, name)
        )
        tracks = [encode_message(_TRACK_DESCRIPTOR, encode_number(_UUID, uuid), process_descriptor)]
        for index, category in enumerate(CATEGORIES, 1):
            counter_descriptor = encode_message(_COUNTER_DESCRIPTOR, encode_number(_UNIT, _BYTES))
            fields = (
                encode_number(_UUID, uuid + index),
                encode_number(_PARENT, uuid),
                encode_text(_TRACK_NAME, category.value),
                counter_descriptor,
            )
            tracks.append(encode_message(_TRACK_DESCRIPTOR, *fields))
        lanes = () if is_host else self.lanes[self.selection[process].rank_class]
        for index, (stream, lane) in enumerate(lanes, 1 + len(CATEGORIES)):
            ids = (
                encode_number(_THREAD_PID, uuid),
                encode_number(_TID, uuid + index),
                encode_number(_THREAD_SORT, index),
            )
            thread = encode_message(_THREAD, *ids, encode_text(_THREAD_NAME, lane_name(stream, lane)))
            tracks.append(
                encode_message(
                    _TRACK_DESCRIPTOR, encode_number(_UUID, uuid + index), encode_number(_PARENT, uuid), thread
                )
            )
        return b"".join(encode_message(_PACKET, encode_number(_SEQUENCE, 1), track) for track in tracks)

    def list_events(self) -> Iterator[bytes]:
        """Yield the events of every process, class by class."""
        numbers: dict[int, list[int]] = {}
        for index, process in enumerate(self.selection):
            numbers.setdefault(process.rank_class, []).append(index)
        for rank_class, members in numbers.items():
            parts = (
                self.encode_slices(self.spans[rank_class], rank_class),
                self.encode_counters(self.memory.get(rank_class)),
            )
            for index in members:
                yield from (self._fill_tracks(part, index) for part in parts)
        for index, profile in enumerate(self.hosts.values(), len(self.selection)):
            yield self._fill_tracks(self.encode_counters(profile), index)

    def _fill_tracks(self, template: _Template, process: int) -> bytes:
        """Return the events of a template with the track numbers of a process filled in."""
        # all varints of track numbers are overwritten at once, one byte position after the other
        content = np.frombuffer(template.content, np.uint8).copy()
        values = template.tracks + (process + 1) * self.stride
        for byte in range(self.width):
            continuation = 0x80 if byte < self.width - 1 else 0
            content[template.places + byte] = values >> 7 * byte & 0x7F | continuation
        return content.tobytes()

    def encode_slices(self, spans: Iterable[Span], rank_class: int = 0) -> _Template:
        """Return the begin and end events of every span."""
        tracks = {lane: index for index, lane in enumerate(self.lanes[rank_class], 1 + len(CATEGORIES))}
        return self._build_template(self._slice_events(spans, tracks))

    def _slice_events(
        self, spans: Iterable[Span], tracks: dict[tuple[StreamKind, int], int]
    ) -> Iterator[tuple[int, int, bytes]]:
        end_field = encode_number(_TYPE, _END)
        for row in arrange_rows(spans):
            track = tracks[row.span.stream, row.lane]
            yield row.start, track, self._encode_begin(row)
            yield row.end, track, end_field

    def _encode_begin(self, row: Row) -> bytes:
        span = row.span
        values = {"stage": span.stage, "microbatch": span.microbatch}
        annotations = [
            _encode_annotation(self.arguments(name), encode_number(3, value))
            for name, value in values.items()
            if value >= 0
        ]
        if span.bytes:
            annotations.append(_encode_annotation(self.arguments("bytes"), encode_double(5, span.bytes)))
        names = (
            encode_number(_NAME, self.names(span_name(span))),
            encode_number(_CATEGORY, self.categories(span.kind.value)),
        )
        return b"".join((encode_number(_TYPE, _BEGIN), *names, *annotations))

    def encode_counters(self, profile: MemoryProfile | None) -> _Template:
        """Return counter events with the bytes of a category whenever they change."""
        return self._build_template(() if profile is None else _counter_events(profile))

    def _build_template(self, events: Iterable[tuple[int, int, bytes]]) -> _Template:
        """Return the packets of events, which are (moment in ns, track, other fields)."""
        content, places, tracks = bytearray(), [], []
        track_tag = encode_tag(_TRACK, 0)
        for moment, track, fields in events:
            event = encode_tag(_TRACK_EVENT, 2) + encode_varint(len(track_tag) + self.width + len(fields)) + track_tag
            prefix = encode_number(_TIMESTAMP, moment) + _HEAD + event
            content += encode_tag(_PACKET, 2) + encode_varint(len(prefix) + self.width + len(fields)) + prefix
            places.append(len(content))
            tracks.append(track)
            content += bytes(self.width) + fields
        return _Template(bytes(content), np.array(places, np.int64), np.array(tracks, np.int64))


def _encode_annotation(name: int, value: bytes) -> bytes:
    return encode_message(_ANNOTATION, encode_number(1, name), value)


def _counter_events(profile: MemoryProfile) -> Iterator[tuple[int, int, bytes]]:
    previous: tuple[float, ...] = ()
    for moment, usage in zip(profile.times, profile.usage, strict=True):
        for index, size in enumerate(usage):
            if not previous or previous[index] != size:
                yield to_nanoseconds(moment), index + 1, encode_number(_TYPE, _VALUE) + encode_double(_COUNTER, size)
        previous = usage
