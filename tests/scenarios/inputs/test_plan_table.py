"""Pins in scenarios, and whole plans that cut single operators: strict, and blamed where they stand."""

import json
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.files.errors import ScenarioError

SCENARIO = """\
model:
  transformer: {layers: 2, hidden: 64, heads: 8, ffn: 256, vocab: 128}
training: {global_batch: 8, sequence: 32, precision: fp32}
cluster: {preset: dgx-h100, nodes: 1}
search:
  algorithm: frontier
  space: {tensor: [8]}
"""


def scenario(folder: Path, pins: str = "", text: str = SCENARIO) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text + (f"  pin:\n    {pins}\n" if pins else ""))
    return path


def test_a_pinned_search_finds_a_plan_that_loads_and_simulates(tmp_path: Path) -> None:
    value = load(scenario(tmp_path, "layers.0.up: {hidden: tensor}"))
    best = value.search().best
    assert best is not None
    assert {s.operator: s.cuts for s in best.plan.shardings}["layers.up"] == (("hidden", ("tensor",)),) or {
        s.operator: s.cuts for s in best.plan.shardings
    }["layers.0.up"] == (("hidden", ("tensor",)),)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(best.plan.to_json()))
    loaded = load(scenario(tmp_path), plan)
    assert loaded.plan == best.plan
    assert loaded.simulate().step_time == best.evaluation.step_time


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            "layers.upp: {ffn: tensor}",
            ":9:5: search.pin.layers.upp: pin names an operator of the model, met layers.upp; nearest: layers.up",
        ),
        (
            "layers.up: {fn: tensor}",
            "search.pin.layers.up: of layers.up may be cut: batch, sequence, ffn, hidden, met fn",
        ),
        ("layers.up: 3", "search.pin.layers.up: a pin is a mapping from dim to axis, or a list of axes"),
        ("layers.up: {ffn: 3}", "an axis is a name, a list of names, or null; met"),
        ("layers.qkv: {heads: [data, tensor]}", "search.pin: pins hold on some arrangement of the devices"),
    ],
)
def test_a_wrong_pin_is_blamed_where_it_stands(tmp_path: Path, pins: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        load(scenario(tmp_path, pins))
    assert message in str(error.value)


def test_pins_need_an_algorithm_that_heeds_them(tmp_path: Path) -> None:
    text = SCENARIO.replace("frontier", "exhaustive")
    with pytest.raises(ScenarioError, match=r"pin needs one of the algorithms frontier, .*, met exhaustive"):
        load(scenario(tmp_path, "layers.up: {ffn: tensor}", text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("layers.up", "layers.upp"), "shardings name operators of the model, met layers.upp; nearest: layers.up"),
        (("heads", "head"), "may be cut: batch, sequence, heads, hidden; met head"),
    ],
)
def test_a_plan_of_another_model_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    value = load(scenario(tmp_path, "layers.qkv: {heads: tensor}"))
    best = value.search().best
    assert best is not None
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(best.plan.to_json()).replace(f'"{change[0]}"', f'"{change[1]}"'))
    with pytest.raises(ScenarioError) as error:
        load(scenario(tmp_path), plan)
    assert message in str(error.value)
