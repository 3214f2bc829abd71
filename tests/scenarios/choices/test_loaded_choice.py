"""The plan that is best under loads that vary: of those compared the best, and not always that of full sequences."""

from dataclasses import replace

import pytest

from meshwise import load
from meshwise.scenarios.choices.loaded_choice import MOST_WEIGHED, weigh_result
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.loads.lengths import Lengths
from meshwise.strategies.loads.loads import Loads
from meshwise.strategies.search.driver import INTERRUPTED


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    value = load("varying-lengths")
    space = (("tensor", (1,)), ("pipeline", (1,)), ("context", (1,)), ("zero", (1,)), ("recompute", ("none",)))
    return replace(value, search_settings=replace(value.search_settings, space=space))


def test_the_choice_is_the_best_of_those_compared(scenario: Scenario) -> None:
    best = scenario.search_plan("best_first").best
    assert best is not None
    choice = scenario.choose_loaded(best)
    assert choice.is_finished and choice.best is not None
    highs = [plan.loads.high for plan in choice.ranked]
    assert highs == sorted(highs) and len(highs) == MOST_WEIGHED
    # the same steps as a simulation of the chosen plan tells
    loads = scenario.simulate(choice.best.trial.plan).loads
    assert loads == choice.best.loads
    # full sequences fit, and no plan of them is faster than the best of the search
    assert all(plan.trial.evaluation.fits for plan in choice.ranked)
    assert all(plan.trial.evaluation.step_time >= best.evaluation.step_time for plan in choice.ranked)
    # the best plan of full sequences pads many samples to the longest of them; one a microbatch has no padding
    assert (best.plan.microbatch, choice.best.trial.plan.microbatch) == (16, 1)
    assert choice.best.loads.padding == 0
    assert choice.best.loads.high < scenario.make_loaded_costs().weigh(best.plan).high


def test_a_search_from_python_returns_the_choice(scenario: Scenario) -> None:
    found, ordinary = scenario.search("best_first", seconds=600.0), scenario.search_plan("best_first")
    assert ordinary.best is not None and found.best is not None
    choice = scenario.choose_loaded(ordinary.best)
    assert choice.best is not None and found.best.plan == choice.best.trial.plan
    assert found.best.evaluation == choice.best.trial.evaluation
    # the gap is that of full sequences: to the proven best of them
    assert ordinary.gap == 0
    assert found.gap == found.best.evaluation.step_time / ordinary.best.evaluation.step_time - 1  # type: ignore[union-attr]


def test_an_interrupt_keeps_the_plan_of_full_sequences(scenario: Scenario) -> None:
    def interrupt() -> float:
        raise KeyboardInterrupt

    result = scenario.search_plan("best_first")
    assert weigh_result(scenario, result, interrupt) == (replace(result, end=INTERRUPTED), None)


def test_full_sequences_choose_the_plan_of_the_search(scenario: Scenario) -> None:
    full = replace(scenario, loads=Loads(Lengths((2048,), (1.0,))))
    best = full.search_plan("best_first").best
    assert best is not None
    choice = full.choose_loaded(best)
    assert choice.best is not None and choice.best.loads.high == best.evaluation.step_time
    assert {plan.loads.num_simulated for plan in choice.ranked} == {1}


def test_without_time_the_best_of_the_search_is_weighed_alone(scenario: Scenario) -> None:
    best = scenario.search_plan("best_first").best
    assert best is not None
    choice = scenario.choose_loaded(best, seconds=0.0)
    assert not choice.is_finished
    assert [plan.trial.plan for plan in choice.ranked] == [best.plan]


def test_nothing_that_varies_is_nothing_to_choose() -> None:
    value = load("tensor-parallel")
    with pytest.raises(ValueError, match="loads: draws need a load that varies, met none"):
        value.make_loaded_costs()
