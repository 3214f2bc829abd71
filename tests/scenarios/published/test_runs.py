"""Rows of published runs are data: a scenario, or the reason why not, whatever they hold."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.published.accuracy import predict
from meshwise.scenarios.published.runs import build_run, read_runs

from .test_accuracy import FIELDS, ROW, WORDS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON | WORDS | st.integers(1, 64), max_size=4))
def test_any_values_in_a_row_are_a_scenario_or_a_reason(change: dict[str, object]) -> None:
    run = build_run(ROW | change)
    assert (run.scenario is None) == bool(run.skipped)


IDENTITY = {"row_id", "source_id", "n_layers", "hidden", "n_devices", "dp", "tp", "pp"}
"""Fields that a row has to state so that it is predicted: the model's size, devices and degrees."""
OTHERS = sorted(
    {*FIELDS, "compiled", "norm_kernel", "loss", "gradient_precision", "ffn_type", "tp_overlap", "dp_overlap",
     "zero_stage", "devices_per_node", "tied_embeddings", "peak_tflops_used", "moe_shared_ffn_hidden", "n_dense_layers",
     "software", "cp_comm_type", "derived_fields", "samples_per_s_per_device", "tokens_per_s_per_device"}
    - IDENTITY - {"arch", "cp", "model"}
)  # fmt: skip


PLANS: tuple[dict[str, object], ...] = (
    {},
    {"dp": 1, "pp": 4, "vpp": 1},
    {"dp": 2, "tp": 1, "pp": 2, "cp": 2},
    {"dp": 8, "tp": 1, "ep": 4, "moe_experts": 8, "zero_stage": None},
    {"dp": 8, "tp": 1, "zero_stage": 3, "recompute": None, "micro_batch": None, "framework": "torchtitan"},
    {"n_layers": None, "hidden": None, "model": "Llama-2-7B", "arch": None},
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(PLANS),
    st.dictionaries(st.sampled_from(OTHERS), JSON | WORDS | st.integers(1, 64) | st.just(None), max_size=6),
)
def test_no_row_with_a_model_devices_and_degrees_is_skipped(plan: dict[str, object], change: dict[str, object]) -> None:
    run = build_run(ROW | change | plan)
    is_too_long = "a step has at most 100000 microbatches" in run.skipped  # a batch of millions, one by one
    assert run.scenario is not None or is_too_long, (run.skipped, change)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("field", ["n_layers", "pp", "tp"])
def test_a_figure_that_is_no_whole_number_is_skipped_with_its_reason(field: str, value: float) -> None:
    run = build_run(ROW | {field: value})
    assert run.scenario is None and run.skipped.startswith(f"{field} is a")


def test_words_that_are_not_understood_are_faults_where_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['{"n_layers": 2, "recompute_detail": {"schedule": 1}, "schedule": "gpip"}', '{"precision": "bf16"}']
    file.write_text("\n".join(lines), "utf-8")
    assert len(read_runs(file)) == 2
    with pytest.raises(ScenarioError) as error:
        read_runs(file, strict=True)
    (fault,) = error.value.faults
    column = lines[0].index('"gpip"') + 1
    assert str(fault).startswith(f"{file}:1:{column}: schedule: 'gpip' is not understood; nearest known word: gpipe")


def test_a_framework_that_is_not_known_is_a_fault_where_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for line in ('{"framework": "torchtitan"}', '{"framework": null}'):
        file.write_text(line, "utf-8")
        assert len(read_runs(file, strict=True)) == 1
    file.write_text('{"framework": "nanatron"}', "utf-8")
    with pytest.raises(ScenarioError, match="framework: 'nanatron' is not understood; nearest known alias: nanotron"):
        read_runs(file, strict=True)


def test_a_word_that_is_not_understood_widens_the_interval() -> None:
    known, unknown = (build_run(ROW | {"framework": "NeMo", "optimizer": word}) for word in ("adamw", "galore"))
    intervals = [predict(run).step_time_interval for run in (known, unknown)]
    assert all(intervals)
    (low, high), (lower, higher) = (pair or (0.0, 0.0) for pair in intervals)
    assert lower < low < high < higher


def test_what_was_measured() -> None:
    run = build_run(ROW | {"peak_mem_gib": None, "peak_mem_reserved_gib": 5.0, "status": "OOM"})
    assert (run.peak_memory, run.status) == (5 * 2**30, "oom")
    assert "measured peak memory is what the allocator reserved, not what was allocated" in run.assumed
    noted = build_run(ROW | {"peak_mem_gib": None, "mem_note": "peak 71.5 GB by nvidia-smi"})
    assert (noted.peak_memory, noted.memory_kind) == (71.5e9, "device")
    speed = {"step_time_s": None, "tokens_per_s_per_device": 1024.0}
    assert build_run(ROW | speed).step_time == 1.0  # 8 sequences of 1024 tokens by 8 devices
    assert build_run(ROW | {"step_time_s": "fast"}).step_time is None
