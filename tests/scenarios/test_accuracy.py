import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.accuracy import errors, kendall_tau, predict, predict_all, regret, runs_at, summary, to_csv
from scenarios.errors import ScenarioError
from scenarios.library import root
from scenarios.published import read_runs, run_of

ROW = {
    "row_id": "one", "source_id": "ours", "model": "small", "arch": "gpt", "n_layers": 4, "hidden": 1024,
    "n_heads": 16, "ffn_hidden": 4096, "vocab": 51200, "seq_len": 1024, "precision": "fp16", "accelerator": "A100 SXM",
    "accel_mem_gb": 80,
    "n_devices": 8, "devices_per_node": 8, "dp": 4, "tp": 2, "pp": 1, "zero_stage": 0, "recompute": "none",
    "micro_batch": 1,
    "global_batch": 8, "schedule": "1F1B", "status": "ok", "step_time_s": 0.1, "peak_mem_gib": 3.0,
}  # fmt: skip


def test_a_row_becomes_a_scenario_and_says_what_it_assumes() -> None:
    run = run_of(ROW)
    assert run.scenario is not None
    plan = run.scenario.chosen()
    assert (plan.data, plan.tensor, plan.num_microbatches) == (4, 2, 2)
    assert run.scenario.spec.kv_heads == 16
    assert "vpp 1 (not stated)" in run.assumed


@pytest.mark.parametrize(
    ("tp_overlap", "sequence_parallel", "expected"),
    [("--tp-comm-overlap", True, True), ("off", True, False), (None, True, False), ("--tp-comm-overlap", None, False)],
)
def test_a_row_overlaps_tensor_communication_where_it_says_so_and_can(
    tp_overlap: str | None, sequence_parallel: bool | None, expected: bool
) -> None:
    run = run_of(ROW | {"tp_overlap": tp_overlap, "sequence_parallel": sequence_parallel})
    assert run.scenario is not None
    assert run.scenario.chosen().overlap_tensor is expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp": None}, "dp is not stated"),
        ({"accelerator": "TPU v4"}, "accelerator 'TPU v4' with 80 GB is not in the catalogue"),
        ({"moe_experts": 8}, "moe_experts 8 is not supported yet"),
        ({"fsdp_shards": 8}, "fsdp_shards 8 is not supported yet"),
        ({"zero_stage": 3}, "zero_stage 3 is not supported yet"),
        ({"cp": 2}, "cp 2 is not supported yet"),
        ({"precision": "FP8"}, "precision 'FP8' is not supported yet"),
        ({"recompute": "some layers"}, "recompute 'some layers' is not supported yet"),
        ({"arch": "vision"}, "arch is a dense gpt or llama, met 'vision'"),
        ({"n_devices": 12}, "devices fill whole nodes, met 12 of 8 a node"),
        ({"dp": 3}, "plan.data: data(3) * tensor(2) * pipeline(1) = 6 ranks, cluster has 8; data: 4 would do"),
        ({"n_layers": 1e99}, None),
        ({"tp": "two"}, None),
        ({"vocab": {"a": 1}}, None),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(change: dict[str, object], reason: str | None) -> None:
    run = run_of(ROW | change)
    assert run.scenario is None
    assert run.skipped
    assert reason in (None, run.skipped)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(ROW)), JSON)
def test_any_value_in_a_row_is_predicted_or_skipped(field: str, value: object) -> None:
    run = run_of(ROW | {field: value})
    assert (run.scenario is None) == bool(run.skipped)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("field", ["n_layers", "global_batch", "tp"])
def test_a_figure_that_is_no_whole_number_is_skipped_with_its_reason(field: str, value: float) -> None:
    run = run_of(ROW | {field: value})
    assert run.scenario is None and run.skipped


def test_a_vocabulary_that_tensor_does_not_divide_is_padded_as_megatron_does() -> None:
    run = run_of(ROW | {"vocab": 50257})
    assert run.scenario is not None
    assert run.scenario.spec.vocab == 50432  # the next multiple of 128 * 2


def test_no_row_is_lost(tmp_path) -> None:
    rows = [
        ROW,
        ROW | {"row_id": "two", "dp": None},
        ROW | {"row_id": "three", "source_id": "theirs", "status": "oom", "step_time_s": None},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    predictions = predict_all(runs_at(tmp_path / "rows.jsonl"))
    result = summary(predictions)
    assert result["all"]["rows"] == 3
    assert result["all"]["predicted"] == 2
    assert result["all"]["skipped"] == [{"row_id": "two", "reason": "dp is not stated"}]
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
    assert lines[1]["assumptions"] == "skipped: dp is not stated"


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
