import csv
import io
import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.published.accuracy import (
    load_runs,
    predict,
    predict_all,
    regret,
    summarize,
    summarize_errors,
    to_csv,
)
from meshwise.scenarios.published.estimates import estimate_step_time
from meshwise.scenarios.published.row import GIB
from meshwise.scenarios.published.runs import build_run, read_runs
from meshwise.simulator.engine import step_time
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.strategies.lowering.lower import lower

ROW = {
    "row_id": "one", "source_id": "ours", "model": "small", "arch": "gpt", "n_layers": 4, "hidden": 1024,
    "n_heads": 16, "ffn_hidden": 4096, "vocab": 51200, "seq_len": 1024, "precision": "fp16", "accelerator": "A100 SXM",
    "accel_mem_gb": 80,
    "n_devices": 8, "devices_per_node": 8, "dp": 4, "tp": 2, "pp": 1, "zero_stage": 0, "recompute": "none",
    "micro_batch": 1,
    "global_batch": 8, "schedule": "1F1B", "status": "ok", "step_time_s": 0.1, "peak_mem_gib": 3.0,
}  # fmt: skip


RUNS = Path(__file__).parent / "fixtures/published_runs.jsonl"
"""A sample of runs that ten publishers measured."""


def test_every_published_run_of_the_sample_is_predicted() -> None:
    predictions = predict_all(read_runs(RUNS))
    assert len({row.run.source for row in predictions}) == 10
    assert {row.skipped for row in predictions} == {""}
    assert all(
        0.2 < row.step_time / row.run.step_time < 5 for row in predictions if row.step_time and row.run.step_time
    )
    memory = [row.memory_error for row in predictions if row.memory_error is not None]
    assert len(memory) == 5 and max(map(abs, memory)) < 0.02


def test_a_long_step_is_what_all_its_events_take() -> None:
    run = build_run(ROW | {"tp": 1, "dp": 2, "pp": 4, "n_layers": 16, "global_batch": 256})
    assert run.scenario is not None
    problem, plan = run.scenario.problem, run.scenario.choose_plan()
    assert plan.num_microbatches == 128
    assert estimate_step_time(problem, plan) == pytest.approx(step_time(lower(problem, plan)), rel=1e-9)


WORDS = st.sampled_from(
    [
        "full",
        "none",
        "8x100 Gb/s",
        "selective 50%",
        "interleaved",
        "zbv",
        "fp8",
        "0.5",
        "deepseek-v3",
        "t5",
        "L40S",
        "[1,2]",
    ]
)
FIELDS = sorted(
    {*ROW, "cp", "ep", "vpp", "moe_experts", "moe_topk", "moe_ffn_hidden", "fsdp_shards", "n_kv_heads", "head_dim",
     "nic_gbps_per_device", "inter_node_link", "intra_node_link", "recompute_detail", "offload", "plan_note",
     "grad_accum",
     "framework", "optimizer", "peak_mem_reserved_gib", "mem_note", "sequence_parallel", "attention_kernel", "n_params"}
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), WORDS | st.integers(1, 8), max_size=2))
def test_any_scenario_of_a_row_is_predicted(change: dict[str, object]) -> None:
    row = predict(build_run(ROW | {"n_layers": 2} | change))
    assert bool(row.skipped) == (row.step_time is None)


def test_memory_is_compared_as_it_was_measured() -> None:
    """Each row measures 1 GiB of another kind of memory: its error says which prediction stands beside it."""
    rows = {
        kind: predict(build_run(ROW | {"peak_mem_gib": 1.0, "peak_mem_kind": kind}))
        for kind in ("allocated", "reserved", "device", "unknown")
    }
    peaks = {kind: (row.memory_error or 0.0) * GIB + GIB for kind, row in rows.items()}
    row = rows["device"]
    assert peaks["unknown"] == peaks["allocated"] == pytest.approx(row.peak_memory)
    assert (peaks["reserved"], peaks["device"]) == pytest.approx((row.peak_reserved, row.peak_device))
    assert peaks["allocated"] < peaks["reserved"] < peaks["device"]
    noted = predict(build_run(ROW | {"peak_mem_gib": 1.0, "mem_note": "nvidia-smi"}))
    assert noted.memory_error == row.memory_error


