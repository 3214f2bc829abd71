"""Kineto traces have what Holistic Trace Analysis asks of them, and read back they say the same step."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshwise.reports.difference import difference
from meshwise.reports.traces.kineto import (
    SEND_AND_RECEIVE,
    estimate_size,
    name_by_collective,
    name_operation,
    read_kineto,
    select_ranks,
    write_kineto,
)
from meshwise.reports.traces.processes import list_processes
from meshwise.simulator.timeline import Timeline


def written(timeline: Timeline, folder: Path, ranks: str = "all") -> list[dict[str, Any]]:
    write_kineto(timeline, folder, list_processes(timeline, ranks))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank.*.json"))]


def test_a_file_has_what_holistic_trace_analysis_asks_for(step, tmp_path: Path) -> None:
    """Of the file ``distributedInfo.rank``; of events the columns of its parser; kernels known by name and stream."""
    documents = written(step("1f1b", 2, 4, group=2, tensor=True, host_copy=0.01, launch=0.002), tmp_path)
    assert [each["distributedInfo"]["rank"] for each in documents] == [0, 1, 2, 3]
    assert {each["distributedInfo"]["world_size"] for each in documents} == {4}
    for document in documents:
        events = document["traceEvents"]
        assert all({"ts", "dur", "name", "cat", "pid", "tid", "ph"} <= event.keys() for event in events)
        (annotation,) = (event for event in events if event["name"].startswith("ProfilerStep#"))
        kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy")]
        launched = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
        assert len(kernels) == len(launched) > 0
        for kernel in kernels:
            assert kernel["args"]["stream"] > 0  # -1 and 0 are the host
            launch = launched[kernel["args"]["correlation"]]
            assert annotation["ts"] <= launch["ts"] <= kernel["ts"]
            assert launch["ts"] < annotation["ts"] + annotation["dur"]
        communication = [e for e in kernels if re.match(r"^nccl.*Kernel", e["name"])]
        assert {e["name"].split()[1] for e in communication} <= {"tensor", "pipeline", "data"}
        assert {e["cat"] for e in kernels if e["name"].startswith("Memcpy")} == {"gpu_memcpy"}


def test_a_step_read_back_does_not_differ_from_itself(step, tmp_path: Path) -> None:
    timeline = step("interleaved", 2, 4, 2, group=2, tensor=True, host_copy=0.01)
    written(timeline, tmp_path)
    measured = read_kineto(sorted(tmp_path.glob("*.json")))
    assert [c.ranks for c in measured.rank_classes] == [(0,), (1,), (2,), (3,)]
    found = difference(name_by_collective(timeline), measured, name_operation)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert {row.operation for row in found.rows} == {"compute", "host copy", SEND_AND_RECEIVE, "waiting"}
    assert all(abs(row.difference) < 1e-6 for row in found.rows)


def test_planted_time_is_found_in_its_kind(step, tmp_path: Path) -> None:
    timeline = step("1f1b", 2, 4)
    (path,) = (Path(tmp_path / "rank.1.json"),)
    written(timeline, tmp_path)
    document = json.loads(path.read_text())
    last = max((e for e in document["traceEvents"] if e["cat"] == "kernel"), key=lambda e: e["ts"])
    last["dur"] += 5e3  # us, at the end of the step, where nothing else runs
    next(e for e in document["traceEvents"] if e["name"] == "ProfilerStep#0")["dur"] += 5e3
    packed = tmp_path / "one.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(document).encode()))
    found = difference(name_by_collective(select_ranks(timeline, [1])), read_kineto([packed]), name_operation)
    assert found.error == pytest.approx(5e-3)
    worst = found.operations()[0]
    assert worst.difference == pytest.approx(5e-3) and worst.operation == SEND_AND_RECEIVE  # it ends with a gather
    assert sum(row.difference for row in found.operations()) == pytest.approx(5e-3)


def test_the_step_of_median_length_is_taken_and_what_crosses_its_ends_is_cut(tmp_path: Path) -> None:
    steps = [("ProfilerStep#3", 0, 100), ("ProfilerStep#4", 100, 60), ("ProfilerStep#5", 160, 70)]
    annotations = [{"ph": "X", "cat": "user_annotation", "name": n, "ts": t, "dur": d} for n, t, d in steps]
    kernels = [("gemm", 150, 20), ("ncclKernel_AllReduce_RING_LL", 200, 80), ("gemm", 10, 20), ("Memset", 170, 2)]
    events = annotations + [{"ph": "X", "cat": "kernel", "name": n, "ts": t, "dur": d} for n, t, d in kernels]
    (tmp_path / "t.json").write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": events}))
    found = read_kineto([tmp_path / "t.json"])
    assert found.step_time == pytest.approx(70e-6)
    spans = [(name_operation(s), round(s.start * 1e6), round(s.end * 1e6)) for s in found.spans]
    assert spans == [
        (("compute", "compute"), 0, 10),  # from 150 to 170 of a step that begins at 160
        (("compute", "compute"), 10, 12),
        (("communication", "all_reduce"), 40, 70),  # to 280 of a step that ends at 230
    ]


STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 9}
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no list traceEvents"),
        ({"traceEvents": {}}, "no list traceEvents"),
        ({"traceEvents": []}, "distributedInfo.rank"),
        ({"distributedInfo": {"rank": -1}, "traceEvents": []}, "distributedInfo.rank"),
        ({"distributedInfo": {"rank": True}, "traceEvents": []}, "distributedInfo.rank"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [STEP]}, "met 1 and 0"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [KERNEL]}, "met 0 and 1"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [7]}, r"traceEvents\[0\]: an object"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [STEP, KERNEL | {"ts": "1"}]}, r"traceEvents\[1\]\.ts"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [STEP, KERNEL | {"dur": math.inf}]}, r"traceEvents\[1\]\.dur"),
        ({"distributedInfo": {"rank": 0}, "traceEvents": [STEP, KERNEL | {"dur": -1}]}, r"traceEvents\[1\]\.dur"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(document: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        read_kineto([tmp_path / "t.json"])


def test_broken_files_ranks_twice_and_ranks_that_are_not_there_are_refused(
    step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = step("1f1b", 2, 4)
    written(timeline, tmp_path)
    with pytest.raises(ValueError, match="every rank once, met 0 again"):
        read_kineto([tmp_path / "rank.0.json"] * 2)
    with pytest.raises(ValueError, match="a rank from 0 to 1, met rank 5"):
        select_ranks(timeline, [0, 5])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    (tmp_path / "no.json.gz").write_bytes(b"{}")
    with pytest.raises(ValueError, match="no JSON"):
        read_kineto([tmp_path / "deep.json"])
    for name in ("cut.json.gz", "no.json.gz", "none.json"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_kineto([tmp_path / name])
    monkeypatch.setattr("meshwise.reports.traces.kineto.MAX_BYTES", 1000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 2000))
    for name in ("rank.0.json", "bomb.json.gz"):
        with pytest.raises(ValueError, match="at most 1000 bytes"):
            read_kineto([tmp_path / name])


def test_the_size_is_known_before_it_is_written(step, tmp_path: Path) -> None:
    timeline = step("1f1b", 4, 16, layers=6, tensor=True)
    written(timeline, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert abs(estimate_size(timeline, list_processes(timeline, "all")) - size) < 0.25 * size
