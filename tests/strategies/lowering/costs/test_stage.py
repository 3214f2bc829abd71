"""Costs of blocks and of machines that plans share are those that each would have alone."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.recompute import compute_moments
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import BACKWARD, DATA, FORWARD, TENSOR
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, SomeOperators

from ...problems import describe_cost, find_block_layout, find_block_memory, problem
from ..test_lower import Case, cases

KINDS = {
    TENSOR: (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    DATA: (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    FORWARD: (Collective.SEND,),
    BACKWARD: (Collective.SEND,),
}


@given(
    st.sampled_from([(1, False), (2, False), (2, True)]),
    st.sampled_from([*Recompute, SomeOperators(("input_norm", "activation", "down"))]),
    st.sampled_from(["flash", "unfused"]),
    st.permutations([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_memory_of_any_microbatch_is_that_of_its_own_layout(
    tensor: tuple[int, bool], recompute: LayerRecompute, attention: str, microbatches: list[int]
) -> None:
    small = problem(devices=2, batch=8, attention=attention)
    layout = Layout(data=2 // tensor[0], tensor=tensor[0], sequence_parallel=tensor[1], recompute=recompute)
    costs = StageCosts(small)
    for microbatch in microbatches:
        plan = complete(small, replace(layout, microbatch=microbatch))
        for block in small.graph.blocks:
            expected = compute_moments(
                Liveness(find_block_layout(costs, plan, block.name), small.training.conventions), recompute
            ).scale_memory()
            assert find_block_memory(costs, plan, block.name) == expected


@given(cases(), st.integers(1, 10**9))
@settings(max_examples=60, deadline=None)
def test_groups_that_are_alike_take_the_same_ticks(case: Case, size: int) -> None:
    small, plan = case.build()
    machine = StageCosts(small).machine(plan)
    for kind, collectives in KINDS.items():
        for collective in collectives if kind in machine.table.tables else ():
            alike = machine.list_alike_groups(kind, collective)
            ticks = [machine.communicator(kind, group).ticks(collective, float(size)) for group in range(len(alike))]
            assert ticks == [ticks[first] for first in alike]
            for position, groups in enumerate(machine.list_distinct_groups(kind, collective)):
                there = {alike[group] for group in machine.table.groups_at(kind, position)}
                assert set(groups) == there


@given(cases(), st.permutations([0, 1]))
@settings(max_examples=60, deadline=None)
def test_costs_do_not_depend_on_what_was_asked_before(case: Case, order: list[int]) -> None:
    small, plan = case.build()
    other = replace(plan, mesh=replace(plan.mesh, axes=plan.mesh.axes[::-1]))
    shared = StageCosts(small)
    for index in order:
        one = (plan, other)[index]
        rows = zip(shared.plan_costs(one).stages, StageCosts(small).plan_costs(one).stages, strict=True)
        for stage, own_stage in rows:
            assert list(map(describe_cost, stage.blocks)) == list(map(describe_cost, own_stage.blocks))
            assert stage.gradients == own_stage.gradients
        assert shared.plan_parameters(one) == StageCosts(small).plan_parameters(one)
