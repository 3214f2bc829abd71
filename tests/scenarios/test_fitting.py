"""Where a plan does not fit: the nearest that does, if there is one."""

from dataclasses import replace

import pytest

from meshwise import load
from meshwise.scenarios.fitting import explain_unfit_plan, find_nearest_fit
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.simulation import simulate_plan
from meshwise.simulator.units import format_size
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import SomeOperators
from meshwise.strategies.plan.rules import violations


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
    tight = simulate_plan(problem, scenario.choose_plan(), "discrete_event", ())
    assert not tight.fits
    near = find_nearest_fit(problem, scenario.choose_plan())
    assert near is not None
    assert simulate_plan(problem, near, "discrete_event", ()).fits
    assert near != scenario.plan
    assert "the plan does not fit: stage 0 needs" in explain_unfit_plan(problem, tight.plan)


def test_the_nearest_plan_that_fits_still_overlaps_tensor_communication() -> None:
    # one of the plans looked at has no sequence parallelism, and so nothing to overlap
    scenario = load("local/tp2-sequence")
    plan = replace(scenario.choose_plan(), overlap_tensor=True)
    near = find_nearest_fit(cramped(scenario, 0.9 * scenario.simulate().peak_memory), plan)
    assert near == replace(plan, recompute=SomeOperators(("activation",)))  # the least that fits, one decision away


@pytest.mark.parametrize("part", [0.95, 0.5, 0.1])
def test_no_plan_near_one_breaks_a_rule_though_schedules_that_split_backward_overlap_nothing(part: float) -> None:
    scenario = load("local/dp2-tp2-pp2")
    changed = {"sequence_parallel": True, "overlap_tensor": True}
    plan = complete(scenario.problem, replace(recover_layout(scenario.problem, scenario.choose_plan()), **changed))
    problem = cramped(scenario, part * simulate_plan(scenario.problem, plan, "discrete_event", ()).peak_memory)
    near = find_nearest_fit(problem, plan)
    assert near is None or simulate_plan(problem, near, "discrete_event", ()).fits
    assert near is None or not list(violations(problem, recover_layout(problem, near)))


def test_the_nearest_plan_that_fits_is_one_that_a_trainer_can_say() -> None:
    scenario = load("local/dp2").for_target("torchtitan")
    problem, plan = cramped(scenario, 0.5 * scenario.simulate().peak_memory), scenario.choose_plan()
    anything, accepts = find_nearest_fit(problem, plan), scenario.make_space().accepts
    near = find_nearest_fit(problem, plan, accepts)
    assert accepts is not None and near is not None and anything is not None
    assert accepts.list_refusals(problem, anything) and not accepts.list_refusals(problem, near)
    assert simulate_plan(problem, near, "discrete_event", ()).fits


def test_the_nearest_plan_may_be_the_same_with_states_over_all_data_ranks() -> None:
    """ZeRO-3 over pairs of ranks keeps half of the states on each, over all four a quarter."""
    scenario = load("local/dp2-tp2-pp2")
    problem = scenario.problem
    pairs = complete(problem, Layout(data=8, microbatch=1, zero=3, zero_shards=2))
    every = complete(problem, Layout(data=8, microbatch=1, zero=3))
    needs = simulate_plan(problem, every, "discrete_event", ()).peak_memory
    near = find_nearest_fit(cramped(scenario, 1.05 * needs), pairs)
    assert near == every


def test_where_nothing_fits_there_is_no_nearest_plan() -> None:
    scenario = load("local/dp2")
    assert find_nearest_fit(cramped(scenario, 1e5), scenario.choose_plan()) is None


def test_where_tensors_fit_what_the_allocator_reserves_is_the_reason() -> None:
    scenario = load("local/dp2")
    reserved = forecast_plan(scenario.problem, scenario.choose_plan()).reserved
    words = explain_unfit_plan(scenario.problem, scenario.choose_plan())
    assert f"but the allocator reserves {format_size(reserved)} (" in words and "too little" not in words
