"""Plans in files are read back as the plans that they are, or refused at their field."""

import json

import pytest

from meshwise import load
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.rules import violations


@pytest.mark.parametrize(
    "name", ["local/dp2-tp2-pp2", "local/pp2-interleaved", "megatron/gpt-145b-1536-a100", "tensor-parallel-2.5d"]
)
def test_a_plan_document_is_read_back_as_the_plan(name: str, tmp_path) -> None:
    plan = load(name).choose_plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert load(name, tmp_path / "plan.json").plan == plan
    inside = {**json.loads(json.dumps(_data(name))), "plan": plan.to_json()}
    (tmp_path / "whole.json").write_text(json.dumps(inside))
    assert load(tmp_path / "whole.json").plan == plan


def _data(name: str) -> dict[str, object]:
    from meshwise.scenarios.files.library import find_scenario
    from meshwise.scenarios.files.reader import read_document

    data: dict[str, object] = read_document(find_scenario(name)).data
    return data


def test_a_plan_section_is_a_plan_file_too(tmp_path) -> None:
    (tmp_path / "plan.yaml").write_text("data: 1\ntensor: 2\nmicrobatch: 16\n")
    assert load("local/dp2", tmp_path / "plan.yaml").plan == load("local/tp2").plan


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_microbatches": 5}, "num_microbatches"),
        ({"shardings": []}, "shardings"),
        ({"stages": [{"blocks": ["embedding"]}, {"blocks": []}]}, "stages"),
        ({"mesh": {"axes": [["pipeline", 2], ["data", 4], ["tensor", 2]]}}, "mesh"),
        ({"version": 2}, "version"),
        ({"zero": 4}, "zero"),
        ({"reshard_after_forward": False}, "reshard_after_forward"),
        ({"mesh": {"axes": [["pipeline", 2], ["replica", 2], ["data", 1], ["tensor", 2]]}}, "mesh"),
        ({"schedule_name": "gpip"}, "schedule_name"),
    ],
)
def test_a_plan_of_another_problem_is_refused_at_its_field(change: dict[str, object], field: str, tmp_path) -> None:
    document = load("local/dp2-tp2-pp2").choose_plan().to_json() | change
    (tmp_path / "plan.json").write_text(json.dumps(document, indent=1))
    with pytest.raises(ScenarioError) as caught:
        load("local/dp2-tp2-pp2", tmp_path / "plan.json")
    fault = caught.value.faults[0]
    line = (tmp_path / "plan.json").read_text().splitlines()[fault.line - 1]
    assert fault.field.split(".")[0] == field
    assert line.strip().startswith(f'"{field}"')


@pytest.mark.parametrize(
    "name",
    [
        "local/dp2-tp2-pp2",
        "local/pp2-interleaved",
        "korthikanti/530b-280-a100-full",
        "tensor-parallel-2d",
        "gpt3-175b-512-h100",
    ],
)
def test_the_layout_of_a_plan_completes_to_the_plan(name: str) -> None:
    scenario = load(name)
    layout = recover_layout(scenario.problem, scenario.choose_plan())
    assert list(violations(scenario.problem, layout)) == []
    assert complete(scenario.problem, layout) == scenario.plan


def test_a_plan_that_shares_states_in_groups_is_read_back(tmp_path) -> None:
    scenario = load("local/dp2-tp2-pp2")
    layout = Layout(data=4, pipeline=2, zero=3, zero_shards=2, reshard_after_forward=False)
    plan = complete(scenario.problem, layout)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert load("local/dp2-tp2-pp2", tmp_path / "plan.json").plan == plan
    assert complete(scenario.problem, recover_layout(scenario.problem, plan)) == plan
    old = {key: value for key, value in scenario.choose_plan().to_json().items() if key != "reshard_after_forward"}
    assert Plan.from_json(old) == scenario.choose_plan()


@pytest.mark.parametrize(("model", "sequence"), [("resnet-50", 1), ("vit-b-16", 197), ("gpt3-13b", None)])
def test_samples_of_one_size_have_their_own_sequence(model: str, sequence: int | None, tmp_path) -> None:
    # an image of 224 pixels has (224 / 16)^2 = 196 patches, and a token of its class
    path = tmp_path / "scenario.yaml"
    text = f"model: {{preset: {model}}}\ncluster: {{preset: dgx-h100, nodes: 1}}\ntraining: {{global_batch: 8}}\n"
    path.write_text(text)
    if sequence is None:
        with pytest.raises(ScenarioError, match=r"scenario.yaml:3:1: training.sequence: this field is required"):
            load(path)
    else:
        path.write_text(text.replace("global_batch: 8", f"global_batch: 8, sequence: {sequence}"))
        stated = load(path).problem
        path.write_text(text)
        assert load(path).problem == stated and stated.training.sequence == sequence
