import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.fitting import nearest_that_fits, reason
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.schema.plan import PlanDocument, PlanTable
from meshwise.scenarios.simulation import simulation
from meshwise.strategies.plan.completion import complete, layout_of
from meshwise.strategies.plan.layout import STEP_DECISIONS, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search import Space


@pytest.fixture(scope="module")
def small() -> Scenario:
    return load("local/dp2-tp2-pp2")


def test_the_schema_has_every_field_of_layout_and_plan() -> None:
    assert set(PlanTable.model_fields) == {field.name for field in fields(Layout)}
    keys = {item.name: item.key for item in STEP_DECISIONS}
    assert set(PlanDocument.model_fields) - {"version"} == {keys.get(field.name, field.name) for field in fields(Plan)}


def test_the_defaults_of_the_schema_are_those_of_layout() -> None:
    defaults = {name: info.default for name, info in PlanTable.model_fields.items()}
    assert {field.name: field.default for field in fields(Layout)} == {f.name: defaults[f.name] for f in fields(Layout)}


def test_figures_of_a_simulation_agree_with_each_other(small: Scenario) -> None:
    result = small.simulate()
    training, cluster = small.problem.training, small.problem.cluster
    assert result.tokens_per_second * result.step_time == pytest.approx(training.global_batch * training.sequence)
    assert result.tokens_per_second_per_device * 8 == pytest.approx(result.tokens_per_second)
    # three times the forward FLOP of every sequence, over the time of eight devices
    flops = 3 * small.problem.graph.flops * 16
    assert result.model_flops_per_second_per_device == pytest.approx(flops / 8 / result.step_time)
    assert result.mfu == pytest.approx(result.model_flops_per_second_per_device / cluster.accelerator.peak("fp32"))
    assert result.ranks == 8
    assert result.peak_memory == max(row.peak for row in result.memory)
    for row in result.memory:
        assert row.parameters + row.gradients + row.optimizer + row.activations + row.buffers == row.peak
    assert sorted(stage for row in result.memory for stage in row.stages) == [0, 1]


def test_recomputation_is_not_counted_as_model_flops() -> None:
    scenario = load("local/pp2-recompute")
    plain = simulation(scenario.problem, replace(scenario.chosen(), recompute=Recompute.NONE), "discrete_event", ())
    again = scenario.simulate()
    assert again.step_time > plain.step_time
    ratio = plain.step_time / again.step_time
    assert again.model_flops_per_second_per_device == pytest.approx(plain.model_flops_per_second_per_device * ratio)


def test_assumptions_name_what_was_left_out_and_nothing_else() -> None:
    lines = load("local/dp2").assumptions
    assert "plan.zero is 0 (default)" in lines
    assert "model.transformer.kv_heads is 4 (default)" in lines
    assert "training.gradient_precision is same (default)" in lines
    assert "training.gradient_clipping is false (default)" in lines
    assert not any(
        line.startswith(
            ("plan.data", "training.precision", "training.optimizer", "model.transformer.layers", "plan.context")
        )
        for line in lines
    )
    assert any(
        line.startswith("model.preset gpt3-175b means layers 96") for line in load("gpt3-175b-1024-a100").assumptions
    )


@pytest.mark.parametrize(
    "name", ["local/dp2-tp2-pp2", "local/pp2-interleaved", "megatron/gpt-145b-1536-a100", "tensor-parallel-2.5d"]
)
def test_a_plan_document_is_read_back_as_the_plan(name: str, tmp_path) -> None:
    plan = load(name).chosen()
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert load(name, tmp_path / "plan.json").plan == plan
    inside = {**json.loads(json.dumps(_data(name))), "plan": plan.to_json()}
    (tmp_path / "whole.json").write_text(json.dumps(inside))
    assert load(tmp_path / "whole.json").plan == plan


def _data(name: str) -> dict[str, object]:
    from meshwise.scenarios.files.library import find
    from meshwise.scenarios.files.reader import read

    data: dict[str, object] = read(find(name)).data
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
    document = load("local/dp2-tp2-pp2").chosen().to_json() | change
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
    layout = layout_of(scenario.problem, scenario.chosen())
    assert list(violations(scenario.problem, layout)) == []
    assert complete(scenario.problem, layout) == scenario.plan


