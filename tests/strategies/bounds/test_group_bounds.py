"""Bounds of families and groups are never above those of their members, and are theirs where nothing is left out."""

from dataclasses import replace
from math import ceil, inf
from random import Random

import numpy as np
import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import step_time
from meshwise.simulator.machine.cluster import Cluster, Tenant
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.bounds.group_bounds import FloatArray
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout, StepDecisions
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.space import Space, count_layouts, find_choices, groups, layouts

from ..problems import IDEAL
from ..problems import problem as on_one_node
from ..search.scenarios import small_scenario

OFFLOADS = (
    Offloading(),
    Offloading(optimizer=(0.5,)),
    Offloading((1.0,), (1.0,)),
    Offloading(activations=(0.5,)),
)


def test_slow_ranks_of_different_columns_do_not_slow_one_microbatch_twice() -> None:
    # rank 0 is the first stage of one column, rank 3 the second of the other: a microbatch meets one of them
    plain = on_one_node(devices=4, batch=8)
    slow = replace(plain, cluster=replace(plain.cluster, speeds=((0, 0.5), (3, 0.5))))
    plan = complete(slow, Layout(data=2, pipeline=2, schedule="naive", chunks=1))
    costs = SimulatedCost(slow)
    (path,) = costs.longest_paths([plan])
    assert costs.plan_bound(plan) <= path


def test_a_column_without_members_decides_nothing_of_the_others() -> None:
    # kernels that add gradients run where these are kept for a whole step, as under the illegal column, not with ZeRO 3
    small = on_one_node(devices=2, batch=8)
    small = replace(small, training=replace(small.training, framework="megatron_2021"))
    illegal = StepDecisions(zero=1, offload=Offloading(optimizer=(1.0,), parameters=(0.5,)))
    columns = (illegal, StepDecisions(zero=3))
    group = replace(whole(Layout(data=2), PASSES[:1], columns), member_mask=np.array([[False, True]]))
    alone = SimulatedCost(small).group_bounds(whole(Layout(data=2), PASSES[:1], columns[1:]))
    assert SimulatedCost(small).group_bounds(group).tolist() == [[inf, alone.item()]]


PASSES = (
    StepDecisions(recompute=Recompute.NONE),
    StepDecisions(recompute=Recompute.FULL),
    StepDecisions(recompute=Recompute.SELECTIVE),
    StepDecisions(recompute=FirstLayers(Recompute.FULL, 1)),
    StepDecisions(recompute=FirstLayers(Recompute.FULL, 2)),
    StepDecisions(recompute=SomeOperators(("qkv", "projection"))),
)
STATES = (
    StepDecisions(zero=0),
    StepDecisions(zero=0, overlap_gradients=False),
    StepDecisions(zero=1),
    StepDecisions(zero=2),
    StepDecisions(zero=2, overlap_gradients=False),
    StepDecisions(zero=0, gradient_reduction="parameter_server"),
    StepDecisions(zero=0, offload=Offloading(optimizer=(0.5,))),
)
THERE_AND_BACK = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 \n 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
ANYWHERE = "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1 \n 1F0 3F0 4F0 4B0 3B0 1B0 1F1 3F1 4F1 4B1 3B1 1B1"


Choices = tuple[StepDecisions, ...]


def whole(layout: Layout, passes: Choices = PASSES, states: Choices = STATES) -> Group:
    """Return a group of which all members are there."""
    return Group(layout, passes, states, np.ones((len(passes), len(states)), np.bool_))


def bounds(costs: SimulatedCost, group: Group) -> FloatArray:
    """Return the bound of every member, one after another."""
    result = np.full(group.member_mask.shape, inf)
    for row, column in np.argwhere(group.member_mask).tolist():
        result[row, column] = costs.plan_bound(complete(costs.problem, group.build_layout(row, column)))
    return result


