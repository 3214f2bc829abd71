"""A plan as fast as the best takes less of something, and no more of what comes before it."""

from dataclasses import replace

import pytest

from meshwise.scenarios.choices.ties import MEMORY_STEP, RISK_STEP, TOLERANCE, find_tie
from meshwise.scenarios.fitting import start_timer
from meshwise.scenarios.loader import load
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.strategies.evaluation import Trial


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


def test_a_trial_that_takes_less_is_found_without_neighbours() -> None:
    """Of two equally fast trials the one with less memory is told; one that is 1 % slower is not."""
    scenario = load("gpt3-175b-1024-a100")
    best = scenario.search("best_first", seconds=5.0).best
    assert best is not None and scenario.plan is not None
    frugal = Trial(scenario.plan, replace(best.evaluation, step_time=1.004 * best.evaluation.step_time), 0.0)
    slow = Trial(scenario.plan, replace(best.evaluation, step_time=1.01 * best.evaluation.step_time), 0.0)
    tie = find_tie(scenario, best, [best, frugal], lambda: 0.0)
    assert tie is not None and tie.plan == scenario.plan and tie.saved > 0
    assert tie.slower == pytest.approx(0.004) and "0.4% slower" in tie.describe()
    assert find_tie(scenario, best, [best, slow], lambda: 0.0) is None