def test_a_plan_that_shares_states_in_groups_is_read_back(tmp_path) -> None:
    scenario = load("local/dp2-tp2-pp2")
    layout = Layout(data=4, pipeline=2, zero=3, zero_shards=2, reshard_after_forward=False)
    plan = complete(scenario.problem, layout)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert load("local/dp2-tp2-pp2", tmp_path / "plan.json").plan == plan
    assert complete(scenario.problem, layout_of(scenario.problem, plan)) == plan
    old = {key: value for key, value in scenario.chosen().to_json().items() if key != "reshard_after_forward"}
    assert Plan.from_json(old) == scenario.chosen()


@pytest.mark.parametrize(
    ("zero", "named"), [(0, ()), (1, ("zero_shards",)), (3, ("zero_shards", "reshard_after_forward"))]
)
def test_assumptions_name_what_matters_at_a_zero_stage(zero: int, named: tuple[str, ...], tmp_path) -> None:
    (tmp_path / "plan.yaml").write_text(f"{{data: 4, pipeline: 2, zero: {zero}}}\n")
    lines = load("local/dp2-tp2-pp2", tmp_path / "plan.yaml").assumptions
    every = ("zero_shards", "reshard_after_forward")
    assert tuple(name for name in every if any(line.startswith(f"plan.{name} ") for line in lines)) == named


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, []),
        ({"sequence_parallel": True}, ["plan.overlap_tensor is false (default)"]),
        ({"sequence_parallel": True, "overlap_tensor": True}, ["chunks of a product beside tensor communication"]),
    ],
)
def test_assumptions_speak_of_overlap_where_there_is_something_to_overlap(
    fields: dict[str, bool], found: list[str], tmp_path
) -> None:
    (tmp_path / "plan.yaml").write_text(json.dumps({"data": 2, "tensor": 2, "pipeline": 2} | fields))
    lines = load("local/dp2-tp2-pp2", tmp_path / "plan.yaml").assumptions
    met = [line for line in lines if line.startswith(("plan.overlap_tensor ", "chunks of a product"))]
    assert len(met) == len(found) and all(line.startswith(start) for line, start in zip(met, found, strict=True))


def cramped(scenario: Scenario, memory: float) -> Problem:
    """Return the scenario's problem on devices of ``memory`` bytes."""
    problem = scenario.problem
    device = replace(problem.cluster.accelerator, memory=memory)
    nodes = tuple((replace(node, accelerator=device), count) for node, count in problem.cluster.nodes)
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


def test_the_nearest_plan_that_fits_is_one_decision_away_where_one_is_enough() -> None:
    scenario = load("local/dp2")
    roomy = scenario.simulate()
    problem = cramped(scenario, roomy.peak_memory - 1)
    tight = simulation(problem, scenario.chosen(), "discrete_event", ())
    assert not tight.fits
    near = nearest_that_fits(problem, scenario.chosen())
    assert near is not None
    assert simulation(problem, near, "discrete_event", ()).fits
    assert near != scenario.plan
    assert "the plan does not fit: stage 0 needs" in reason(problem, tight.plan)


def test_the_nearest_plan_that_fits_still_overlaps_tensor_communication() -> None:
    # one of the plans looked at has no sequence parallelism, and so nothing to overlap
    scenario = load("local/tp2-sequence")
    plan = replace(scenario.chosen(), overlap_tensor=True)
    near = nearest_that_fits(cramped(scenario, 0.9 * scenario.simulate().peak_memory), plan)
    assert near == replace(plan, recompute=SomeOperators(("activation",)))  # the least that fits, one decision away


