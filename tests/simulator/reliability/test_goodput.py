from dataclasses import replace
from math import exp, sqrt

import pytest

from meshwise.simulator.reliability.failures import Component, Failure, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.goodput import Goodput, goodput
from meshwise.simulator.reliability.job import replay_failures
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

from .reference import NEVER, expected_goodput

DAY = 86400.0


def job(mtbf: float, checkpoint: Checkpoint, recovery: Recovery, restart: Restart = Restart.IN_PLACE) -> LongRun:
    """Return a run of 2000 mean times between failures with steps of 5 s."""
    model = FailureModel("one rate", (FailureRate(FailureKind.SOFTWARE, mtbf, Component.JOB, restart),))
    return LongRun(5.0, 8, 1, model, checkpoint, recovery, duration=2000 * mtbf)


CASES = [
    job(3 * 3600.0, Checkpoint(1800.0, 60.0, 60.0, 120.0), Recovery(60.0, 300.0, 0.0)),  # synchronous
    job(3 * 3600.0, Checkpoint(600.0, 1.0, 300.0, 120.0), Recovery(60.0, 300.0, 0.0)),  # asynchronous
    job(3 * 3600.0, Checkpoint(200.0, 1.0, 300.0, 120.0), Recovery(60.0, 300.0, 0.0)),  # saving is the bottleneck
    job(1800.0, Checkpoint(1200.0, 60.0, 200.0, 300.0), Recovery(300.0, 600.0, 0.0)),  # hardly any progress
]


@pytest.mark.parametrize("run", CASES, ids=["synchronous", "asynchronous", "slow save", "hopeless"])
def test_simulated_goodput_is_what_renewal_theory_expects(run: LongRun) -> None:
    result = goodput(run, runs=8)
    assert result.mean == pytest.approx(expected_goodput(run), abs=4 * result.standard_error)
    assert result.standard_error < 0.01


def test_expected_goodput_of_synchronous_checkpoints_is_dalys_complete_model() -> None:
    # time for one interval of work w with a checkpoint of d s: M exp(R / M) (exp((w + d) / M) - 1)
    run = CASES[0]
    mtbf, work, blocking, recovery = 10800.0, 1800.0, 60.0, 480.0
    wall = mtbf * exp(recovery / mtbf) * (exp((work + blocking) / mtbf) - 1)
    assert expected_goodput(run) == pytest.approx(work / wall, rel=1e-12)


def test_without_failures_only_checkpoints_cost() -> None:
    # 360 steps of 5 s and 60 s standing still in turn: 1800 / 1860
    run = replace(CASES[0], failures=NEVER, duration=100 * 1860.0)
    result = goodput(run, runs=2)
    assert result.mean == pytest.approx(1800 / 1860, rel=1e-12)
    assert result.standard_error == 0
    assert expected_goodput(run) == pytest.approx(1800 / 1860, rel=1e-12)


def test_a_failure_costs_recovery_and_on_average_half_an_interval_where_failures_are_rare() -> None:
    """Kokolis et al. (arXiv:2410.21680): (1 - rate (u0 + dt / 2)) / (1 + w / dt), to first order in the rate."""
    u0, write, interval = 300.0, 300.0, 3600.0
    for mtbf in (100 * DAY, 1000 * DAY):
        run = job(mtbf, Checkpoint(interval, write, write, 0.0), Recovery(0.0, u0, 0.0))
        rate = 1 / mtbf
        published = (1 - rate * (u0 + interval / 2)) / (1 + write / interval)
        # the formula leaves out what checkpoints cut off lose: rate * write / 2 and terms of second order
        assert expected_goodput(run) == pytest.approx(published, abs=2 * rate * write)


def test_more_spares_and_faster_repair_wait_less() -> None:
    base = job(6 * 3600.0, Checkpoint(600.0, 5.0, 60.0, 60.0), Recovery(60.0, 300.0, DAY), Restart.REPLACE_HOST)
    base = replace(base, duration=500 * 6 * 3600.0)
    waits = [goodput(replace(base, spares=spares), runs=2).average("waiting") for spares in (0, 2, 4, 20)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0
    assert waits[-1] == 0  # 4 hosts are in repair on average; 20 are enough
    replaced = replace(base, recovery=replace(base.recovery, replacement=3600.0))
    assert goodput(replaced, runs=2).average("waiting") < waits[0]


def test_the_mean_and_its_standard_error_by_hand() -> None:
    run = replace(CASES[0], failures=NEVER, duration=1000.0)
    outcomes = tuple(
        replay_failures(run, [Failure(time, FailureKind.HOST, Restart.IN_PLACE) for time in times])
        for times in ([], [500.0], [500.0, 980.0])
    )
    # 200 steps; then 1000 - 500 - 480 = 20 s, 4 steps, count; then none
    assert [outcome.goodput for outcome in outcomes] == [1.0, 0.02, 0.0]
    result = Goodput(run, outcomes)
    mean = 1.02 / 3
    variance = ((1 - mean) ** 2 + (0.02 - mean) ** 2 + mean**2) / 2
    assert result.mean == pytest.approx(mean)
    assert result.standard_error == pytest.approx(sqrt(variance / 3))
    assert result.interruptions() == result.interruptions(FailureKind.HOST) == 1
    document = result.to_json()
    assert document["interruptions_by_kind"]["host"] == 1
    parts = ("useful", "lost", "checkpointing", "recovering", "waiting")
    assert sum(document[part] for part in parts) == pytest.approx(document["wall_time"])
    assert document["events"] == []


def test_one_run_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        goodput(CASES[0], runs=1)
