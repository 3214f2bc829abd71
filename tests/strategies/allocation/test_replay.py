"""A replayed step requests the tensors that are predicted, and what is reserved follows from their sizes."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from meshwise.strategies.allocation.caching_allocator import MIB, replay
from meshwise.strategies.allocation.device import CONTEXT_BYTES, count_overhead
from meshwise.strategies.allocation.replay import PlanReplay
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

from ..lowering.test_lower import Case, cases
from ..problems import problem


def copies_at_once(small: Problem, plan: Plan) -> bool:
    """Return whether predictions have all gradients copied at once, where a replay copies a block at a time."""
    return small.training.conventions.flattens_gradients and plan.replicas > 1


@given(cases())
@settings(max_examples=80, deadline=None)
def test_a_replay_requests_the_tensors_that_are_predicted(case: Case) -> None:
    small, plan = case.build()
    memory = PlanMemory(StageCosts(small))
    assume(not memory.needs_simulation(plan))
    plan = plan.with_microbatch(max(plan.sizes))
    replayer, allocated = PlanReplay(StageCosts(small)), memory.allocated(plan)
    for position in range(plan.pipeline):
        requested = replay(replayer.list_events(plan, position)).requested
        if plan.splits_backward or copies_at_once(small, plan):
            assert requested <= allocated[position]
        else:
            assert requested == allocated[position]


@pytest.mark.parametrize(("pipeline", "microbatches", "short"), [(1, 1, 1), (1, 9, 2), (2, 3, 3), (2, 64, 4)])
def test_more_microbatches_reserve_no_more(pipeline: int, microbatches: int, short: int) -> None:
    small = problem(nodes=1, devices=2, batch=64)
    plan = replace(complete(small, Layout(data=2 // pipeline, pipeline=pipeline)), num_microbatches=microbatches)
    costs = StageCosts(small)
    assert PlanReplay(costs).shorten_step(plan).num_microbatches == short
    few, many = (PlanReplay(costs).reserve(replace(plan, num_microbatches=count)) for count in (short, microbatches))
    assert few.reserved == many.reserved


def test_reserved_is_between_tensors_and_what_blocks_add() -> None:
    small = problem(nodes=1, devices=2, batch=8)
    plan = complete(small, Layout(data=2, microbatch=4))
    plain, paged = (
        PlanReplay(StageCosts(replace(small, training=replace(small.training, expandable_segments=pages)))).reserve(
            plan
        )
        for pages in (False, True)
    )
    planned = replace(small, training=replace(small.training, framework="xla"))
    assert plain.allocated <= plain.least <= plain.reserved
    assert plain.allocated == paged.allocated <= paged.least
    assert len(set(PlanReplay(StageCosts(planned)).reserve(plan))) == 1


def test_a_limit_makes_the_allocator_give_segments_back() -> None:
    small = problem(nodes=1, devices=2, batch=8)
    plan = complete(small, Layout(data=2, microbatch=4))
    replayer = SimulatedCost(small).costs.get_shared(PlanReplay)
    free = replayer.reserve(plan)
    for limit in (free.least, (free.least + free.reserved) // 2, free.reserved):
        assert free.least <= replayer.reserve(plan, limit).reserved <= free.reserved
    assert replayer.reserve(plan, free.allocated // 2) == free  # nothing helps


def test_a_device_holds_a_context_and_a_communicator_for_every_group() -> None:
    """Two data ranks have two rings of 24 channels of 12 MiB: their own and that of all ranks."""
    small = problem(nodes=1, devices=2, batch=8)
    ((node, count),) = small.cluster.nodes
    with_runtime = replace(node, accelerator=replace(node.accelerator, reserved=float(MIB)))
    busy = replace(small, cluster=replace(small.cluster, nodes=((with_runtime, count),)))
    assert count_overhead(busy, complete(busy, Layout(data=2))) == CONTEXT_BYTES + 2 * 24 * 12 * MIB
    generous = replace(node, accelerator=replace(node.accelerator, reserved=float(4096 * MIB)))
    busy = replace(small, cluster=replace(small.cluster, nodes=((generous, count),)))
    assert count_overhead(busy, complete(busy, Layout(data=2))) == 4096 * MIB
