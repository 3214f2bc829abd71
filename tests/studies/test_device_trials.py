"""Trials of one device are written row by row, by the trainer that runs plans."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.job import Job  # noqa: E402
from meshwise.simulator.models.model import build  # noqa: E402
from meshwise.strategies.plan.recomputation import Recompute  # noqa: E402

from . import device_trials  # noqa: E402
from .device_trials import Trial, main, trials  # noqa: E402


def few(device: str) -> list[Trial]:
    chosen = ("plain", "full recompute", "optimizer and parameters on the host", "fp32")
    return [trial for trial in trials(device) if trial.spec.name == "tiny-gpt" and trial.name in chosen]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("trials") / "rows.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_trials, "trials", few)
        patch.setattr(device_trials, "WARM_UP", 1)
        patch.setattr(device_trials, "STEPS", 3)
        patch.setattr(device_trials, "FEWEST", 3)
        assert main(["--device", "cpu", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_every_trial_has_a_row_with_date_machine_and_versions(document: dict) -> None:
    assert document["left_out"] == []
    assert {"date", "machine", "accelerator", "software", "python", "cores"} <= document["machine"].keys()
    for row, trial in zip(document["rows"], few("cpu"), strict=True):
        assert row["status"] == "ok", row
        assert row["trial"] == f"tiny-gpt 16 {trial.name}" and len(row["step_times"]) == 3
        assert sorted(row["step_times"])[1] == row["step_time"] > 0
        assert row["parameters"] == build(trial.spec, 16, "fp32").num_parameters
        assert row["loss"] == pytest.approx(5.5, abs=1.0)  # ln(256) = 5.545: nothing is learned yet
        assert Job.from_document(row["job"], "here").plan == trial.job("cpu").plan
        assert ("kinds" in row) is trial.profiled


def test_states_on_the_host_are_those_of_mixed_precision(document: dict) -> None:
    rows = {row["trial"].removeprefix("tiny-gpt 16 "): row for row in document["rows"]}
    away = rows["optimizer and parameters on the host"]
    # fp32 main weights, which are the shards, two moments and a gradient: 16 bytes a parameter
    assert away["host_peak"] == 16 * away["parameters"]
    assert rows["plain"]["host_peak"] == 0


def test_trials_for_a_gpu_are_six_models_of_125_million_to_1_3_billion() -> None:
    every = trials("cuda")
    sizes = {
        (each.spec.name, each.training.sequence): build(each.spec, 1, "bf16").num_parameters / 1e9 for each in every
    }
    assert len(sizes) == 6 and 0.12 < min(sizes.values()) < max(sizes.values()) < 1.5
    assert {each.training.precision for each in every} == {"bf16", "fp32"}
    assert {each.layout.recompute for each in every} == {Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL}
    assert {str(each.layout.offload) for each in every if each.layout.offload} == {
        "activations",
        "optimizer",
        "optimizer, parameters",
    }


def test_time_that_is_up_leaves_trials_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path / "rows.json"), "--seconds", "0"]) == 0
    error = capsys.readouterr().err
    assert error.count("left out, for time") == len(trials("cpu"))


def test_without_a_gpu_there_are_no_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["--out", str(tmp_path / "rows.json")]) == 2
    assert "--device: cuda needs 1 GPU, one for each rank of a host, met 0" in capsys.readouterr().err
