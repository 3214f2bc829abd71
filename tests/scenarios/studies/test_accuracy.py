import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.library import root
from meshwise.scenarios.published.runs import read_runs, run_of
from meshwise.scenarios.published.scenario import seconds_of
from meshwise.scenarios.studies.accuracy import errors, predict, predict_all, regret, runs_at, summary, to_csv
from meshwise.simulator.engine import step_time
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.strategies.lowering import lower

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
    run = run_of(ROW | {"tp": 1, "dp": 2, "pp": 4, "n_layers": 16, "global_batch": 256})
    assert run.scenario is not None
    problem, plan = run.scenario.problem, run.scenario.chosen()
    assert plan.num_microbatches == 128
    assert seconds_of(problem, plan) == pytest.approx(step_time(lower(problem, plan)), rel=1e-9)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
    max_leaves=5,
)
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


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON | WORDS | st.integers(1, 64), max_size=4))
def test_any_values_in_a_row_are_a_scenario_or_a_reason(change: dict[str, object]) -> None:
    run = run_of(ROW | change)
    assert (run.scenario is None) == bool(run.skipped)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), WORDS | st.integers(1, 8), max_size=2))
def test_any_scenario_of_a_row_is_predicted(change: dict[str, object]) -> None:
    row = predict(run_of(ROW | {"n_layers": 2} | change))
    assert bool(row.skipped) == (row.step_time is None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("field", ["n_layers", "global_batch", "tp"])
def test_a_figure_that_is_no_whole_number_is_skipped_with_its_reason(field: str, value: float) -> None:
    run = run_of(ROW | {field: value})
    assert run.scenario is None and run.skipped.startswith(f"{field} is a")


def test_what_was_measured() -> None:
    run = run_of(ROW | {"peak_mem_gib": None, "peak_mem_reserved_gib": 5.0, "status": "OOM"})
    assert (run.peak_memory, run.status) == (5 * 2**30, "oom")
    assert "measured peak memory is what the allocator reserved, not what was allocated" in run.assumed
    noted = run_of(ROW | {"peak_mem_gib": None, "mem_note": "peak 71.5 GB by nvidia-smi"})
    assert (noted.peak_memory, noted.with_context) == (71.5e9, True)
    speed = {"step_time_s": None, "tokens_per_s_per_device": 1024.0}
    assert run_of(ROW | speed).step_time == 1.0  # 8 sequences of 1024 tokens by 8 devices
    assert run_of(ROW | {"step_time_s": "fast"}).step_time is None


def test_memory_is_compared_as_it_was_measured() -> None:
    allocated = predict(run_of(ROW))
    outside = predict(run_of(ROW | {"mem_note": "nvidia-smi"}))
    assert allocated.run.scenario is not None and allocated.peak_memory and outside.peak_memory
    reserved = allocated.run.scenario.problem.cluster.accelerator.reserved
    assert outside.peak_memory - allocated.peak_memory == reserved > 0


def test_runs_of_one_plan_count_once_in_a_group() -> None:
    rows = [ROW | {"micro_batch": size, "step_time_s": time} for size, time in ((1, 4.0), (1, 6.0), (2, 1.0))]
    assert summary([predict(run_of(row)) for row in rows])["groups"] == []  # two plans
    rows.append(ROW | {"dp": 8, "tp": 1, "step_time_s": 7.0})
    (group,) = summary([predict(run_of(row)) for row in rows])["groups"]
    assert group["plans"] == 3


def test_errors_by_technique_size_and_assumption() -> None:
    rows = [ROW, ROW | {"n_devices": 16, "dp": 8}, ROW | {"dp": 8, "tp": 1}]
    result = summary([predict(run_of(row)) for row in rows])
    assert {name: each["count"] for name, each in result["techniques"].items()} == {"dp": 3, "tp": 2}
    assert {name: each["count"] for name, each in result["devices"].items()} == {"8-63": 3}
    assert {"assumption": "optimizer adamw (not stated)", "rows": 3} in result["assumptions"]


def test_no_row_is_lost(tmp_path) -> None:
    rows = [
        ROW,
        ROW | {"row_id": "two", "accelerator": None},
        ROW | {"row_id": "three", "source_id": "theirs", "status": "oom", "step_time_s": None},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    predictions = predict_all(runs_at(tmp_path / "rows.jsonl"))
    result = summary(predictions)
    assert result["all"]["rows"] == 3
    assert result["all"]["predicted"] == 2
    assert result["all"]["skipped"] == [{"row_id": "two", "reason": "accelerator is not stated"}]
    assert result["all"]["reasons"] == {"accelerator is not stated": 1}
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
    assert lines[1]["assumptions"] == "skipped: accelerator is not stated"
    low, high = predictions[0].step_time_interval or (0.0, 0.0)
    assert [float(lines[0][f"step_time_{end}_s"]) for end in ("low", "high")] == pytest.approx([low, high], rel=1e-5)
    assert lines[1]["step_time_low_s"] == lines[1]["peak_memory_high_gib"] == ""


def test_intervals_of_a_source_and_in_all() -> None:
    predicted = predict(run_of(ROW))
    low, high = predicted.step_time_interval or (0.0, 0.0)
    rows = [replace(predicted, run=replace(predicted.run, step_time=seconds)) for seconds in (low, high, 1.01 * high)]
    result = summary(rows)
    assert result["all"]["step_time_interval"] == result["sources"]["ours"]["step_time_interval"]
    assert result["all"]["step_time_interval"]["inside"] == pytest.approx(2 / 3)
    assert result["all"]["step_time_interval"]["factor"] == pytest.approx(high / (predicted.step_time or 0.0))
    skipped = summary([predict(run_of(ROW | {"accelerator": None}))])["all"]
    assert skipped["step_time_interval"] == {"count": 0, "inside": None, "factor": None}


def test_a_folder_of_pictures_is_written(tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in (ROW, ROW | {"dp": 8, "tp": 1})))
    assert run(["accuracy", str(tmp_path / "rows.jsonl"), "--plots", str(tmp_path / "plots"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["predicted"] == 2
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"predicted-measured.png", *(f"error-by-{by}.png" for by in ("source", "devices", "technique"))}


def test_a_folder_of_scenarios_is_read_like_rows() -> None:
    runs = runs_at(root() / "korthikanti")
    assert len(runs) == 8
    assert all(run.scenario is not None and run.step_time for run in runs)
    assert runs_at(root() / "starter.yaml")[0].skipped == "the scenario has no plan or nothing measured"


def test_the_published_runs_of_the_library_are_predicted_within_a_tenth() -> None:
    predictions = [predict(run) for run in (*runs_at(root() / "korthikanti")[-2:], *runs_at(root() / "megatron")[:2])]
    assert all(abs(prediction.error or 1) < 0.1 for prediction in predictions)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not json\n", b"[1]\n", b"[" * 100_000, b"\xff\xfe\n"])
def test_a_file_of_something_else_is_a_scenario_error(content: bytes, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ScenarioError):
        read_runs(tmp_path / "rows.jsonl")


def test_errors_by_hand() -> None:
    assert errors([0.1, -0.2, None, 0.3]) == {
        "count": 3,
        "mape": 0.2,
        "median": 0.2,
        "max": 0.3,
        "bias": pytest.approx(0.2 / 3),
    }
    assert errors([None]) == {"count": 0, "mape": None, "median": None, "max": None, "bias": None}


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True))
def test_tau_and_regret_of_a_perfect_and_a_reversed_order(times: list[int]) -> None:
    same = [(float(time), float(time)) for time in times]
    assert kendall_tau(same) == 1
    assert regret(same) == 0
    assert kendall_tau([(-a, b) for a, b in same]) == -1
    assert regret([(-a, b) for a, b in same]) == pytest.approx(max(times) / min(times) - 1)
