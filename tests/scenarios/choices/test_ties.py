"""A plan as fast as the best takes less of something, and no more of what comes before it."""

from dataclasses import replace

import pytest

from meshwise.scenarios.choices.ties import MEMORY_STEP, RISK_STEP, TOLERANCE, find_tie
from meshwise.scenarios.fitting import start_timer
from meshwise.scenarios.loader import load
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.operators.operator_plan import build_operator_plan, cuts_operators
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.sharding import OperatorSharding


@pytest.mark.parametrize("name", ["tinyllama-1.1b-8-a100", "tensor-parallel", "gallery/models/llama3-8b-8-h100"])
def test_a_tie_is_as_fast_and_takes_less(name: str) -> None:
    scenario = load(name)
    result = scenario.search("best_first")
    assert result.best is not None
    tie = find_tie(scenario, result.best, result.trials, start_timer(None))
    if tie is None:
        return
    best = forecast_plan(scenario.problem, result.best.plan)
    assert tie.step_time <= (1 + TOLERANCE) * result.best.evaluation.step_time
    assert tie.step_time == pytest.approx(scenario.simulate(tie.plan).step_time)
    risks = tie.forecast.out_of_memory, best.out_of_memory
    assert risks[0] <= risks[1] + RISK_STEP and tie.forecast.fits
    assert tie.forecast.device <= (1 + MEMORY_STEP) * best.device or risks[0] < risks[1]


def test_a_trial_that_takes_less_is_told() -> None:
    """Of two equally fast trials the one with less memory is told; one that is 1 % slower is not."""
    scenario = load("tensor-parallel")
    result = scenario.search("best_first")
    best, own = result.best, scenario.plan
    assert best is not None and own is not None
    hungry = Trial(best.plan, replace(best.evaluation, step_time=1e-3), 0.0)  # faster than any neighbour
    plans = [trial.plan for trial in result.trials if trial.plan != best.plan]
    memory = {plan: forecast_plan(scenario.problem, plan).device for plan in plans}
    frugal_plan = min(memory, key=memory.__getitem__)
    assert memory[frugal_plan] < 0.9 * forecast_plan(scenario.problem, best.plan).device
    for time, is_told in ((1.004e-3, True), (1.01e-3, False)):
        frugal = Trial(frugal_plan, replace(best.evaluation, step_time=time), 0.0)
        tie = find_tie(scenario, hungry, [hungry, frugal], start_timer(None))
        assert (tie is not None and tie.plan == frugal_plan) is is_told
        if is_told:
            assert tie is not None and tie.slower == pytest.approx(0.004) and "0.4% slower" in tie.describe()


def test_neighbours_of_a_plan_that_cuts_operators_are_none_of_a_layout() -> None:
    """What one operator has of a plan no layout says; its tensor communication may run beside products all the same."""
    scenario = load("operators/mlp")
    problem = scenario.problem
    operators = {block.name: block.operators[0] for block in problem.graph.blocks}
    name, operator = next(iter(operators.items()))
    dim = operator.dims[0][0]
    cut = (OperatorSharding(f"{name}.{operator.name}", ((dim, (TENSOR,)),)),)
    plan = replace(build_operator_plan(problem, {TENSOR: 8}, 512, cut), overlap_tensor=True)
    assert cuts_operators(problem, plan)
    best = Trial(plan, Evaluation(1.0, 1.0, fits=True), 0.0)
    assert find_tie(scenario, best, [best], start_timer(None)) is None
