from itertools import islice, takewhile
from math import sqrt
from statistics import fmean

import numpy as np
import pytest

from meshwise.simulator.reliability.failures import Component, FailureKind, FailureModel, FailureRate, Restart

DAY = 86400.0
DEVICE = FailureRate(FailureKind.DEVICE, 1000 * DAY, Component.DEVICE, Restart.REPLACE_HOST)
HOST = FailureRate(FailureKind.HOST, 500 * DAY, Component.HOST, Restart.REPLACE_HOST)
SOFTWARE = FailureRate(FailureKind.SOFTWARE, 10 * DAY, Component.JOB, Restart.IN_PLACE)
MODEL = FailureModel("three", (DEVICE, HOST, SOFTWARE))
SHARES = {FailureKind.DEVICE: 0.4, FailureKind.HOST: 0.1, FailureKind.SOFTWARE: 0.5}
"""Of the failures of 80 devices on 10 hosts."""


def test_rates_of_independent_components_add_up() -> None:
    # a day: 80 devices / 1000 = 0.08, 10 hosts / 500 = 0.02, one job / 10 = 0.1; together 0.2
    assert MODEL.rate(devices=80, hosts=10) * DAY == pytest.approx(0.2)
    assert MODEL.mtbf(devices=80, hosts=10) / DAY == pytest.approx(5)
    shares = {rate.kind: rate.rate(80, 10) / MODEL.rate(80, 10) for rate in MODEL.rates}
    assert shares == pytest.approx(SHARES)


def test_the_number_of_failures_is_poisson_and_their_kinds_are_competing_risks() -> None:
    expected, runs = 200, 200  # 1000 days at 0.2 a day
    counts = []
    kinds = dict.fromkeys(FailureKind, 0)
    for run in range(runs):
        found = list(takewhile(lambda failure: failure.time < 1000 * DAY, MODEL.draw_failures(80, 10, seed=1, run=run)))
        counts.append(len(found))
        for failure in found:
            kinds[failure.kind] += 1
    # a Poisson count has variance = mean; the variance of n samples of it is known to about sqrt(2 / n)
    assert fmean(counts) == pytest.approx(expected, abs=4 * sqrt(expected / runs))
    assert np.var(counts, ddof=1) == pytest.approx(expected, rel=4 * sqrt(2 / runs))
    total = sum(counts)
    for kind, share in SHARES.items():
        assert kinds[kind] == pytest.approx(share * total, abs=4 * sqrt(share * (1 - share) * total))


def test_a_job_fails_as_soon_as_the_first_of_its_components() -> None:
    runs = 4000
    generator = np.random.default_rng(7)
    lives = [(DEVICE.mtbf, 80), (HOST.mtbf, 10), (SOFTWARE.mtbf, 1)]
    firsts = np.min([generator.exponential(mtbf, (runs, count)).min(axis=1) for mtbf, count in lives], axis=0)
    drawn = [next(MODEL.draw_failures(80, 10, seed=2, run=run)).time for run in range(runs)]
    # both means are 5 days, each with a standard error of 5 / sqrt(runs)
    assert fmean(drawn) == pytest.approx(firsts.mean(), abs=4 * sqrt(2 / runs) * 5 * DAY)


def test_a_seed_and_a_run_fix_the_failures() -> None:
    first, again = (list(islice(MODEL.draw_failures(80, 10, seed=3, run=1), 600)) for _ in range(2))
    assert first == again
    assert [failure.time for failure in first] == sorted(failure.time for failure in first)
    assert first[:9] != list(islice(MODEL.draw_failures(80, 10, seed=3, run=2), 9))
    assert first[:9] != list(islice(MODEL.draw_failures(80, 10, seed=4, run=1), 9))


def test_the_restart_is_that_of_the_kind() -> None:
    restarts = {(failure.kind, failure.restart) for failure in islice(MODEL.draw_failures(80, 10, seed=0), 200)}
    assert restarts == {(rate.kind, rate.restart) for rate in MODEL.rates}


@pytest.mark.parametrize("mtbf", [0.0, -1.0, float("inf"), float("nan")])
def test_a_mean_time_that_is_none_is_refused(mtbf: float) -> None:
    with pytest.raises(ValueError, match=r"mtbf of host failures is above 0"):
        FailureRate(FailureKind.HOST, mtbf, Component.HOST, Restart.REPLACE_HOST)


def test_a_model_without_rates_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rate"):
        FailureModel("none", ())
