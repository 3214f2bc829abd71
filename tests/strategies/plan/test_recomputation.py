"""Recompute of some layers and of some operators: what it costs, and what it gives back."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import TaskKind
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import (
    FirstLayers,
    PerStage,
    Recomputation,
    Recompute,
    SomeOperators,
    recomputation,
)
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import ActionKind

from ..problems import describe_cost, find_block_cost, list_stage_memories, problem
from .test_parallelism import mixture

LAYERS = 8
KINDS = st.sampled_from([Recompute.FULL, Recompute.SELECTIVE])
CUTS = st.sampled_from([Layout(data=2), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)])
ATTENTION = st.sampled_from(["flash", "unfused"])


def plan_of(small: Problem, layout: Layout, how: Recomputation) -> Plan:
    return complete(small, replace(layout, recompute=how))


def step_ticks(small: Problem, plan: Plan) -> int:
    return round(step_time(lower(small, plan)) * 1e12)


@given(st.integers(1, LAYERS), KINDS, ATTENTION)
@settings(max_examples=40, deadline=None)
def test_layers_that_are_alike_lie_evenly_between_none_and_all(count: int, how: Recompute, attention: str) -> None:
    # on one device a step is a sum, so that n of L layers take n / L of the way, in time and in memory
    small = problem(devices=1, batch=2, layers=LAYERS, attention=attention, dropout=True)
    costs = StageCosts(small)
    none, some, every = (plan_of(small, Layout(), kind) for kind in (Recompute.NONE, FirstLayers(how, count), how))
    ticks = [step_ticks(small, plan) for plan in (none, some, every)]
    assert (ticks[1] - ticks[0]) * LAYERS == (ticks[2] - ticks[0]) * count
    kept = [list_stage_memories(costs, plan)[0].kept_bytes for plan in (none, some, every)]
    assert (kept[0] - kept[1]) * LAYERS == (kept[0] - kept[2]) * count
    assert ticks[2] > ticks[0] and kept[2] < kept[0]


@pytest.mark.parametrize(
    ("how", "times", "operators"),
    [
        (Recompute.NONE, 0, 0),
        (Recompute.FULL, LAYERS, 10 * LAYERS),
        (Recompute.SELECTIVE, LAYERS, LAYERS),
        (FirstLayers(Recompute.FULL, 3), 3, 10 * 3),
        (SomeOperators(("activation", "input_norm")), 2 * LAYERS, 2 * LAYERS),
    ],
)
def test_what_runs_again_takes_the_framework_time_where_nothing_is_hidden(
    how: Recomputation, times: int, operators: int
) -> None:
    # a layer of 10 operators, or its attention, runs again together, and operators by name each alone; for each of 2
    # microbatches. What an operator keeps takes two launches of 10 us
    small = problem(devices=1, batch=2, layers=LAYERS)
    ((node, _),) = small.cluster.nodes
    took = []
    for launch in (0.0, 1e-3):
        there = replace(node, accelerator=replace(node.accelerator, launch=1e-5, recompute_launch=launch))
        machine = replace(small, cluster=replace(small.cluster, nodes=((there, 1),)))
        took.append(simulate(lower(machine, plan_of(machine, Layout(microbatch=1), how))))
    more = 2 * (times * 1e-3 + operators * 2 * 1e-5)
    assert took[1].step_time - took[0].step_time == pytest.approx(more)
    again = [each.busy_time(0, [TaskKind.RECOMPUTE]) for each in took]
    assert again[1] - again[0] == pytest.approx(more)


@given(st.integers(1, 4), KINDS, st.sampled_from(["1f1b", "gpipe"]))
@settings(max_examples=20, deadline=None)
def test_every_stage_recomputes_its_own_first_layers(count: int, how: Recompute, schedule: str) -> None:
    small = problem(devices=4, layers=LAYERS, attention="unfused")
    layout = Layout(pipeline=4, schedule=schedule, stages=(4, 2, 1, 1))
    plan, costs = plan_of(small, layout, FirstLayers(how, count)), StageCosts(small)
    none, every = (costs.plan_costs(plan_of(small, layout, kind)).stages for kind in (Recompute.NONE, how))
    for index, layers in enumerate((4, 2, 1, 1)):
        first = 1 if index == 0 else 0  # the embedding comes first
        again = slice(first, first + min(count, layers))
        expected = list(none[index].blocks)
        expected[again] = every[index].blocks[again]
        assert costs.plan_costs(plan).stages[index].blocks == tuple(expected)
    assert PlanMemory(costs).peak(plan) == simulate(lower(small, plan)).peak_memory


def test_every_chunk_recomputes_its_own_first_layers() -> None:
    small = problem(devices=2, layers=LAYERS, batch=4)
    layout = Layout(pipeline=2, schedule="interleaved", chunks=2)
    ticks = [
        [stage.backward_ticks for stage in StageCosts(small).plan_costs(plan_of(small, layout, how)).stages]
        for how in (Recompute.NONE, FirstLayers(Recompute.FULL, 1), Recompute.FULL)
    ]
    assert all(2 * (some - none) == every - none > 0 for none, some, every in zip(*ticks, strict=True))  # 1 layer of 2


def operators(small: Problem) -> tuple[str, ...]:
    """Return the names of a layer's operators."""
    return tuple(operator.name for operator in small.graph.blocks[1].operators)


