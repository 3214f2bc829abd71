"""The commands that need torch, on the smallest scenarios."""

import json
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.inputs.cluster_file import load_cluster

pytest.importorskip("torch")

pytestmark = pytest.mark.fresh_ranks


def test_execute_measures_verifies_and_writes(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    assert run(["execute", "local/dp2", "--steps", "3", "--verify", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == len(document["loss"]) == 3
    assert document["loss"][-1] < document["loss"][0]
    assert document["verify"]["equal"] is True
    assert document["verify"]["reference"] == "single process"
    assert document["peak_memory"] == pytest.approx(document["predicted_peak_memory"], rel=0.3)
    assert json.loads((out / "result.json").read_text()) == document
    assert run(["validate", str(out / "plan.json")]) == 0
    assert (out / "comparison.png").stat().st_size > 10_000
    found = document["difference"]
    assert json.loads((out / "difference.json").read_text()) == found
    assert sum(row["cost"] for row in found["operations"]) == pytest.approx(found["error"])
    operations = {row["operation"] for row in found["operations"]} - {"waiting"}
    assert operations == {"forward of stage 0", "backward of stage 0", "all_reduce gradients", "optimizer"}
    assert found["not_predicted"] == found["did_not_happen"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt3-175b-1024-a100", "at most 64 processes, the plan has 1024"),
        ("korthikanti/22b-8-a100-full", "dropout: the executor trains without dropout"),
    ],
)
def test_what_cannot_run_here_is_refused_before_anything_is_written(
    name: str, words: str, tmp_path: Path, capsys
) -> None:
    assert run(["execute", name, "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_calibrate_writes_a_cluster_that_a_scenario_can_name(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cluster.yaml"
    assert run(["calibrate", "--seconds", "2", "--out", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices_per_node"] == 2
    assert load_cluster(path).num_devices == 2
    assert run(["validate", str(path)]) == 0


def test_doctor_knows_torch(capsys) -> None:
    assert run(["doctor", "--json"]) == 0
    assert "torch" in json.loads(capsys.readouterr().out)["installed"]


def test_a_run_is_predicted_by_the_conventions_of_what_runs_it(tmp_path: Path, capsys) -> None:
    # as `search --for execute` prices it, whose winner this runs; Megatron-LM, which is assumed elsewhere, keeps less
    text = find_scenario("local/dp2").read_text().replace("  framework: execute\n", "")
    path = tmp_path / "one.yaml"
    path.write_text(text.replace("devices_per_node: 2", "devices_per_node: 1").replace("data: 2", "data: 1"))
    scenario = load(path)
    assert scenario.framework is None
    wanted, assumed = scenario.for_target("execute").simulate(), scenario.simulate()
    assert wanted.peak_memory != assumed.peak_memory
    assert run(["execute", str(path), "--steps", "1", "--no-verify", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["predicted_peak_memory"] == wanted.peak_memory
    assert document["predicted_step_time"] == wanted.step_time
