"""What people set today is in the space that a search has when nothing limits it, and is told of in words."""

from dataclasses import replace
from math import inf

import pytest

from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.partition import partition
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators, of_stage
from meshwise.strategies.search import ALGORITHMS, BestFirst, Space, layouts, search
from meshwise.strategies.search.choices import offloadings
from meshwise.strategies.search.descent import best_known, known_by_path, known_groups, known_layouts
from meshwise.strategies.search.scope import scope_of
from meshwise.strategies.search.space import CORE, count, within
from meshwise.strategies.search.starts import engineer_layouts

from ..problems import problem
from .scenarios import usual_scenario

SMALL = problem(nodes=2, devices=2, layers=7, batch=8)
"""Seven layers on two nodes of two devices."""


def test_interleaved_and_v_schedules_run_on_any_number_of_layers() -> None:
    # 7 layers on 2 ranks: the fuller one has 4, which 2 or 4 chunks divide; of 8 stages the last has the loss alone
    choices = {
        (layout.schedule, layout.chunks, layout.stages)
        for layout in layouts(SMALL, Space(pipeline=(2,), schedule=("interleaved", "zbv")))
    }
    # embedding and loss weigh as a layer each: 7 + 2 over 4 stages are 2, 3, 2, 2, of which both ends hold one less;
    # over 8 stages 1, 1, 1, 2, 1, 1, 1, 1: a stage of 2 layers where balanced stages have 1 is no choice
    counts = {("interleaved", 2), ("interleaved", 4), ("zbv", 2)}
    assert {(schedule, chunks) for schedule, chunks, _ in choices} == counts
    assert {stages for _, chunks, stages in choices if chunks == 2} == {"balanced"}
    assert {stages for _, chunks, stages in choices if chunks == 4} == {"balanced"}


def test_states_are_shared_by_all_or_by_a_node() -> None:
    shards = {(layout.zero, layout.zero_shards) for layout in layouts(SMALL, Space(data=(4,)))}
    assert shards == {(0, 0), *((zero, shards) for zero in (1, 2, 3) for shards in (0, 2))}


def test_layers_recompute_nothing_activations_alone_attention_a_part_or_all() -> None:
    recomputes = {layout.recompute for layout in layouts(SMALL, Space(pipeline=(1,)))}
    # a quarter, half and three quarters of 7 layers, rounded up: 2, 4 and 6
    parts = {FirstLayers(Recompute.FULL, count) for count in (2, 4, 6)}
    assert recomputes == {*Recompute, SomeOperators(("activation",)), *parts}


def test_offload_is_for_where_nothing_fits() -> None:
    small = problem(devices=4, layers=2, batch=4, hidden=256, ffn=1024)
    assert not any(layout.offload for layout in layouts(small))
    costs = SimulatedCost(small)
    spaces = Space(), Space(offload=offloadings())
    least, offloaded = (
        min(costs.peak_memory(complete(small, layout)) for layout in layouts(small, space)) for space in spaces
    )
    assert offloaded < least
    memory = (offloaded + least) / 2
    cluster = small.cluster.with_accelerators(lambda device: replace(device, memory=memory))
    tight = replace(small, cluster=cluster)
    result = search(BestFirst(), tight)
    assert result.best is not None and result.best.plan.offload
    assert result.scope is not None and "offload of optimizer states" in result.scope.tried
    # a known plan with more on the host fits too: what is proven is proven of all that the search may offload
    every = (SimulatedCost(tight).evaluate(complete(tight, each)) for each in layouts(tight, spaces[1]))
    assert result.best.evaluation.step_time <= min(evaluation.step_time for evaluation in every)
    assert "what the limits" not in str(result.scope)