def same(small: Problem, layout: Layout, first: Recomputation, second: Recomputation) -> bool:
    costs = StageCosts(small)
    plans = [plan_of(small, layout, how) for how in (first, second)]
    stages = [[list(map(describe_cost, stage.blocks)) for stage in costs.plan_costs(plan).stages] for plan in plans]
    memories = [list_stage_memories(costs, plan) for plan in plans]
    return bool(stages[0] == stages[1] and memories[0] == memories[1])


@given(CUTS, ATTENTION)
@settings(max_examples=12, deadline=None)
def test_all_operators_are_full_recompute(layout: Layout, attention: str) -> None:
    small = problem(devices=2, attention=attention, dropout=True)
    assert same(small, layout, SomeOperators(operators(small)), Recompute.FULL)
    assert not same(small, layout, SomeOperators(operators(small)[:-1]), Recompute.FULL)


@given(CUTS, ATTENTION)
@settings(max_examples=12, deadline=None)
def test_selective_recompute_is_the_list_of_its_operators(layout: Layout, attention: str) -> None:
    small = problem(devices=2, attention=attention, dropout=True)
    core = {"flash": ("attention",), "unfused": ("scores", "softmax", "attention_dropout", "context")}
    assert same(small, layout, SomeOperators(core[attention]), Recompute.SELECTIVE)


@pytest.mark.parametrize(
    ("names", "width"),
    [
        (("activation",), 256),  # what the activation function makes, [32, ffn]
        (("input_norm",), 64),  # what the norm makes, [32, hidden]
        (("input_norm", "feed_forward_norm", "activation"), 64 + 64 + 256),
        (("up", "activation"), 2 * 256),  # and its input too, made again from what `up` keeps
        (("attention",), 8),  # the sums of exponentials of 8 heads; the projection keeps the context, its input
        (("attention_residual",), 0),  # its output goes, but the projection's comes to stay
        (("down",), 0),  # nobody reads what it makes
    ],
)
def test_outputs_of_recomputed_operators_are_given_back(names: tuple[str, ...], width: int) -> None:
    small = problem(devices=1, layers=LAYERS)
    costs = StageCosts(small)
    plain, some = (
        list_stage_memories(costs, plan_of(small, Layout(), how))[0] for how in (Recompute.NONE, SomeOperators(names))
    )
    assert plain.kept_bytes - some.kept_bytes == LAYERS * 32 * width * 4  # tokens, and bytes of fp32


