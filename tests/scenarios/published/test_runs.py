"""Rows of published runs are data: a scenario, or the reason why not, whatever they hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.published.runs import build_run

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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("field", ["n_layers", "global_batch", "tp"])
def test_a_figure_that_is_no_whole_number_is_skipped_with_its_reason(field: str, value: float) -> None:
    run = build_run(ROW | {field: value})
    assert run.scenario is None and run.skipped.startswith(f"{field} is a")


def test_what_was_measured() -> None:
    run = build_run(ROW | {"peak_mem_gib": None, "peak_mem_reserved_gib": 5.0, "status": "OOM"})
    assert (run.peak_memory, run.status) == (5 * 2**30, "oom")
    assert "measured peak memory is what the allocator reserved, not what was allocated" in run.assumed
    noted = build_run(ROW | {"peak_mem_gib": None, "mem_note": "peak 71.5 GB by nvidia-smi"})
    assert (noted.peak_memory, noted.memory_kind) == (71.5e9, "device")
    speed = {"step_time_s": None, "tokens_per_s_per_device": 1024.0}
    assert build_run(ROW | speed).step_time == 1.0  # 8 sequences of 1024 tokens by 8 devices
    assert build_run(ROW | {"step_time_s": "fast"}).step_time is None