@pytest.mark.parametrize("speeds", [(), ((0, 0.5), (3, 0.25)), ((2, 0.5), (5, 0.75)), ((6, 0.25),)], ids=repr)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=8),
        Layout(data=2, pipeline=4, stages=(1, 4, 1, 2)),
        Layout(data=2, pipeline=4, stages=(2, 2, 2, 2), schedule="gpipe", microbatch=2),
        Layout(data=4, pipeline=2, stages=(3, 5), schedule="naive"),
        Layout(tensor=2, data=2, pipeline=2, schedule="naive", stages=(7, 1)),
        Layout(data=4, pipeline=2, stages=(5, 3), schedule="zb1p"),
        Layout(data=4, pipeline=2, stages=(1, 3, 2, 2), schedule="interleaved", chunks=2),
        Layout(data=4, pipeline=2, stages=(3, 1, 2, 2), schedule="zbv", chunks=2),
        Layout(tensor=2, data=2, pipeline=2, schedule="dualpipev", chunks=2),
        Layout(data=2, pipeline=4, stages=(1, 2, 4, 1), schedule="naive", microbatch=4),
        Layout(data=4, pipeline=2, schedule=THERE_AND_BACK, stages=(1, 3, 2, 2), microbatch=4),
        Layout(data=4, pipeline=2, schedule=ANYWHERE, stages=(1, 2, 2, 2, 1), microbatch=4),
    ],
    ids=lambda each: each.schedule,
)
def test_a_table_is_the_bounds_of_its_members_where_parameters_stay(
    layout: Layout, speeds: tuple[tuple[int, float], ...]
) -> None:
    plain = on_one_node(bandwidth=1e12)
    costs = SimulatedCost(replace(plain, cluster=replace(plain.cluster, speeds=speeds)))
    split = layout.schedule in ("zb1p", "zbv", "dualpipev")
    group = whole(layout, PASSES, STATES[:-1] if split else STATES)
    np.testing.assert_array_equal(costs.group_bounds(group), bounds(costs, group))