@pytest.mark.parametrize(
    ("sequence_parallel", "names", "again"),
    [
        (False, ("attention_residual",), []),  # the sum of what the projection made stays
        (False, ("projection", "attention_residual"), ["all_reduce projected"]),
        (True, ("input_norm",), []),  # nothing gathered is needed to run the norm again
        (True, ("qkv",), ["all_gather input_norm_out"]),  # kept cut along the sequence
        (True, ("attention",), []),
        (True, ("down", "feed_forward_residual"), ["reduce_scatter narrow"]),
    ],
)
def test_collectives_run_again_where_what_they_make_is_needed_and_gone(
    sequence_parallel: bool, names: tuple[str, ...], again: list[str]
) -> None:
    small = problem(devices=2)
    plan = plan_of(small, Layout(tensor=2, sequence_parallel=sequence_parallel), SomeOperators(names))
    backward = [step for step, _ in StageCosts(small).plan_costs(plan).stages[0].blocks[1].passes.backward.segments]
    repeated = backward[: len(names) + len(again)]
    assert [step.label for step in repeated if step.kind.communicates] == again
    assert [step.label for step in repeated if step.kind is TaskKind.RECOMPUTE] == list(names)
    assert not any(step.kind is TaskKind.RECOMPUTE for step in backward[len(repeated) :])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_layers_are_counted_over_layers_of_different_blocks(count: int) -> None:
    # DeepSeek's first layer has no experts, and is a layer as the three behind it
    base = mixture(devices=1)
    experts = Experts(8, 2, 32, dense_layers=1)
    spec = Transformer(4, 64, 8, 8, 256, 128, ffn_kind="swiglu", positions="rotary", experts=experts)
    small = replace(base, graph=build(spec, 32, "fp32"))
    kinds = (Recompute.NONE, FirstLayers(Recompute.FULL, count), Recompute.FULL)
    rows = [StageCosts(small).plan_costs(plan_of(small, Layout(), how)).stages[0].blocks for how in kinds]
    none, some, every = (list(map(describe_cost, blocks)) for blocks in rows)
    assert some == [none[0], *every[1 : 1 + count], *none[1 + count :]]
    assert len({block.forward_ticks for block in rows[0][1:5]}) == 2
    (broken,) = violations(small, Layout(recompute=FirstLayers(Recompute.FULL, 5)))
    assert "at most 4 layers" in broken.message


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_every_stage_of_a_v_recomputes_with_the_gradients_of_inputs(schedule: str) -> None:
    small = problem(devices=2, layers=LAYERS)
    layout = Layout(pipeline=2, chunks=2, schedule=schedule)
    costs = StageCosts(small)
    none, some = (
        costs.plan_costs(plan_of(small, layout, how)).stages for how in (Recompute.NONE, FirstLayers(Recompute.FULL, 1))
    )
    for index, (before, after) in enumerate(zip(none, some, strict=True)):
        first = 1 if index == 0 else 0
        both = zip(before.blocks, after.blocks, strict=True)
        extra = [
            two.passes.select(ActionKind.INPUT).ticks - one.passes.select(ActionKind.INPUT).ticks for one, two in both
        ]
        assert extra == [block.forward_ticks if at == first else 0 for at, block in enumerate(before.blocks)]
    plan = plan_of(small, layout, FirstLayers(Recompute.FULL, 1))
    assert PlanMemory(costs).peak(plan) == max(each.peak for each in simulate(lower(small, plan)).memory)


@pytest.mark.parametrize("how", [Recompute.SELECTIVE, SomeOperators(("attention",))])
def test_keys_go_round_again_for_attention_that_runs_again(how: Recomputation) -> None:
    small = problem(devices=4)
    layout = Layout(context=4, attention=Attention.RING)
    none, some = (
        StageCosts(small).plan_costs(plan_of(small, layout, kind)).stages[0].blocks[1] for kind in (Recompute.NONE, how)
    )
    first, second = (block.passes.backward.segments for block in (none, some))
    assert [step.label for step, _ in second[: len(second) - len(first)]] == 3 * [
        "shift keys and values",
        "attention",
    ] + ["attention"]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_recomputed_plans_hold_and_take_what_they_are_said_to(data: st.DataObject) -> None:
    small = mixture(devices=4, batch=8)
    names = [operator.name for block in small.graph.blocks if block.layer for operator in block.operators]
    some = st.builds(SomeOperators, st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple))
    layout = data.draw(st.sampled_from([
        Layout(data=4, expert=4), Layout(data=2, expert=2, tensor=2, sequence_parallel=True),
        Layout(data=2, context=2), Layout(data=2, expert=2, pipeline=2, schedule="zb1p"),
    ]))  # fmt: skip
    plan = plan_of(small, layout, data.draw(some | st.just(FirstLayers(Recompute.FULL, 1))))
    costs = StageCosts(small)
    folded, unfolded = (simulate(lower(small, plan, costs=costs, folded=how)) for how in (True, False))
    assert folded.step_time == pytest.approx(unfolded.step_time, rel=1e-6)
    assert PlanMemory(costs).peak(plan) == max(each.peak for each in unfolded.memory)
    longest = round(step_time(lower(small, plan, costs=costs), "longest_path") * 1e12)
    assert SimulatedCost(small).list_path_ticks([plan]) == [longest]


