"""A Perfetto trace holds the spans of its timeline, as a decoder of its own reads them."""

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshwise.reports.traces.perfetto import estimate_size, write_perfetto
from meshwise.reports.traces.processes import list_processes, span_name
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Fields by number (protobuf.dev, "Encoding"), written apart from what encodes them."""
    stream = iter(data)

    def number() -> int:
        bits = []
        for byte in stream:
            bits.append(f"{byte & 127:07b}")
            if byte < 128:
                return int("".join(reversed(bits)), 2)
        raise AssertionError("the data ends in a number")

    for first in stream:
        key = first if first < 128 else (first & 127) + 128 * number()
        wire = key % 8
        if wire == 0:
            yield key // 8, number()
        elif wire == 1:
            yield key // 8, struct.unpack("<d", bytes(next(stream) for _ in range(8)))[0]
        else:
            assert wire == 2
            yield key // 8, bytes(next(stream) for _ in range(number()))


def one(data: bytes) -> dict[int, Any]:
    return dict(fields(data))


class Slice(NamedTuple):
    process: str
    thread: str
    name: str
    category: str
    arguments: tuple[tuple[str, float], ...]
    start: int
    end: int


class Decoded(NamedTuple):
    slices: list[Slice]
    counters: dict[tuple[str, str], list[tuple[int, float]]]
    tracks: dict[int, tuple[str, str]]


def decode(path: Path) -> Decoded:
    """Read by the numbers of google/perfetto: Trace.packet 1; TracePacket.timestamp 8, track_event 11, ..."""
    names: dict[int, dict[int, str]] = {1: {}, 2: {}, 3: {}}
    tracks: dict[int, tuple[str, str]] = {}
    running: dict[int, tuple[Any, ...]] = {}
    slices, counters = [], {}
    for number, packet in fields(path.read_bytes()):
        assert number == 1
        packed = one(packet)
        assert packed[10] == 1  # one sequence
        if 12 in packed:
            assert packed[13] == 3  # starts with nothing known, and needs what it says itself
            for kind, entry in fields(packed[12]):
                names[kind][one(entry)[1]] = one(entry)[2].decode()
        if 60 in packed:
            track = one(packed[60])
            if 3 in track:
                tracks[track[1]] = one(track[3])[6].decode(), ""
            elif 4 in track:
                thread = one(track[4])
                assert thread[1] == track[5] and thread[2] == track[1]
                tracks[track[1]] = tracks[track[5]][0], thread[5].decode()
            else:
                assert one(track[8]) == {3: 3}  # bytes
                tracks[track[1]] = tracks[track[5]][0], track[2].decode()
        if 11 in packed:
            assert packed[13] == 2
            event, moment = one(packed[11]), packed[8]
            where = tracks[event[11]]
            if event[9] == 1:
                assert event[11] not in running, "slices of a track do not overlap"
                said = [one(body) for field, body in fields(packed[11]) if field == 4]
                arguments = tuple((names[3][each[1]], each.get(3, each.get(5))) for each in said)
                running[event[11]] = (*where, names[2][event[10]], names[1][event[3]], arguments, moment)
            elif event[9] == 2:
                slices.append(Slice(*running.pop(event[11]), moment))
            else:
                counters.setdefault(where, []).append((moment, event[44]))
    assert not running
    return Decoded(slices, counters, tracks)


def expected(timeline: Timeline, names: dict[int, list[str]]) -> Counter[Slice]:
    found: Counter[Slice] = Counter()
    for s in timeline.spans:
        arguments = [("stage", s.stage), ("microbatch", s.microbatch)]
        said = tuple((k, v) for k, v in arguments if v >= 0) + ((("bytes", s.bytes),) if s.bytes else ())
        for name in names[s.rank_class]:
            what = name, s.stream.value, span_name(s), s.kind.value, said
            found[Slice(*what, round(s.start * 1e9), round(s.end * 1e9))] += 1
    return found


def test_every_span_is_a_slice_of_its_rank_class(step, tmp_path: Path) -> None:
    timeline = step("interleaved", 4, 8, 2, recompute=0.003, layers=3, tensor=True, host_copy=0.01)
    write_perfetto(timeline, tmp_path / "t.pftrace")
    names = {index: [process.name] for index, process in enumerate(list_processes(timeline))}
    assert Counter(decode(tmp_path / "t.pftrace").slices) == expected(timeline, names)


def test_every_rank_has_the_slices_of_its_class_and_memory(step, tmp_path: Path) -> None:
    timeline = step("1f1b", 2, 3, group=300)  # so many tracks that their numbers take three bytes
    chosen = list_processes(timeline, "all")
    write_perfetto(timeline, tmp_path / "t.pftrace", chosen)
    found = decode(tmp_path / "t.pftrace")
    names = {index: [p.name for p in chosen if p.rank_class == index] for index in range(2)}
    assert Counter(found.slices) == expected(timeline, names)
    assert {name for name, _ in found.tracks.values()} == {f"rank {r} (stage {r // 300})" for r in range(600)}
    for process in chosen[::97]:
        profile = timeline.memory[process.rank_class]
        for index, category in enumerate(CATEGORIES):
            shown = dict(found.counters[process.name, category.value])
            held = {round(time * 1e9): usage[index] for time, usage in zip(profile.times, profile.usage, strict=True)}
            value = None
            for moment, size in held.items():  # a counter holds until it is said again
                value = shown.get(moment, value)
                assert value == size


def test_named_ranks_alone_are_written(step, tmp_path: Path) -> None:
    timeline = step("1f1b", 2, 3, group=4)
    chosen = list_processes(timeline, "1-2,6")
    assert [(p.rank, p.rank_class) for p in chosen] == [(1, 0), (2, 0), (6, 1)]
    write_perfetto(timeline, tmp_path / "t.pftrace", chosen)
    assert {s.process for s in decode(tmp_path / "t.pftrace").slices} == {p.name for p in chosen}


@pytest.mark.parametrize("ranks", ["", "8", "3-1", "0-8", "all,1", "-1", "1;2", "9" * 30])
def test_ranks_that_are_none_are_refused(step, ranks: str) -> None:
    with pytest.raises(ValueError, match="--ranks"):
        list_processes(step("1f1b", 2, 3, group=4), ranks)


def test_hosts_have_counters_and_overlapping_spans_tracks_of_their_own(step, tmp_path: Path) -> None:
    write_perfetto(step("1f1b", 2, 4, group=4, offloaded=10), tmp_path / "t.pftrace")
    assert decode(tmp_path / "t.pftrace").counters["host 0 (8 ranks)", "optimizer"] == [(0, 80.0)]
    spans = tuple(
        Span(0, StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 0, -1, f"\ud800 {i}", start, start + 2.0)
        for i, start in enumerate((0.0, 1.0, 2.0))
    )
    write_perfetto(Timeline("measured", (RankClass("r", (0,), (0,)),), spans, (), 4.0, "gloo"), tmp_path / "o.pftrace")
    found = decode(tmp_path / "o.pftrace").slices
    assert [(s.thread, s.start) for s in sorted(found, key=lambda s: s.start)] == [
        ("data", 0), ("data (2)", 10**9), ("data", 2 * 10**9)
    ]  # fmt: skip


def test_the_size_is_known_before_it_is_written(step, tmp_path: Path) -> None:
    timeline = step("1f1b", 4, 32, layers=6, tensor=True, group=8)
    for ranks in ("classes", "all"):
        chosen = list_processes(timeline, ranks)
        write_perfetto(timeline, tmp_path / "t.pftrace", chosen)
        size = (tmp_path / "t.pftrace").stat().st_size
        assert abs(estimate_size(timeline, chosen) - size) < 0.25 * size


def test_the_same_timeline_gives_the_same_bytes_and_none_an_empty_trace(step, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_perfetto(step(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    write_perfetto(Timeline("simulated", (), (), (), 0.0, "longest_path"), tmp_path / "empty")
    assert decode(tmp_path / "empty").slices == []
