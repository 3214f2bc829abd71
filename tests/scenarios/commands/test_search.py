"""``search --for TARGET`` on the command line, and a framework that a scenario names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.commands.search_report import describe_division
from meshwise.scenarios.loader import load
from meshwise.scenarios.scenario import FRAMEWORK_OF
from meshwise.strategies.plan.framework import ENTRIES

SCENARIO = """
name: small
model: {{transformer: {{layers: 8, hidden: 1024, heads: 8, ffn: 4096, vocab: 4096, ffn_kind: swiglu, positions: rotary,
  tied_embeddings: false}}}}
training: {{global_batch: 32, sequence: 1024, precision: bf16{framework}}}
cluster: {{preset: dgx-a100-80gb, nodes: 1, devices_per_node: 4}}
search: {{algorithm: best_first{space}}}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scenario(framework: str = "", space: str = "") -> str:
    framework = f", framework: {framework}" if framework else ""
    space = f", space: {space}" if space else ""
    Path("s.yaml").write_text(SCENARIO.format(framework=framework, space=space))
    return "s.yaml"


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed", "accelerate", "nanotron"])
def test_the_winner_is_exported_and_read_back(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = scenario()
    assert run(["search", name, "--for", target, "--out", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"].startswith(f"{target} ")
    assert found["gap"] == 0
    assert run(["export", "plan.json", "--scenario", name, "--to", target, "--out", "file"]) == 0
    capsys.readouterr()
    assert run(["simulate", name, "--plan", f"{target}:file", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time"] == found["best"]["evaluation"]["step_time"]
    assert (again["framework"], again["target"]) == (found["framework"], found["target"])
    told = []
    for options in (["--plan", f"{target}:file"], ["--plan", "plan.json", "--for", target]):
        assert run(["simulate", name, *options]) == 0
        told.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("priced as ")])
    framework = FRAMEWORK_OF.get(target)
    end = f"{framework}, as plans for {target} are" if framework else "is assumed: the scenario names no framework"
    assert told[0] == told[1] and len(told[0]) == 1 and told[0][0].endswith(end)


def test_the_framework_that_prices_is_named_and_limits_only_where_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedules = "{schedule: [gpipe, 1f1b], pipeline: [4]}"  # of which Megatron-LM runs the second
    plans = {}
    for framework in ("", "megatron", "torchtitan", "torch"):
        assert run(["search", scenario(framework, schedules), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["framework"] == {"name": framework or "megatron", "stated": bool(framework)}
        plans[framework] = found["target"]
        value = load("s.yaml")
        searched = {trial.plan.schedule for trial in value.search("exhaustive").trials}
        assert searched == ({"1f1b"} if framework == "megatron" else {"1f1b", "gpipe"})
    trainers = {"megatron": "megatron core 0.16.1", "torchtitan": "torchtitan 0.3.0"}
    assert plans == {"": None, "torch": None} | trainers


def test_people_are_told_whose_words_and_whose_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", scenario(), "--for", "execute"]) == 0
    out = capsys.readouterr().out
    assert "what the executor can run" in " ".join(out.split())
    assert "execute, for which the plan is" in out
    assert run(["search", scenario()]) == 0
    assert "megatron, which is assumed: the scenario names no framework" in capsys.readouterr().out
    assert run(["search", scenario("torch")]) == 0
    out = capsys.readouterr().out
    assert "can say" not in out
    assert "priced as torch " in " ".join(out.split()) + " "


def test_an_unknown_target_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", scenario(), "--for", "deepsped"]) == 2
    assert "met 'deepsped'; nearest: deepspeed" in capsys.readouterr().err


def test_a_model_that_a_trainer_cannot_train_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "resnet-50-8-a100", "--for", "megatron"]) == 2
    message = capsys.readouterr().err
    assert "megatron core 0.16.1 can say no plan of this scenario: model: the model is a decoder transformer" in message


def test_near_misses_name_the_decision_that_is_lacking(capsys: pytest.CaptureFixture[str]) -> None:
    name = scenario(space="{recompute: [selective, full], tensor: [1], pipeline: [1, 2]}")
    assert run(["search", name, "--for", "deepspeed"]) == 3
    message = capsys.readouterr().err
    assert "allow no legal plan that deepspeed 0.19.8 can say" in message
    misses = [line for line in message.split("\n") if "but needs" in line]
    assert len(misses) == 3
    assert "data 4 x tensor 1 x pipeline 1" in misses[0]  # one decision alone is lacking: the fewest
    assert "out of memory with probability" in misses[0] and "but needs recompute selective (" in misses[0]
    assert misses[0].endswith("which deepspeed 0.19.8 cannot say")
    assert run(["search", name, "--for", "deepspeed", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert all(miss["words"] in message and miss["lacks"] for miss in document["near_misses"])


def test_a_plan_for_a_trainer_fits_by_the_conventions_of_that_trainer() -> None:
    scenario = load("llama3-70b-64-h100")
    assert scenario.framework is None
    assert scenario.for_target("torchtitan").problem.training.framework == "torchtitan"
    assert scenario.for_target("execute").problem.training.framework == "execute"
    # torchtitan runs torch's operators one by one unless the scenario says otherwise
    fused = replace(scenario, kernels="fused")
    composed = [each.for_target("torchtitan").problem.training.composed for each in (scenario, fused)]
    assert composed == [ENTRIES["torchtitan"].defaults.composed, ()]
    assert scenario.for_target("deepspeed").problem == scenario.problem  # whose conventions are not known
    stated = replace(scenario, framework="megatron")
    assert stated.for_target("torchtitan").problem == stated.problem


def test_a_winner_for_a_trainer_is_simulated_as_it_was_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, name = tmp_path / "plan.json", "gallery/models/llama3-8b-8-h100"
    assert run(["search", name, "--for", "execute", "--out", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["best"]["evaluation"]
    assert run(["simulate", name, "--plan", str(plan), "--for", "execute", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["step_time"], again["peak_memory"]) == (found["step_time"], found["peak_memory"])
    assert run(["search", name, "--for", ""]) == 2


def test_where_layers_are_is_told_of_stages_and_devices_that_differ() -> None:
    mixed, even = load("gallery/techniques/mixed-devices"), load("gpt3-175b-1024-a100")
    assert mixed.plan is not None and even.plan is not None
    words = describe_division(mixed.problem, mixed.plan)
    assert words == "29 on H100 SXM 80GB, 11 on A100 SXM 80GB, from the first stage on"
    assert describe_division(even.problem, even.plan) is None
