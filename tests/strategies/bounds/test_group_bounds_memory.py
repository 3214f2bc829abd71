"""What a group holds at least is what its members hold at the moments that it looks at, to the byte on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.experts import Experts
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.memory import StageMemory, stage_memory
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout, StepDecisions
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import Action, ActionKind

from ..problems import find_choice, list_stage_memories, problem

PLAIN = StepDecisions(zero=0)
PASSES = (
    StepDecisions(recompute=Recompute.NONE),
    StepDecisions(recompute=Recompute.FULL),
    StepDecisions(recompute=FirstLayers(Recompute.FULL, 1)),
    StepDecisions(recompute=FirstLayers(Recompute.SELECTIVE, 2)),
    StepDecisions(recompute=SomeOperators(("qkv", "projection"))),
)
ENDS = {ActionKind.BACKWARD, ActionKind.INPUT}
WRITTEN = "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4 0F5 0B5"
SPLIT = "0F0 0I0 0W0 0F1 0F2 0I1 0I2 0W1 0W2 0F3 0I3 0W3 0F4 0I4 0W4 0F5 0I5 0W5"
ON_BOTH = "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1 \n 2F0 2B0 2F1 2B1"


def small(layout: Layout, *, framework: str = "megatron", optimizer: str = "adamw", **changes: object) -> Problem:
    """Return a problem with a device a rank, each pipeline position on nodes of its own."""
    sizes = {"layers": 7, "batch": 12} | changes
    found = problem(nodes=layout.pipeline, devices=layout.data * layout.tensor, **sizes)  # type: ignore[arg-type]
    return replace(found, training=replace(found.training, framework=framework, optimizer=optimizer))


def with_memory(cluster: Cluster, memory: Sequence[float]) -> Cluster:
    """Return the cluster whose nodes have devices of so much memory each."""
    nodes = (
        replace(cluster.first_node, accelerator=replace(cluster.first_node.accelerator, memory=each)) for each in memory
    )
    return replace(cluster, nodes=tuple((node, 1) for node in nodes))


def fits(case: Problem, group: Group, memory: Sequence[float]) -> bool:
    """Return whether the only member of a group may fit where positions have so much memory."""
    costs = SimulatedCost(replace(case, cluster=with_memory(case.cluster, memory)))
    return bool(costs.group_bounds(group)[0, 0] < inf)


def only(layout: Layout, passes: StepDecisions, state: StepDecisions = PLAIN) -> Group:
    """Return the group of one member."""
    return Group(layout, (passes,), (state,), np.ones((1, 1), np.bool_))


def assert_least(case: Problem, group: Group, needs: Sequence[float], *, exact: bool = False) -> None:
    """Check that every position has to have so many bytes, and not one more; where ``exact``, to fit at all."""
    short = ([need - (at == position) for at, need in enumerate(needs)] for position in range(len(needs)))
    for memory, enough in ((needs, True), *((each, False) for each in short)):
        assert fits(case, group, memory) is enough
        if exact:
            placed = replace(case, cluster=with_memory(case.cluster, memory))
            assert SimulatedCost(placed).fits(complete(placed, group.build_layout(0, 0))) is enough


def in_flight(order: Sequence[Action], before: int) -> list[int]:
    """Return the stages of microbatches that a rank has run forward and not backward, once for each."""
    done = {(action.stage, action.microbatch) for action in order[:before] if action.kind in ENDS}
    begun = {(action.stage, action.microbatch) for action in order[:before] if action.kind is ActionKind.FORWARD}
    return [stage for stage, _ in begun - done]


def passes_hold(order: Sequence[Action], stages: Sequence[StageMemory], *, forwards: bool) -> int:
    """Return what a rank holds in the forward with which most are in flight, and in the pass after it."""
    counts = [len(in_flight(order, before)) for before in range(len(order) + 1)]
    most = counts.index(max(counts)) - 1
    assert order[most].kind is ActionKind.FORWARD
    moments = [most] if forwards else [most, most + 1]
    return max(sum(stages[s].kept_bytes for s in in_flight(order, at)) + in_pass(order[at], stages) for at in moments)


def in_pass(action: Action, stages: Sequence[StageMemory]) -> int:
    """Return what a pass holds at its fullest moment beyond what was held before it."""
    of = stages[action.stage]
    beyond = {
        ActionKind.FORWARD: of.kept_bytes + of.forward,
        ActionKind.BACKWARD: of.backward,
        ActionKind.INPUT: of.inputs,
    }
    return beyond[action.kind]


def needed(case: Problem, plan: Plan, stages: Sequence[StageMemory], *, forwards: bool = False) -> list[int]:
    """Return what every position holds at least of a plan with all of its states on devices."""
    held = PlanMemory(SimulatedCost(case).costs).resident_memory(plan).tolist()
    passes = [passes_hold(order, stages, forwards=forwards) for order in plan.actions.orders]
    return [one + other for one, other in zip(held, passes, strict=True)]


def memories(case: Problem, plan: Plan) -> tuple[StageMemory, ...]:
    """Return what stages hold where all activations stay on devices."""
    return list_stage_memories(SimulatedCost(case).costs, plan)


@pytest.mark.parametrize("passes", PASSES, ids=lambda each: str(each.recompute))
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=3, stages=(1, 4, 2)),
        Layout(pipeline=2, stages=(3, 4), schedule="naive"),
        Layout(pipeline=2, data=2, zero=1, stages="balanced"),
        Layout(pipeline=2, schedule=ON_BOTH, stages=(2, 1, 4), microbatch=6),
    ],
    ids=lambda each: each.schedule,
)
def test_one_pass_after_another_holds_most_with_most_microbatches_in_flight(
    layout: Layout, passes: StepDecisions
) -> None:
    case, group = small(layout), only(layout, passes, StepDecisions(zero=layout.zero))
    plan = complete(case, group.build_layout(0, 0))
    assert_least(case, group, needed(case, plan, memories(case, plan)), exact=True)


@pytest.mark.parametrize("framework", ["megatron", "torch"])
@pytest.mark.parametrize("passes", PASSES[:3], ids=lambda each: str(each.recompute))
@pytest.mark.parametrize(
    "schedule", ["zb1p", "zb2p", "interleaved_zero_bubble", "zbv", "interleaved", "gpipe", "looped_bfs", WRITTEN, SPLIT]
)
def test_a_bound_is_what_is_held_as_most_microbatches_are_in_flight(
    schedule: str, passes: StepDecisions, framework: str
) -> None:
    forwards = schedule in ("gpipe", "looped_bfs")  # of these the last forward alone is looked at
    chunks = 1 if schedule in ("gpipe", "zb1p", "zb2p", WRITTEN, SPLIT) else 2
    pipeline = 1 if schedule in (WRITTEN, SPLIT) else 2
    stages = {1: (7,), 2: (4, 3), 4: (1, 3, 1, 2)}[pipeline * chunks]
    layout = Layout(pipeline=pipeline, schedule=schedule, chunks=chunks, stages=stages, microbatch=2)
    case, group = small(layout, framework=framework), only(layout, passes)
    plan = complete(case, group.build_layout(0, 0))
    assert_least(case, group, needed(case, plan, memories(case, plan), forwards=forwards))


@pytest.mark.parametrize(
    ("layout", "state"),
    [
        (Layout(pipeline=2, data=2, stages=(4, 3)), StepDecisions(zero=2)),
        (Layout(pipeline=2, data=2, stages=(4, 3)), StepDecisions(zero=3)),
        (
            Layout(pipeline=2, data=2, stages=(4, 3), schedule="zb1p"),
            StepDecisions(zero=3, reshard_after_forward=False),
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("passes", PASSES[:3], ids=lambda each: str(each.recompute))
def test_of_gradients_that_leave_in_passes_only_forwards_are_known(
    layout: Layout, state: StepDecisions, passes: StepDecisions
) -> None:
    case, group = small(layout), only(layout, passes, state)
    plan = complete(case, group.build_layout(0, 0))
    assert_least(case, group, needed(case, plan, memories(case, plan), forwards=True))


def test_states_that_a_single_rank_shares_with_nobody_leave_passes_as_they_are() -> None:
    layout = Layout(pipeline=2, stages=(4, 3))
    case, group = small(layout), only(layout, PASSES[0], StepDecisions(zero=2))
    plan = complete(case, replace(layout, zero=0))
    assert_least(case, group, needed(case, plan, memories(case, plan)), exact=True)


def test_of_passes_that_run_in_pairs_what_is_in_flight_counts_alone() -> None:
    # a rank of two has at most 2 * 2 + 1 = 5 microbatches in flight, the forward that is the last of them included
    layout = Layout(pipeline=2, schedule="dualpipev", chunks=2, stages=(1, 3, 1, 2), microbatch=2)
    case, group = small(layout), only(layout, PASSES[0])
    plan = complete(case, group.build_layout(0, 0))
    held, stages = PlanMemory(SimulatedCost(case).costs).resident_memory(plan).tolist(), memories(case, plan)
    needs = []
    for rank, order in enumerate(plan.actions.orders):
        flying = max((in_flight(order, before) for before in range(len(order))), key=len)
        assert len(flying) == 5
        needs.append(held[rank] + sum(stages[stage].kept_bytes for stage in flying))
    assert_least(case, group, needs)


@pytest.mark.parametrize(
    ("optimizer", "fractions", "lost"),
    [
        # AdamW keeps two moments of 4 bytes an element: of one element more the fraction, and one for rounding, are
        # taken to be on the host
        ("adamw", (0.5,), (0.5 * 8 + 8, 0.5 * 8 + 8)),
        ("adamw", (1.0,), (8 + 8, 8 + 8)),
        ("adamw", (0.5, 0.0), (0.5 * 8 + 8, 0)),
        # SGD keeps one
        ("sgd", (0.0, 0.25), (0, 0.25 * 4 + 4)),
        # Adafactor keeps 4 bytes a row and a column
        ("adafactor", (0.5,), (0.5 * 4 + 4, 0.5 * 4 + 4)),
    ],
)
def test_states_on_hosts_are_held_there_but_for_rounding(
    optimizer: str, fractions: tuple[float, ...], lost: tuple[float, ...]
) -> None:
    layout = Layout(pipeline=2, data=2, stages=(4, 3))
    case, group = (
        small(layout, optimizer=optimizer),
        only(layout, PASSES[0], StepDecisions(zero=0, offload=Offloading(fractions))),
    )
    plan = complete(case, group.build_layout(0, 0))
    needs = needed(case, plan, memories(case, plan))
    assert_least(case, group, [need - less for need, less in zip(needs, lost, strict=True)])


@pytest.mark.parametrize("parameters", [WHOLE_FRACTION, (0.5, 0.0)])
def test_of_parameters_on_hosts_only_what_forwards_keep_is_known(parameters: tuple[float, ...]) -> None:
    layout = Layout(pipeline=2, stages=(4, 3), schedule="gpipe")
    state = StepDecisions(zero=0, offload=Offloading(WHOLE_FRACTION, parameters))
    case, group = small(layout), only(layout, PASSES[0], state)
    stages = memories(case, complete(case, layout))
    orders = complete(case, layout).actions.orders
    assert_least(case, group, [passes_hold(order, stages, forwards=True) for order in orders])


def away(case: Problem, plan: Plan, gone: Sequence[int]) -> list[StageMemory]:
    """Return what stages hold of whose first so many layers activations are on hosts, block by block."""
    costs, result = SimulatedCost(case).costs, []
    keys, blocks = costs.find_keys(plan), costs.blocks
    for stage, left in zip(plan.stages, gone, strict=True):
        again = plan.recompute.layers if isinstance(plan.recompute, FirstLayers) else len(stage.blocks)
        names = [keys.cut.kinds.kind_names[name] for name in stage.blocks]
        rows, layers = [], 0
        for name in names:
            layer = blocks.block(keys.cut, name).layer
            memory = blocks.memory(keys.run, name, find_choice(plan) if layers < again else Recompute.NONE)
            rows.append((memory._replace(kept_bytes=0) if layer and layers < left else memory, 1))
            layers += layer
        result.append(stage_memory(rows))
    return result


@pytest.mark.parametrize("recompute", [Recompute.NONE, FirstLayers(Recompute.FULL, 1), FirstLayers(Recompute.FULL, 3)])
@pytest.mark.parametrize(
    ("fractions", "gone"),
    [
        ((0.5,), (1, 3)),  # of 2 layers and of 5, rounded up
        ((1.0,), (2, 5)),
        ((1.0, 0.25), (2, 2)),
        ((0.0, 0.5), (0, 3)),
    ],
)
def test_layers_whose_activations_are_on_hosts_keep_nothing(
    fractions: tuple[float, ...], gone: tuple[int, ...], recompute: Recompute | FirstLayers
) -> None:
    layout = Layout(pipeline=2, stages=(2, 5))  # the first three layers have no experts, and keep something else
    case, group = (
        small(layout, experts=Experts(4, 1, 64, dense_layers=3)),
        only(layout, StepDecisions(recompute=recompute, offload=Offloading(activations=fractions))),
    )
    plan = complete(case, replace(layout, recompute=recompute))
    assert_least(case, group, needed(case, plan, away(case, plan, gone)))


def test_of_stages_with_buffers_and_activations_on_hosts_states_alone_are_known() -> None:
    layout = Layout(pipeline=2, stages=(4, 3))
    case = small(layout, framework="torch")
    plan = complete(case, layout)
    group = only(layout, StepDecisions(recompute=Recompute.NONE, offload=Offloading(activations=WHOLE_FRACTION)))
    assert_least(case, group, PlanMemory(SimulatedCost(case).costs).resident_memory(plan).tolist())


@pytest.mark.parametrize(("schedule", "microbatch"), [("1f1b", 1), ("zb2p", 1), ("interleaved", 3)])
def test_deep_pipelines_have_as_many_microbatches_in_flight_as_fill_them(schedule: str, microbatch: int) -> None:
    # twelve microbatches, of which up to seven are in flight, or four, which are fewer than there is room for
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(pipeline=4, schedule=schedule, chunks=chunks, microbatch=microbatch)
    case, group = small(layout, layers=8), only(layout, PASSES[0])
    plan = complete(case, layout)
    assert_least(case, group, needed(case, plan, memories(case, plan)))