def test_runs_of_one_plan_count_once_in_a_group() -> None:
    rows = [ROW | {"micro_batch": size, "step_time_s": time} for size, time in ((1, 4.0), (1, 6.0), (2, 1.0))]
    assert summarize([predict(build_run(row)) for row in rows])["groups"] == []  # two plans
    rows.append(ROW | {"dp": 8, "tp": 1, "step_time_s": 7.0})
    (group,) = summarize([predict(build_run(row)) for row in rows])["groups"]
    assert group["plans"] == 3


def test_errors_by_technique_size_and_assumption() -> None:
    rows = [ROW, ROW | {"n_devices": 16, "dp": 8}, ROW | {"dp": 8, "tp": 1}]
    result = summarize([predict(build_run(row)) for row in rows])
    assert {name: each["count"] for name, each in result["techniques"].items()} == {"dp": 3, "tp": 2}
    assert {name: each["count"] for name, each in result["devices"].items()} == {"8-63": 3}
    assert {"assumption": "optimizer adamw (not stated)", "rows": 3} in result["assumptions"]


def test_no_row_is_lost(tmp_path) -> None:
    rows = [
        ROW,
        ROW | {"row_id": "two", "n_devices": 7},
        ROW | {"row_id": "three", "source_id": "theirs", "status": "oom", "step_time_s": None},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    predictions = predict_all(load_runs(tmp_path / "rows.jsonl"))
    result = summarize(predictions)
    assert result["all"]["rows"] == 3
    assert result["all"]["predicted"] == 2
    reason = "tp(2) * pp(1) * cp(1) = 2 divides n_devices, met 7"
    assert result["all"]["skipped"] == [{"row_id": "two", "reason": reason}]
    assert result["all"]["reasons"] == {reason: 1}
    assert set(result["sources"]) == {"ours", "theirs"}
    assert result["sources"]["theirs"]["out_of_memory"] == {
        "true_fit": 0,
        "false_fit": 1,
        "true_oom": 0,
        "false_oom": 0,
    }
    assert result["sources"]["ours"]["memory"]["count"] == 1
    lines = list(csv.DictReader(io.StringIO(to_csv(predictions))))
    assert [line["row_id"] for line in lines] == ["one", "two", "three"]
    assert float(lines[0]["predicted_step_time_s"]) == pytest.approx(predictions[0].step_time, rel=1e-5)
    assert lines[1]["assumptions"] == f"skipped: {reason}"
    low, high = predictions[0].step_time_interval or (0.0, 0.0)
    assert [float(lines[0][f"step_time_{end}_s"]) for end in ("low", "high")] == pytest.approx([low, high], rel=1e-5)
    assert lines[1]["step_time_low_s"] == lines[1]["peak_memory_high_gib"] == ""


def test_intervals_of_a_source_and_in_all() -> None:
    predicted = predict(build_run(ROW))
    low, high = predicted.step_time_interval or (0.0, 0.0)
    rows = [replace(predicted, run=replace(predicted.run, step_time=seconds)) for seconds in (low, high, 1.01 * high)]
    result = summarize(rows)
    assert result["all"]["step_time_interval"] == result["sources"]["ours"]["step_time_interval"]
    assert result["all"]["step_time_interval"]["inside"] == pytest.approx(2 / 3)
    assert result["all"]["step_time_interval"]["factor"] == pytest.approx(sqrt(high / low))
    skipped = summarize([predict(build_run(ROW | {"tp": "two"}))])["all"]
    assert skipped["step_time_interval"] == {"count": 0, "inside": None, "factor": None}


def test_errors_by_hand() -> None:
    assert summarize_errors([0.1, -0.2, None, 0.3]) == {
        "count": 3,
        "mape": 0.2,
        "median": 0.2,
        "max": 0.3,
        "bias": pytest.approx(0.2 / 3),
    }
    assert summarize_errors([None]) == {"count": 0, "mape": None, "median": None, "max": None, "bias": None}


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True))
def test_tau_and_regret_of_a_perfect_and_a_reversed_order(times: list[int]) -> None:
    same = [(float(time), float(time)) for time in times]
    assert kendall_tau(same) == 1
    assert regret(same) == 0
    assert kendall_tau([(-a, b) for a, b in same]) == -1
    assert regret([(-a, b) for a, b in same]) == pytest.approx(max(times) / min(times) - 1)
