"""The figures of a simulated step agree with each other."""

from dataclasses import replace

import pytest

from meshwise import load
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.simulation import simulate_plan
from meshwise.strategies.plan.recomputation import Recompute


@pytest.fixture(scope="module")
def small() -> Scenario:
    return load("local/dp2-tp2-pp2")


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
    plain = simulate_plan(
        scenario.problem, replace(scenario.choose_plan(), recompute=Recompute.NONE), "discrete_event", ()
    )
    again = scenario.simulate()
    assert again.step_time > plain.step_time
    ratio = plain.step_time / again.step_time
    assert again.model_flops_per_second_per_device == pytest.approx(plain.model_flops_per_second_per_device * ratio)