@pytest.mark.parametrize("bandwidth", [1e9, 1e12])
@pytest.mark.parametrize("schedule", ["1f1b", "naive"])
def test_a_table_has_the_bounds_of_communication_beside_products(schedule: str, bandwidth: float) -> None:
    layout = Layout(tensor=4, pipeline=2, sequence_parallel=True, schedule=schedule, stages=(3, 5))
    passes = tuple(replace(each, overlap_tensor=beside) for each in PASSES for beside in (True, False))
    costs, group = SimulatedCost(on_one_node(bandwidth=bandwidth)), whole(layout, passes, STATES[:1])
    np.testing.assert_array_equal(costs.group_bounds(group), bounds(costs, group))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_host_that_steps_as_gradients_come_adds_nothing_to_passes(schedule: str) -> None:
    states = tuple(StepDecisions(offload=Offloading(WHOLE_FRACTION, each)) for each in (WHOLE_FRACTION, (0.5, 0.0)))
    group = whole(Layout(pipeline=2, schedule=schedule, stages=(3, 5)), states=states)
    plain = on_one_node(devices=2)
    costs = SimulatedCost(plain)
    np.testing.assert_array_equal(costs.group_bounds(group), bounds(costs, group))
    clipped = SimulatedCost(replace(plain, training=replace(plain.training, gradient_clipping=True)))
    np.testing.assert_array_equal(clipped.group_bounds(group), costs.group_bounds(group))  # nor is a norm known


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, pipeline=2, schedule="gpipe", stages=(5, 3))])
def test_a_limit_leaves_what_is_below_it_and_fits(layout: Layout) -> None:
    roomy = on_one_node(devices=layout.data * layout.pipeline)
    peaks = sorted(SimulatedCost(roomy).peak_memory(complete(roomy, each)) for each in whole(layout))
    for memory in (1e12, peaks[len(peaks) // 2]):
        small = replace(roomy, cluster=with_memory(roomy.cluster, memory))
        costs, group = SimulatedCost(small), whole(layout)
        table = costs.group_bounds(group)
        found = sorted(set(table[table < inf].tolist()))
        assert len(found) > 5
        for limit in (*found, 2 * found[-1]):
            np.testing.assert_array_equal(costs.group_bounds(group, limit), np.where(table < limit, table, inf))


def test_members_that_are_not_there_take_no_time() -> None:
    passes = (StepDecisions(recompute=FirstLayers(Recompute.FULL, 9)), *PASSES)  # a stage has eight layers
    legal = np.ones((len(passes), len(STATES)), np.bool_)
    legal[0] = False
    costs = SimulatedCost(on_one_node(devices=2))
    group, rest = Group(Layout(data=2), passes, STATES, legal), whole(Layout(data=2))
    table = costs.group_bounds(group)
    assert (table[0] == inf).all()
    np.testing.assert_array_equal(table[1:], costs.group_bounds(rest))
    assert (costs.group_bounds(replace(group, member_mask=np.zeros_like(legal))) == inf).all()


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    """Return the cluster of one kind of node whose devices have so much memory."""
    node = replace(cluster.first_node, accelerator=replace(cluster.first_node.accelerator, memory=memory))
    return replace(cluster, nodes=((node, cluster.nodes[0][1]),))


FAMILIES = (
    Layout(),
    Layout(microbatch=4),
    Layout(data=2, microbatch=2),
    Layout(tensor=2),
    Layout(tensor=4, sequence_parallel=True),
    Layout(tensor=2, tensor_rows=2, microbatch=2),
    Layout(tensor=2, context=2),
    Layout(tensor=2, context=4, attention=Attention.ULYSSES),
    Layout(data=4, expert=2),
    Layout(data=2, expert=2, tensor=2, context=2),
)
"""Families of one stage."""


def of_family(family: Layout, *, batch: int = 16, layers: int = 3, free: bool = False, **changes: object) -> Problem:
    """Return a problem with a device a rank; where links are ``free``, exchanges take no time."""
    experts = {"experts": Experts(4, 1, 64)} if family.expert > 1 else {}
    devices = family.data * family.tensor * family.tensor_rows * family.context * family.pipeline
    found = on_one_node(devices=devices, batch=batch, layers=layers, **experts, **changes)  # type: ignore[arg-type]
    network = replace(found.cluster.first_node.network, link=Link(0.0, inf if free else 1e9))
    node = replace(found.cluster.first_node, network=network)
    return replace(found, cluster=replace(found.cluster, nodes=((node, 1),)))


def of_batch_more(family: Layout, layout: Layout, *, free: bool) -> tuple[float, float, float]:
    """Return by how much the floor, the reach and the step grow from a batch to one twice as large."""
    found = []
    for batch in (16, 32):
        small = of_family(family, batch=batch, free=free)
        costs = SimulatedCost(small)
        step = step_time(lower(small, complete(small, layout)))
        found.append((costs.family_bound(family), costs.busy_bound(family), step))
    floor, reach, step = (more - less for less, more in zip(*found, strict=True))
    return floor, reach, step


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_on_free_links_a_microbatch_more_of_one_stage_takes_what_floor_and_reach_say(family: Layout) -> None:
    floor, reach, step = of_batch_more(family, family, free=True)
    assert floor == reach == pytest.approx(step, rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_microbatch_more_of_one_stage_takes_what_reach_says(family: Layout) -> None:
    ways = [replace(family, overlap_tensor=beside) for beside in {family.sequence_parallel, False}]
    found = [of_batch_more(family, layout, free=False) for layout in ways]
    assert found[0][1] == pytest.approx(min(step for _, _, step in found), rel=1e-9)
    assert found[0][0] <= found[0][1]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("framework", ["megatron", "megatron_2021"])
def test_reach_is_of_the_quickest_way_to_gather_gradients(framework: str, data: int) -> None:
    # kernels add gradients of a microbatch to the others' but where ranks share them and they leave at once
    family, found = Layout(data=data), []
    for batch in (16, 32):
        small = of_family(family, batch=batch * data, free=True)
        costs = SimulatedCost(replace(small, training=replace(small.training, framework=framework)))
        plans = [complete(costs.problem, replace(family, zero=zero)) for zero in (0, 1, 2)]
        found.append([costs.family_bound(family), costs.busy_bound(family), *map(costs.plan_bound, plans)])
    floor, reach, *steps = (more - less for less, more in zip(*found, strict=True))
    assert reach == pytest.approx(min(steps), rel=1e-9)
    adds = framework == "megatron_2021"
    assert (floor < reach) is (adds and data == 1)
    assert (reach < max(steps) * (1 - 1e-9)) is (adds and data == 2)


@pytest.mark.parametrize(
    ("layers", "pipeline", "vocab"), [(5, 2, 32), (7, 4, 32), (6, 3, 32), (6, 3, 3000), (5, 3, 999)]
)
def test_some_stage_has_its_share_of_layers_or_of_all_blocks(layers: int, pipeline: int, vocab: int) -> None:
    # of 16 microbatches, each takes the ticks of the layers of the fullest stage, or a share of those of all blocks
    one, family = Layout(), Layout(pipeline=pipeline)
    found = [SimulatedCost(of_family(one, layers=number, vocab=vocab)) for number in (layers, layers + 1)]
    ticks, more = (round(costs.family_bound(one) / 16 * TICKS_PER_SECOND) for costs in found)
    costs = SimulatedCost(of_family(family, layers=layers, vocab=vocab))
    fullest, share = ceil(layers / pipeline) * (more - ticks), ceil(ticks / pipeline)
    assert costs.family_bound(family) == 16 * max(fullest, share) / TICKS_PER_SECOND
    assert costs.busy_bound(family) == 16 * share / TICKS_PER_SECOND


@pytest.mark.parametrize("family", [Layout(data=4), Layout(data=2, pipeline=2), Layout(pipeline=3)], ids=repr)
def test_devices_that_differ_have_no_floor_and_the_reach_of_the_quicker(family: Layout) -> None:
    alike = of_family(family, batch=24, layers=6)
    costs = SimulatedCost(replace(alike, cluster=replace(alike.cluster, speeds=((0, 0.5),))))
    assert costs.family_bound(family) == 0.0
    assert costs.busy_bound(family) == SimulatedCost(alike).busy_bound(family) > 0.0


def test_reach_takes_every_block_on_the_ranks_that_are_quickest_with_it() -> None:
    # links of the first node are slow, which is much of a layer, and products of the second, which are much of the head
    small = on_one_node(nodes=2, devices=2, layers=8, batch=256, vocab=8192, bandwidth=1e12)
    node = small.cluster.first_node
    slow_links = replace(node, network=replace(node.network, link=Link(2e-5, 1e11)))
    slow_products = replace(node, accelerator=replace(IDEAL, name="slow", peak_flops=(("fp32", 1e11),)))
    costs = SimulatedCost(replace(small, cluster=replace(small.cluster, nodes=((slow_links, 1), (slow_products, 1)))))
    family = Layout(tensor=2, pipeline=2, placement=(2, 3, 0, 1))
    reach = costs.busy_bound(family)
    for first in range(1, 8):
        plan = complete(costs.problem, replace(family, schedule="gpipe", stages=(first, 8 - first)))
        assert reach <= costs.plan_bound(plan) <= costs.evaluate(plan).step_time


@pytest.mark.parametrize("ffn", [16, 1024])
def test_a_floor_counts_on_the_quickest_layers_alone(ffn: int) -> None:
    # five layers on four ranks, three with experts of 128: two layers are on one rank, and they may be the quick ones
    experts = Experts(4, 1, 128, dense_layers=2)
    costs = SimulatedCost(on_one_node(devices=4, layers=5, batch=256, vocab=32, ffn=ffn, experts=experts))
    family = Layout(pipeline=4)
    divisions = [tuple(1 + (at == fullest) for at in range(4)) for fullest in range(4)]
    found = [costs.plan_bound(complete(costs.problem, replace(family, stages=each))) for each in divisions]
    assert 0.6 * min(found) < costs.family_bound(family) <= min(found)


def test_families_leave_devices_of_others_alone() -> None:
    # the floor is that of a machine of its own, and no rank is on what another job has
    family = Layout(tensor=2, context=2)
    alone, shared = of_family(family), on_one_node(nodes=2, devices=4, batch=16, layers=3, bandwidth=1e9)
    taken = Tenant("other", (0, 1, 2, 3), Collective.ALL_REDUCE, 1e4, 1e-3)
    shared = replace(shared, cluster=replace(shared.cluster, tenants=(taken,)))
    assert SimulatedCost(shared).family_bound(family) == SimulatedCost(alone).family_bound(family)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_families_and_groups_are_below_those_of_members_and_these_below_the_simulation(seed: int) -> None:
    problem, _ = small_scenario(seed)
    draw = Random(seed)
    space = Space(wide=True, overlap_gradients=(True, False), offload=OFFLOADS)
    costs, found = SimulatedCost(problem), list(groups(problem, space))
    for group in draw.sample(found, min(10, len(found))):
        floor, table = costs.family_bound(find_family(group.layout)), costs.group_bounds(group)
        reach = 0.0 if group.layout.schedule == "dualpipev" else costs.busy_bound(find_family(group.layout))
        cells = [
            (row, column) for row, line in enumerate(group.member_mask) for column, legal in enumerate(line) if legal
        ]
        for row, column in draw.sample(cells, min(4, len(cells))):
            plan = complete(problem, group.build_layout(row, column))
            evaluation = costs.evaluate(plan)
            if not evaluation.fits:
                continue
            (path,) = costs.longest_paths([plan])
            assert max(floor, reach, table[row, column]) <= costs.plan_bound(plan) <= path <= evaluation.step_time
        assert (table[~group.member_mask] == inf).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_count_is_that_of_all_layouts_and_all_are_legal(seed: int) -> None:
    problem, _ = small_scenario(seed)
    for space in (Space(), Space(wide=True, microbatch=(1,), zero=(0, 3), zero_shards=(0, 2))):
        found = list(layouts(problem, space))
        assert count_layouts(problem, space) == len(found) == len(set(found))
        for layout in Random(seed).sample(found, min(60, len(found))):
            assert not list(violations(problem, layout))
            assert find_choices(problem, space).contains(layout)
            assert not find_choices(problem, space).contains(replace(layout, microbatch=7))
