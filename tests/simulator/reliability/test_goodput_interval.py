from dataclasses import replace
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.reliability.failures import Component, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.goodput import best_interval, daly_interval, young_interval
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

from .reference import expected_goodput


def wall_time(work: float, cost: float, mtbf: float) -> float:
    """Return the time for one second of work in Daly's complete model, without the factor of recovery."""
    return mtbf * (exp((work + cost) / mtbf) - 1) / work


def exact_interval(cost: float, mtbf: float) -> float:
    """Return where the derivative of `wall_time` is 0: 1 - x = exp(-x - cost / mtbf) with x = work / mtbf."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle > exp(-middle - cost / mtbf) else (low, middle)
    return low * mtbf


costs = st.floats(1e-6, 0.5)
"""Cost of a checkpoint over the mean time between failures."""


@settings(max_examples=1000, deadline=None)
@given(costs, st.floats(1.0, 1e7))
def test_dalys_interval_costs_a_thousandth_of_the_wall_time_more_than_the_exact_one(cost: float, mtbf: float) -> None:
    best = wall_time(exact_interval(cost * mtbf, mtbf), cost * mtbf, mtbf)
    assert best <= wall_time(daly_interval(cost * mtbf, mtbf), cost * mtbf, mtbf) * (1 + 1e-12)
    assert wall_time(daly_interval(cost * mtbf, mtbf), cost * mtbf, mtbf) < 1.001 * best


@settings(max_examples=1000, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1.0, 1e7))
def test_youngs_interval_is_as_good_where_checkpoints_are_cheap(cost: float, mtbf: float) -> None:
    # relative error of the interval: sqrt(2 cost / mtbf) / 3 to leading order, at most 4.7 % here
    exact = exact_interval(cost * mtbf, mtbf)
    assert young_interval(cost * mtbf, mtbf) == pytest.approx(exact, rel=1.2 * (2 * cost) ** 0.5 / 3 + 1e-6)
    assert wall_time(young_interval(cost * mtbf, mtbf), cost * mtbf, mtbf) < 1.001 * wall_time(exact, cost * mtbf, mtbf)


def test_daly_ends_where_a_checkpoint_takes_as_long_as_two_lives() -> None:
    assert daly_interval(cost=2.0, mtbf=1.0) == daly_interval(cost=9.0, mtbf=1.0) == 1.0


def run(checkpoint: Checkpoint, mtbf: float = 3600.0, days: float = 15) -> LongRun:
    model = FailureModel("job", (FailureRate(FailureKind.SOFTWARE, mtbf, Component.JOB, Restart.IN_PLACE),))
    return LongRun(2.0, 8, 1, model, checkpoint, Recovery(30.0, 60.0, 0.0), duration=days * 86400)


@pytest.mark.parametrize("save", [20.0, 120.0])
def test_the_search_finds_the_interval_of_the_closed_forms(save: float) -> None:
    # cost 20 s, mtbf 3600 s: Young 379 s, Daly 366 s. The optimum is flat: at 1.3 times that interval goodput is
    # 0.3 points lower, so that chance moves the interval by tens of percent and the goodput by next to nothing.
    base = run(Checkpoint(60.0, 20.0, save, 30.0))
    best = best_interval(base, runs=4)
    daly = daly_interval(20.0, 3600.0)
    assert daly / 1.6 < best.interval < daly * 1.6
    assert expected_goodput(base.with_interval(best.interval)) == pytest.approx(
        expected_goodput(base.with_interval(daly)), abs=0.003
    )
    assert best.goodput.mean == max(goodput.mean for goodput in best.candidates)
    intervals = [goodput.run.checkpoint.interval for goodput in best.candidates]
    assert intervals == sorted(set(intervals))
    # golden sections close in: both neighbours of the best are within a tenth
    place = intervals.index(best.interval)
    assert intervals[place + 1] < 1.1 * best.interval < 1.1 * 1.1 * intervals[place - 1]


def test_saving_that_takes_longer_does_not_move_the_best_interval_but_costs_goodput() -> None:
    quick, slow = (run(Checkpoint(60.0, 20.0, save, 30.0)) for save in (20.0, 120.0))
    grid = [20.0 * steps for steps in range(8, 40)]  # all longer than a save
    for base in (quick, slow):
        best = max(grid, key=lambda interval: expected_goodput(base.with_interval(interval)))
        assert best == pytest.approx(exact_interval(20.0, 3600.0), abs=10.0)
    assert expected_goodput(slow.with_interval(360.0)) < expected_goodput(quick.with_interval(360.0))


def test_no_interval_pays_that_is_shorter_than_a_save() -> None:
    base = run(Checkpoint(60.0, 0.5, 300.0, 30.0))  # Young: 60 s
    assert best_interval(base, runs=2).interval >= 290.0


def test_free_checkpoints_are_taken_after_every_step() -> None:
    base = run(Checkpoint(60.0, 0.0, 0.0, 30.0), days=5)
    assert best_interval(base, runs=2).interval == base.step_time


def test_a_run_given_by_steps_is_searched_too() -> None:
    base = replace(run(Checkpoint(60.0, 20.0, 20.0, 30.0)), duration=None, steps=50_000)
    best = best_interval(base, runs=2)
    assert best.goodput.run == base.with_interval(best.interval)
    assert {outcome.steps for outcome in best.goodput.outcomes} == {50_000}
