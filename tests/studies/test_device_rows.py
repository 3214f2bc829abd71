"""Runs of a plain trainer on one GPU, beside their predictions."""

from pathlib import Path

import pytest

from meshwise.scenarios.published.accuracy import load_runs, predict_all

ROWS = Path(__file__).parents[2] / "reports/executor/device-rows-h200.jsonl"


@pytest.fixture(scope="module")
def predictions():
    return predict_all(load_runs(ROWS, strict=True))


def test_peaks_of_weights_without_a_main_copy_are_as_measured(predictions) -> None:
    """Weights, gradients and moments in 16 bits, and three copies of the logits in fp32 while the loss is backward."""
    errors = [
        row.memory_error
        for row in predictions
        if row.run.scenario is not None and row.run.scenario.problem.training.state_precision == "same"
    ]
    assert len(errors) == 4
    assert errors == pytest.approx([0.0] * 4, abs=0.005)


def test_steps_of_models_that_devices_bound_are_within_an_eighth(predictions) -> None:
    errors = [row.error for row in predictions if row.run.group.startswith("Llama")]
    assert len(errors) == 9
    assert max(map(abs, errors)) < 1 / 8


def test_steps_that_the_host_bounds_are_not_told_much_too_fast(predictions) -> None:
    """A step of 256 tokens of GPT-2 is launches alone: 12 layers, forward and backward."""
    (error,) = [row.error for row in predictions if row.run.row_id == "device_rows-0002"]
    assert abs(error) < 0.1