@pytest.mark.parametrize("seed", range(6))
def test_no_search_is_slower_than_the_plans_that_people_know(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    known = [costs.evaluate(complete(small, layout)).step_time for layout in known_layouts(small, space)]
    for seconds in (None, 1e-9):  # with all the time there is, and with none
        result = search(BestFirst(), small, space, seconds=seconds)
        if min(known, default=inf) < inf:
            assert result.best is not None
            if seconds is None:
                assert result.best.evaluation.step_time <= min(known)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_takes_less_than_computing_at_the_peak(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    steps = [costs.evaluate(complete(small, layout)).step_time for layout in layouts(small, space)]
    assert 0 < least_step_time(small) <= min(steps)


def test_what_reads_no_samples_need_not_run_for_every_sample() -> None:
    # a product of parameters alone, of 8,192^3 * 2 = 1.1e12 FLOP: a microbatch computes it once for all its samples
    dims = (("m", 8192), ("k", 8192), ("n", 8192))
    merge = Operator("merge", OperatorKind.MATMUL, dims, ("weights",), ("merged",), flops_per_point=2.0)
    tensors = [Tensor(name, ("m", "k"), (8192, 8192), "fp32") for name in ("weights", "merged")]
    alone = OperatorGraph(
        "alone", (Block("merge", (merge,), tuple(tensors), ("weights",), ("merged",), repeat=3),), sequence=1
    )
    peak = dict(SMALL.cluster.accelerator.peak_flops)[SMALL.training.dtype]
    # forward and one of two gradients, in each of three blocks, by 4 devices at their peak, whatever the batch is
    assert least_step_time(replace(SMALL, graph=alone)) == pytest.approx(2 * 3 * 2 * 8192**3 / (4 * peak))


def test_known_plans_keep_the_limits_and_are_legal() -> None:
    names = dict(engineer_layouts(SMALL))
    assert any(layout.zero == 3 and layout.data == 4 for layout in names.values())
    assert {layout.zero for layout in known_layouts(SMALL, Space(zero=(1,)))} == {1}
    costs = SimulatedCost(SMALL)
    plans = []
    proposals = best_known(SMALL, known_by_path(SMALL, Space(), costs), inf, None)
    answer = None
    try:
        while True:
            plans.append(proposals.send(answer))  # type: ignore[arg-type]
            answer = costs.evaluate(plans[-1])
    except StopIteration as end:
        best = end.value[0]
    # known plans, and of their groups the members with the least bounds: never slower than the plans themselves
    assert best <= min(costs.evaluate(complete(SMALL, layout)).step_time for layout in known_layouts(SMALL, Space()))


@pytest.mark.parametrize("seed", range(6))
def test_a_known_plan_stands_for_those_that_differ_in_recomputation_and_states(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    paths = {layout: bound for bound, layout in known_by_path(small, space, costs) if layout is not None}
    known = known_layouts(small, space)
    fitting = [layout for layout in known if costs.fits(complete(small, layout))]
    assert set(fitting) <= paths.keys() and list(paths.values()) == sorted(paths.values())
    for group in known_groups(small, space):
        members = [layout for layout in group if costs.fits(complete(small, layout))]
        # none of them, or one whose bound is the least: no other member that fits has a lower one
        bounds = [costs.bound(complete(small, layout)) for layout in members]
        found = [costs.bound(complete(small, layout)) for layout in paths if layout in members]
        assert bool(found) is bool(members)
        if found:
            assert min(found) <= min(bounds) * (1 + 1e-9)


def test_a_known_plan_that_a_limit_forbids_stands_with_other_states() -> None:
    # a recipe with ZeRO-1 where only ZeRO-3 may be: the same degrees and schedule stand, with ZeRO-3
    recipe = Layout(data=2, pipeline=2, zero=1, schedule="gpipe", stages="balanced")
    space = Space(zero=(3,), starts=(recipe,))
    assert not any(layout.schedule == "gpipe" for layout in known_layouts(SMALL, space))
    (group,) = (group for group in known_groups(SMALL, space) if group.layout.schedule == "gpipe")
    assert group.layout.data == group.layout.pipeline == 2
    assert {layout.zero for layout in group} == {3} and len({layout.recompute for layout in group}) > 1


def test_a_scope_says_what_was_tried_and_what_not() -> None:
    scope = scope_of(SMALL, Space(zero=(0, 1)))
    assert scope.plans == count(SMALL, Space(zero=(0, 1))) == len(list(layouts(SMALL, Space(zero=(0, 1)))))
    assert scope.tried[0] == "data x tensor x pipeline" and "ZeRO 0 and 1 over all or a node" in scope.tried
    assert scope.left_out[0] == "what the limits of zero forbid" and "offload" in scope.left_out
    assert str(scope).startswith(f"{scope.plans:,} plans: data x tensor x pipeline; ")
    assert any("3-D" in words for words in scope_of(SMALL, CORE).left_out)


def test_an_algorithm_that_lists_all_plans_is_given_the_core_of_a_large_space() -> None:
    number = count(SMALL, Space())
    assert within(SMALL, Space(), number) == Space()
    assert within(SMALL, Space(tensor=(1, 2)), 1) == Space(core=True, tensor=(1, 2))


@pytest.mark.parametrize("algorithm", ["auto", "best_first", "inter_stage_milp", "layer_dp", "pipeline_dp"])
def test_limits_of_recomputation_and_stages_hold_whatever_divides_stages(algorithm: str) -> None:
    small = problem(devices=4, layers=6)
    space = Space(recompute=(Recompute.FULL,), stages=("balanced",), pipeline=(4,))
    best = search(ALGORITHMS[algorithm](), small, space, budget=40).best
    assert best is not None
    plan = best.plan
    assert {of_stage(plan.recompute, stage) for stage in range(len(plan.stages))} == {Recompute.FULL}
    assert plan.stages == partition(small.graph, len(plan.stages), "balanced")


def test_a_scope_tells_of_every_kind_of_family() -> None:
    # states are over all ranks in some families, and over those of a node in others, which have no ZeRO 0
    tried = scope_of(SMALL, Space(tensor=(1,), pipeline=(1,))).tried
    assert "ZeRO 0 to 3 over all or a node" in tried
    # 7 layers on 4 stages: no stage has more than 2, of which a part are; on one stage a part of 7
    assert any("some layers" in words for words in scope_of(SMALL, Space(data=(1,), tensor=(1,))).tried)
