"""Published recipes: every record is legal and sourced, its plan is what it says, and others' problems can have it."""

import json
from math import prod
from typing import Any

import pytest

from meshwise.scenarios import recipes as module
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.library import find_root
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.inputs.plan_table import list_rule_violations
from meshwise.scenarios.loader import load
from meshwise.scenarios.recipes import FILE, Recipe, carry_over, list_recipe_layouts, load_recipes, read_recipes
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.plan.layout import Layout

from ..pace import least_cpu
from ..studies.recipe_comparison import load_recipe

RECORDS: list[dict[str, Any]] = json.loads((find_root() / FILE).read_text("utf-8"))
AXES = ("data", "tensor", "pipeline", "context")
PROBLEMS = ("llama3-405b-16384-h100", "mixtral-8x7b-64-h100", "resnet-50-8-a100", "llama2-13b-64-tpu-v4")


def of(record: dict[str, Any]) -> Recipe:
    return next(recipe for recipe in load_recipes() if recipe.name == record["name"])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_a_recipe_is_a_scenario_whose_plan_is_what_the_record_says(record: dict[str, Any]) -> None:
    recipe = of(record)
    scenario = load_recipe(recipe)
    stated, plan = record["plan"], scenario.plan
    assert plan is not None
    assert not list_rule_violations(scenario.problem, recipe.layout)
    assert prod(stated.get(axis, 1) for axis in AXES) == scenario.problem.cluster.num_devices
    layout = recover_layout(scenario.problem, plan)
    for name in {*AXES, "microbatch", "schedule", "chunks", "zero", "sequence_parallel", "expert"} & stated.keys():
        assert getattr(layout, name) == stated[name], name
    # a step's sequences are those of its microbatches
    assert plan.num_microbatches * stated.get("microbatch", 1) * stated["data"] == record["training"]["global_batch"]
    if "step_time" in record.get("measured", {}):
        assert scenario.measured is not None
        assert f"{scenario.measured.step_time:g} s" == record["measured"]["step_time"]
    if "device_memory" in record:
        size = float(record["device_memory"].removesuffix(" GiB"))
        assert scenario.problem.cluster.accelerator.memory == size * 2**30


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_a_recipe_says_where_it_stands(record: dict[str, Any]) -> None:
    assert set(record["source"]) == {"publisher", "document", "version", "locator"}
    assert all(text.strip() == text and len(text) > 1 for text in record["source"].values())


def test_a_published_rate_is_a_published_time() -> None:
    # 1,024 sequences of 4,096 tokens on 512 devices at 1,000 tokens a second of each: 8.192 s
    problem = load("llama3-8b-8-h100").problem
    tokens = problem.training.global_batch * problem.training.sequence
    published = module.PublishedTable(tokens_per_second=1000.0)
    assert published.find_step_time(problem) == tokens / (1000.0 * 8)
    assert module.PublishedTable(step_time="2.5 s").find_step_time(problem) == 2.5


def test_the_table_is_read_in_little_time() -> None:
    def load_anew() -> None:
        module.load_recipes.cache_clear()
        module._records.cache_clear()
        load_recipes()

    assert least_cpu(load_anew, 0.25) < 0.25


def test_a_wrong_record_is_an_error_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (find_root() / FILE).read_text("utf-8").replace('"tensor": 8', '"tensr": 8', 1)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "tensr" in each)
    with pytest.raises(ScenarioError, match=rf"^{FILE}:{line}:\d+: plan.tensr: there is no such field.*tensor"):
        read_recipes(json.loads(text), lambda: parse_document(text.encode(), FILE))


def test_an_illegal_plan_is_an_error_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (find_root() / FILE).read_text("utf-8").replace('"tensor": 8', '"tensor": 7', 1)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if '"tensor": 7' in each)
    records = json.loads(text)
    position = next(number for number, each in enumerate(records) if each["plan"].get("tensor") == 7)
    monkeypatch.setattr(module, "_records", lambda: records)
    monkeypatch.setattr(module, "_placed", lambda: parse_document(text.encode(), FILE))
    with pytest.raises(ScenarioError, match=rf"^{FILE}:{line}:\d+: plan"):
        load_recipe(read_recipes(records, lambda: parse_document(text.encode(), FILE))[position])


@pytest.mark.parametrize("name", PROBLEMS)
def test_plans_carried_over_are_legal_and_each_is_there_once(name: str) -> None:
    problem = load(name).problem
    found = list_recipe_layouts(problem)
    assert found
    assert len({layout for _, layout in found}) == len(found)
    for recipe, layout in found:
        assert not list_rule_violations(problem, layout), recipe
        ranks = layout.data * layout.tensor * layout.pipeline * layout.context
        assert ranks == problem.cluster.num_devices


def test_listing_the_plans_for_many_devices_takes_little_time() -> None:
    problem = load("llama3-405b-16384-h100").problem
    load_recipes()
    assert least_cpu(lambda: list_recipe_layouts(problem), 0.3) < 0.3


@pytest.mark.parametrize("recipe", load_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_carried_over_to_its_own_problem_is_itself(recipe: Recipe) -> None:
    problem = load_recipe(recipe).problem
    assert carry_over(problem, recipe.layout) == recipe.layout


def test_what_another_model_cannot_have_is_the_nearest_that_it_can() -> None:
    problem = load("llama3-8b-8-h100").problem  # 32 layers, no experts, 8 devices
    layers = Layout(data=16, tensor=2, pipeline=2, stages=(41, 39), expert=8, zero=1, zero_shards=4)
    moved = carry_over(problem, layers)
    assert moved == Layout(data=2, tensor=2, pipeline=2, stages="even", expert=1, zero=1, zero_shards=0)
    assert carry_over(problem, Layout(data=1, tensor=3)) is None  # 3 does not divide 8
    looped = Layout(data=1, pipeline=8, schedule="interleaved", chunks=5)  # 40 stages for 32 layers
    assert carry_over(problem, looped) == Layout(data=1, pipeline=8)


def test_the_guide_says_how_many_there_are() -> None:
    guide = (find_root().parent / "docs" / "guides" / "compare.md").read_text("utf-8")
    assert f"has {len(load_recipes())} published training recipes" in guide