@pytest.mark.parametrize(
    ("document", "value", "text"),
    [
        ("full", Recompute.FULL, "full"),
        ({"full": 12}, FirstLayers(Recompute.FULL, 12), "full (12 layers a stage)"),
        ({"selective": 3}, FirstLayers(Recompute.SELECTIVE, 3), "selective (3 layers a stage)"),
        ({"operators": ["up", "activation"]}, SomeOperators(("up", "activation")), "up + activation"),
        ({"operators": ["up/2", "activation"]}, SomeOperators(("up/2", "activation")), "up/2 + activation"),
    ],
)
def test_a_recomputation_reads_and_writes_as_it_is_typed(document: Any, value: Recomputation, text: str) -> None:
    assert recomputation(document) == value
    assert value.document == document
    assert str(value) == text


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("ful", "met 'ful'; nearest: full"),
        ({"full": 0}, "at least 1 of them, met 0; nearest: none"),
        ({"full": True}, "met {'full': True}"),
        ({"none": 3}, "met {'none': 3}"),
        ({"full": 1, "selective": 2}, "met {'full': 1, 'selective': 2}"),
        ({"operators": []}, "names at least one, met none"),
        ({"operators": ["up", "up"]}, "names each operator once, met up twice"),
        ({"operators": ["up", "up/2"]}, "names each operator once, met up twice"),
        (None, "met None"),
    ],
)
def test_what_is_no_recomputation_says_so(document: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        recomputation(document)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (SomeOperators(("attentoin",)), "met attentoin; nearest: attention"),
        (SomeOperators(("upp/2",)), "met upp/2; nearest: up"),
        (
            SomeOperators(("activation/2",)),
            "half of a result is computed again (/2) of products: qkv, projection, up, down",
        ),
        (FirstLayers(Recompute.FULL, 5), "a stage has at most 4 layers to recompute, met 5; nearest: 4"),
    ],
)
def test_a_layout_refuses_what_its_model_does_not_have(how: Recomputation, message: str) -> None:
    (broken,) = violations(problem(devices=4), Layout(pipeline=4, stages=(4, 2, 1, 1), recompute=how))
    assert broken.field == "recompute" and message in broken.message


@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from(["embedding", "layers", "head"]), st.integers(1, 4))))
def test_layers_are_counted_over_all_runs_of_a_stage(count: int, runs: list[tuple[str, int]]) -> None:
    small = problem(devices=1, layers=9)
    plan = plan_of(small, Layout(), FirstLayers(Recompute.FULL, count))
    costs = StageCosts(small)
    found = costs.blocks.list_runs(costs.find_keys(plan).cut, tuple(runs), FirstLayers(Recompute.FULL, count))
    assert [name for name, n, _ in found for _ in range(n)] == [name for name, n in runs for _ in range(n)]
    again = [how is Recompute.FULL for name, n, how in found if name == "layers" for _ in range(n)]
    assert again == [index < count for index in range(len(again))]
    assert all(how is Recompute.NONE for name, _, how in found if name != "layers")