@pytest.mark.parametrize("part", [0.95, 0.5, 0.1])
def test_no_plan_near_one_breaks_a_rule_though_schedules_that_split_backward_overlap_nothing(part: float) -> None:
    scenario = load("local/dp2-tp2-pp2")
    changed = {"sequence_parallel": True, "overlap_tensor": True}
    plan = complete(scenario.problem, replace(layout_of(scenario.problem, scenario.chosen()), **changed))
    problem = cramped(scenario, part * simulation(scenario.problem, plan, "discrete_event", ()).peak_memory)
    near = nearest_that_fits(problem, plan)
    assert near is None or simulation(problem, near, "discrete_event", ()).fits
    assert near is None or not list(violations(problem, layout_of(problem, near)))


def test_the_nearest_plan_that_fits_is_one_that_a_trainer_can_say() -> None:
    scenario = load("local/dp2").for_target("torchtitan")
    problem, plan = cramped(scenario, 0.5 * scenario.simulate().peak_memory), scenario.chosen()
    anything, accepts = nearest_that_fits(problem, plan), scenario.make_space().accepts
    near = nearest_that_fits(problem, plan, accepts)
    assert accepts is not None and near is not None and anything is not None
    assert accepts.refusals(problem, anything) and not accepts.refusals(problem, near)
    assert simulation(problem, near, "discrete_event", ()).fits


def test_the_nearest_plan_may_be_the_same_with_states_over_all_data_ranks() -> None:
    """ZeRO-3 over pairs of ranks keeps half of the states on each, over all four a quarter."""
    scenario = load("local/dp2-tp2-pp2")
    problem = scenario.problem
    pairs = complete(problem, Layout(data=8, microbatch=1, zero=3, zero_shards=2))
    every = complete(problem, Layout(data=8, microbatch=1, zero=3))
    needs = simulation(problem, every, "discrete_event", ()).peak_memory
    near = nearest_that_fits(cramped(scenario, 1.05 * needs), pairs)
    assert near == every


def test_where_nothing_fits_there_is_no_nearest_plan() -> None:
    scenario = load("local/dp2")
    assert nearest_that_fits(cramped(scenario, 1e5), scenario.chosen()) is None


def test_search_returns_a_proven_plan_and_compare_all_algorithms() -> None:
    pytest.importorskip("torch", reason="one of all is reinforcement learning")
    from meshwise.strategies.search import ALGORITHMS

    scenario = load("local/dp2")
    found = scenario.search("exhaustive")
    assert found.gap == 0
    assert found.best is not None
    assert found.best.evaluation.step_time <= scenario.simulate().step_time
    results = scenario.compare(budget=3)
    assert [result.algorithm for result in results] == list(ALGORITHMS)
    assert all(result.evaluations <= 3 for result in results)


def test_limits_of_the_space_hold() -> None:
    scenario = load("local/dp2")
    settings = replace(scenario.search_settings, space=(("tensor", (2,)), ("recompute", ("full",))))
    found = replace(scenario, search_settings=settings).search("exhaustive")
    assert found.best is not None
    assert found.best.plan.tensor == 2
    assert found.best.plan.recompute is Recompute.FULL


def test_a_space_is_the_word_wide_or_limits_of_any_field(tmp_path: Path) -> None:
    from meshwise.strategies.plan.offloading import Offloading
    from meshwise.strategies.plan.recomputation import FirstLayers

    given = (Path(__file__).parents[2] / "scenarios/local/dp2.yaml").read_text().split("\nsearch:")[0]
    (tmp_path / "wide.yaml").write_text(given + "search: {space: wide}\n")
    assert load(tmp_path / "wide.yaml").search_settings.make_space() == Space(wide=True)
    limits = (
        "{stages: [paced], recompute: [none, {full: 2}], offload: [[], [optimizer]], order: [[data, pipeline, tensor]]}"
    )
    (tmp_path / "limits.yaml").write_text(given + f"search: {{space: {limits}}}\n")
    assert load(tmp_path / "limits.yaml").search_settings.make_space() == Space(
        stages=("paced",),
        recompute=(Recompute.NONE, FirstLayers(Recompute.FULL, 2)),
        offload=(Offloading(), Offloading(optimizer=(1.0,))),
        order=(("data", "pipeline", "tensor"),),
    )
