"""Shares of steps: they sum to one, and what they say of slower machines is what a simulation says, or less."""

import numpy as np
import pytest

from meshwise.scenarios.machine_fit.shares import PARTS, MeasuredStep, build_table, measure_shares, predict_time
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.machine.factors import FACTORS, Factors

from .small_runs import RUNS


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["row_id"])
def test_shares_are_the_whole_step_and_predict_slower_machines(row) -> None:
    scenario = build_run(row).scenario
    assert scenario is not None
    problem, plan = scenario.problem, scenario.choose_plan()
    seconds, shares = measure_shares(problem, plan, Factors())
    assert sum(shares) == pytest.approx(1, abs=0.03)
    table = build_table([MeasuredStep("run", 0, seconds, seconds, shares)])
    for name in PARTS:
        logarithms = Factors(**{name: 1.3}).logarithms
        simulated = predict_time(problem, plan, logarithms) / seconds
        assert np.exp(table.extrapolate(logarithms)[0][0]) == pytest.approx(simulated, abs=0.03)


def test_steps_far_from_their_origin_move_by_what_is_between() -> None:
    """At an origin where arithmetic is twice as slow already, a factor of 2 on it changes nothing."""
    origin = Factors(compute=2.0)
    step = MeasuredStep("run", 0, 1.0, 1.0, (0.5, 0.5, 0, 0, 0, 0, 0), tuple(origin.logarithms))
    table = build_table([step])
    assert table.extrapolate(origin.logarithms)[0].tolist() == [0.0]
    assert np.exp(table.extrapolate(np.zeros(len(FACTORS)))[0][0]) == pytest.approx(0.5 * 0.5 + 0.5)


def test_slopes_are_the_differences_of_what_is_extrapolated() -> None:
    step = MeasuredStep("run", 0, 2.0, 1.0, (0.3, 0.2, 0.1, 0.1, 0.05, 0.1, 0.05))
    table = build_table([step])
    logarithms = np.linspace(-0.3, 0.4, len(FACTORS))
    differences = [
        (table.extrapolate(logarithms + move)[0][0] - table.extrapolate(logarithms - move)[0][0]) / 2e-6
        for move in 1e-6 * np.eye(len(FACTORS))
    ]
    assert table.extrapolate(logarithms)[1][0] == pytest.approx(differences, abs=1e-8)