@given(CUTS, st.booleans())
@settings(max_examples=10, deadline=None)
def test_what_backward_does_not_read_is_run_again_by_some_frameworks_only(layout: Layout, mixed: bool) -> None:
    # jax leaves out the last product of a layer and the sum behind it: of experts the combination of their results
    small = mixture(batch=16) if mixed else problem()
    found = []
    for framework in ("xla", "mindspore"):
        training = replace(small.training, framework=framework)
        costs = StageCosts(replace(small, training=training))
        plan = plan_of(costs.problem, replace(layout, data=8 // layout.tensor), Recompute.FULL)
        steps = find_block_cost(costs, plan, "layers").work.segments
        again = {step.label for step in steps.backward if step.kind is TaskKind.RECOMPUTE}
        forward = {step.label for step in steps.forward if step.kind is TaskKind.FORWARD}
        found.append(forward - again)
    assert found == [{"combine", "feed_forward_residual"} if mixed else {"down", "feed_forward_residual"}, set()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("how", [*Recompute, FirstLayers(Recompute.FULL, 1), SomeOperators(("qkv",))])
def test_stages_that_say_the_same_are_the_uniform_plan(schedule: str, how: Recomputation) -> None:
    small = problem(devices=4, layers=8)
    layout = Layout(pipeline=2, data=2, schedule=schedule, chunks=2 if schedule == "interleaved" else 1, zero=1)
    stages = layout.pipeline * layout.chunks
    uniform, each = (plan_of(small, layout, way) for way in (how, PerStage((how,) * stages)))
    times = [simulate(lower(small, plan)) for plan in (uniform, each)]
    assert times[0].spans == times[1].spans
    assert times[0].memory == times[1].memory


def test_a_stage_takes_what_it_recomputes_and_no_other_does() -> None:
    # every stage costs, in every pass, what it costs in the plan whose stages all do what this one does
    small = problem(devices=4, layers=8)
    ways = (Recompute.NONE, Recompute.FULL, FirstLayers(Recompute.FULL, 1), Recompute.SELECTIVE)
    costs = StageCosts(small)
    mixed = plan_of(small, Layout(pipeline=4), PerStage(ways))
    for stage, how in enumerate(ways):
        alone = plan_of(small, Layout(pipeline=4), how)
        assert costs.plan_costs(mixed).stages[stage] == costs.plan_costs(alone).stages[stage]
        assert list_stage_memories(costs, mixed)[stage] == list_stage_memories(costs, alone)[stage]
        for peak in (costs, StageCosts(small)):
            profiles = [simulate(lower(small, plan, costs=peak)).memory[stage].peak for plan in (mixed, alone)]
            assert profiles[0] == profiles[1]


def test_a_list_says_one_recomputation_a_stage_and_comes_back() -> None:
    document = ["full", {"full": 6}, "none", {"operators": ["qkv"]}]
    found = recomputation(document)
    assert found == PerStage((Recompute.FULL, FirstLayers(Recompute.FULL, 6), Recompute.NONE, SomeOperators(("qkv",))))
    assert found.document == document
    assert str(found) == "full on 1 stage, full (6 layers a stage) on 1 stage, none on 1 stage, qkv on 1 stage"
    small = problem(devices=4, layers=8)
    plan = plan_of(small, Layout(pipeline=4), PerStage((Recompute.FULL, *(Recompute.NONE,) * 3)))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Recompute.FULL,) * 3, "recompute of a list has one a stage, of 4 in all, met 3"),
        ((*(Recompute.NONE,) * 3, FirstLayers(Recompute.FULL, 3)), "stage 3 has 2 layers to recompute, met 3"),
        ((SomeOperators(("qkw",)), *(Recompute.NONE,) * 3), "met qkw; nearest: qkv"),
    ],
)
def test_a_layout_refuses_stages_that_do_not_match(stages: tuple[Any, ...], message: str) -> None:
    (broken,) = violations(problem(devices=4, layers=8), Layout(pipeline=4, recompute=PerStage(stages)))
    assert broken.field == "recompute" and message in broken.message


@pytest.mark.parametrize("document", [[], [["full"]], ["full", 3]])
def test_a_list_of_something_else_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"^recompute (of stages says something|is one of none, selective, full)"):
        recomputation(document)
