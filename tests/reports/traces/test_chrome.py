import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwise.reports.traces.chrome import write_trace
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline


def traced(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    write_trace(timeline, path)
    return json.loads(path.read_text())["traceEvents"]


def test_every_span_is_there_with_its_times_to_the_nanosecond(step, tmp_path: Path):
    timeline = step("interleaved", 4, 8, 2, recompute=0.003, layers=3, tensor=True)
    complete = [e for e in traced(timeline, tmp_path / "t.json") if e["ph"] == "X"]
    expected = Counter(
        (s.rank_class, s.kind.value, s.stage, s.microbatch, s.operators, round(s.start * 1e9), round(s.end * 1e9))
        for s in timeline.spans
    )
    found = Counter(
        (e["pid"], e["cat"], *(e["args"][k] for k in ("stage", "microbatch", "operators")),
         round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
        for e in complete
    )  # fmt: skip
    assert found == expected


def test_no_two_spans_overlap_on_one_thread(step, tmp_path: Path):
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in traced(step("1f1b", 4, 12, tensor=True, layers=4), tmp_path / "t.json"):
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)))
    assert rows
    assert all(a[1] <= b[0] for row in rows.values() for a, b in pairwise(sorted(row)))


def test_measured_spans_that_overlap_get_a_thread_of_their_own(tmp_path: Path):
    spans = tuple(
        Span(0, StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 0, -1, f"bucket {i}", start, start + 2.0)
        for i, start in enumerate((0.0, 1.0, 2.0))
    )
    timeline = Timeline("measured", (RankClass("r", (0,), (0,)),), spans, (), 4.0, "gloo")
    found = traced(timeline, tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert [names[e["tid"]] for e in found if e["ph"] == "X"] == ["data", "data (2)", "data"]


def test_processes_and_threads_are_named_and_ordered(step, tmp_path: Path):
    found = traced(step("1f1b", 2, 4, group=8, tensor=True), tmp_path / "t.json")
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "stage 0 (8 ranks)", 1: "stage 1 (8 ranks)"}
    assert {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"} == {0: 0, 1: 1}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"compute", "tensor", "data", "send forward"} <= set(threads.values())
    assert {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"} == set(threads)


def test_memory_is_a_counter_by_category(step, tmp_path: Path):
    timeline = step()
    counters = [e for e in traced(timeline, tmp_path / "t.json") if e["ph"] == "C"]
    assert len(counters) == sum(len(p.times) for p in timeline.memory)
    assert max(sum(e["args"].values()) for e in counters) == timeline.peak_memory


def test_hosts_are_processes_after_the_rank_classes_with_counters_of_their_own(step, tmp_path: Path):
    found = traced(step("1f1b", 2, 4, group=4, offloaded=10), tmp_path / "t.json")
    assert {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}[2] == "host 0 (8 ranks)"
    (counter,) = (e for e in found if e["ph"] == "C" and e["pid"] == 2)
    assert counter["args"]["optimizer"] == sum(counter["args"].values()) == 8 * 10
    assert {e["pid"] for e in traced(step(), tmp_path / "t.json")} == {0, 1}


def test_launches_and_copies_of_the_host_have_rows_of_their_own(step, tmp_path: Path):
    found = traced(step("1f1b", 2, 4, launch=0.002, host_copy=0.01), tmp_path / "t.json")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    rows = Counter((e["cat"], names[e["pid"], e["tid"]]) for e in found if e["ph"] == "X")
    assert {row: rows[row] for row in rows if row[0] in ("launch", "host copy")} == {
        ("launch", "launch"): 2 * 2 * 4, ("host copy", "to host"): 2, ("host copy", "from host"): 2
    }  # fmt: skip


def test_the_same_timeline_gives_the_same_bytes_and_hostile_names_stay_text(step, tmp_path: Path):
    timeline = step()
    spans = tuple(s._replace(operators='"}],\n\x00\ud800') for s in timeline.spans)
    hostile = dataclasses.replace(timeline, spans=spans, engine='"</script>')
    assert {e["args"]["operators"] for e in traced(hostile, tmp_path / "a.json") if e["ph"] == "X"} == {
        spans[0].operators
    }
    write_trace(hostile, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_timeline_without_spans_is_still_json(tmp_path: Path):
    empty = Timeline("simulated", (), (), (), 0.0, "longest_path")
    assert traced(empty, tmp_path / "t.json") == []
