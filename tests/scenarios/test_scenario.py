from dataclasses import replace
from pathlib import Path

import pytest

from meshwise import load
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.space import Space


def test_search_returns_a_proven_plan_and_compare_all_algorithms() -> None:
    from meshwise.strategies.search.algorithms import ALGORITHMS, NEEDED_PACKAGES

    for package in NEEDED_PACKAGES.values():
        pytest.importorskip(package, reason="one algorithm needs it")

    scenario = load("local/dp2")
    found = scenario.search("exhaustive")
    assert found.gap == 0
    assert found.best is not None
    assert found.best.evaluation.step_time <= scenario.simulate().step_time
    results = scenario.compare(budget=3)
    assert [result.algorithm for result in results] == list(ALGORITHMS)
    assert all(result.evaluations <= 3 for result in results)


def test_limits_of_the_space_hold() -> None:
    scenario = load("local/dp2")
    settings = replace(scenario.search_settings, space=(("tensor", (2,)), ("recompute", ("full",))))
    found = replace(scenario, search_settings=settings).search("exhaustive")
    assert found.best is not None
    assert found.best.plan.tensor == 2
    assert found.best.plan.recompute is Recompute.FULL


def test_a_space_is_the_word_wide_or_limits_of_any_field(tmp_path: Path) -> None:
    from meshwise.strategies.plan.offloading import Offloading
    from meshwise.strategies.plan.recomputation import FirstLayers

    given = (Path(__file__).parents[2] / "scenarios/local/dp2.yaml").read_text().split("\nsearch:")[0]
    (tmp_path / "wide.yaml").write_text(given + "search: {space: wide}\n")
    assert load(tmp_path / "wide.yaml").search_settings.make_space() == Space(wide=True)
    limits = (
        "{stages: [paced], recompute: [none, {full: 2}], offload: [[], [optimizer]], order: [[data, pipeline, tensor]]}"
    )
    (tmp_path / "limits.yaml").write_text(given + f"search: {{space: {limits}}}\n")
    assert load(tmp_path / "limits.yaml").search_settings.make_space() == Space(
        stages=("paced",),
        recompute=(Recompute.NONE, FirstLayers(Recompute.FULL, 2)),
        offload=(Offloading(), Offloading(optimizer=(1.0,))),
        order=(("data", "pipeline", "tensor"),),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch": 0}, "plan: microbatch: microbatch is at least 1, met 0"),
        ({"zero": 7}, "plan: zero: zero is 0, 1, 2 or 3, met 7; nearest: 3"),
        ({"num_microbatches": 3}, "plan: num_microbatches: num_microbatches follows from the scenario: .*, met 3"),
    ],
)
def test_a_plan_that_is_none_of_the_scenario_is_refused(change: dict[str, int], message: str) -> None:
    scenario = load("local/dp2")
    plan = replace(scenario.choose_plan(), **change)
    with pytest.raises(ValueError, match=message):
        scenario.simulate(plan)


@pytest.mark.parametrize(
    ("algorithm", "options"), [("joint", "spread"), ("uniap", "seconds, gap"), ("exhaustive", "none")]
)
def test_an_unknown_option_is_told_the_options_there_are(algorithm: str, options: str) -> None:
    scenario = load("local/dp2")
    settings = replace(scenario.search_settings, algorithm=algorithm, options=(("name", "x"),))
    with pytest.raises(ValueError, match=f"^name: {algorithm} has the options {options}$"):
        settings.make_algorithm()


def test_a_plan_of_the_scenario_with_another_decision_is_simulated() -> None:
    scenario = load("local/dp2")
    recomputed = replace(scenario.choose_plan(), recompute=Recompute.FULL)
    assert scenario.simulate(recomputed).step_time > scenario.simulate().step_time


def test_a_layout_is_simulated_as_the_plan_that_it_completes_to() -> None:
    scenario = load("local/dp2")
    layout = Layout(data=2, microbatch=1, recompute=Recompute.FULL)
    assert scenario.simulate(layout).step_time == scenario.simulate(complete(scenario.problem, layout)).step_time
    assert scenario.simulate(replace(layout, recompute="full")).step_time == scenario.simulate(layout).step_time
    with pytest.raises(ValueError, match="recompute"):
        scenario.simulate(replace(layout, recompute="most"))
    with pytest.raises(ValueError, match="data: data\\(3\\)"):
        scenario.simulate(replace(layout, data=3))
