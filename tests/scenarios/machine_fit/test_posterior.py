"""The posterior of factors: one by hand, and what holds of any runs."""

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.machine_fit.posterior import Prior, fit_posterior, load_prior
from meshwise.scenarios.machine_fit.shares import PARTS, MeasuredStep, build_table
from meshwise.simulator.machine.factors import FACTORS, Factors

PRIOR = Prior((0.0,) * len(FACTORS), (0.2,) * len(FACTORS), 0.1)
COMPUTE = (1.0,) + (0.0,) * (len(PARTS) - 1)
"""Shares of a step that is all arithmetic."""


def step(ratio: float, shares: tuple[float, ...] = COMPUTE, plan: object = None) -> MeasuredStep:
    """Return a step of which ln(measured / predicted) is ``ratio``; by default a plan of its own."""
    return MeasuredStep("run", object() if plan is None else plan, exp(ratio), 1.0, shares)


@st.composite
def steps(draw, fewest: int = 1) -> list[MeasuredStep]:
    """Draw steps of different plans that agree with some factors to within a part of the residual."""
    factors = np.array(draw(st.lists(st.floats(-0.3, 0.3), min_size=len(FACTORS), max_size=len(FACTORS))))
    found = []
    for number in range(draw(st.integers(fewest, 8))):
        parts = np.array(draw(st.lists(st.floats(0.01, 1.0), min_size=len(PARTS), max_size=len(PARTS))))
        shares = tuple((parts / parts.sum()).tolist())
        moved = build_table([step(0.0, shares)]).extrapolate(factors)[0][0]
        found.append(step(float(moved) + draw(st.floats(-0.05, 0.05)), shares, plan=number))
    return found


def test_one_run_that_is_all_arithmetic_by_hand() -> None:
    """Only arithmetic may move: its logarithm has the prior 0 +- 0.2, the run says 0.1 +- 0.1.

    Precisions are 1 / 0.04 = 25 and 1 / 0.01 = 100, so that the mean is 100 * 0.1 / 125 = 0.08 and the variance
    1 / 125 = 0.008. The run is 0.02 off, and 4 runs' worth of prior say 0.1: the square of the residual is
    (4 * 0.01 + 0.02^2 + 0.008) / 5 = 0.00968.
    """
    known = {name: (1.0, 1e-9) for name in FACTORS if name != "compute"}
    posterior = fit_posterior([step(0.1)], PRIOR.know_factors(known))
    assert posterior.means[0] == pytest.approx(0.08)
    assert posterior.factors.compute == pytest.approx(exp(0.08))
    assert posterior.deviations[0] == pytest.approx(sqrt(0.008))
    assert posterior.residual == pytest.approx(sqrt(0.00968))


def test_two_factors_on_the_same_step_share_what_it_says() -> None:
    """Arithmetic and the whole step: 0.1 / (0.04 + 0.04 + 0.01) * 0.04 each, and they are known together, not apart."""
    known = {name: (1.0, 1e-9) for name in FACTORS if name not in ("compute", "other")}
    posterior = fit_posterior([step(0.1)], PRIOR.know_factors(known))
    assert posterior.means[[0, -1]] == pytest.approx(0.1 / 0.09 * 0.04)
    assert posterior.covariance[0, -1] < 0
    together = posterior.find_spreads([step(0.0)])[0]
    assert together**2 == pytest.approx(0.08 - 0.08**2 / 0.09)


def test_without_runs_the_posterior_is_the_prior() -> None:
    prior = load_prior()
    posterior = fit_posterior([], prior)
    assert posterior.means == pytest.approx(prior.means)
    assert posterior.deviations == pytest.approx(prior.deviations)
    assert posterior.residual == pytest.approx(prior.residual)
    assert posterior.covariance == pytest.approx(np.diag(np.square(prior.deviations)))


@given(steps(), st.randoms())
@settings(max_examples=50, deadline=None)
def test_the_order_of_runs_does_not_matter(runs, random) -> None:
    shuffled = random.sample(runs, len(runs))
    first, second = fit_posterior(runs, PRIOR), fit_posterior(shuffled, PRIOR)
    assert first.means == pytest.approx(second.means, abs=1e-7)
    assert first.covariance == pytest.approx(second.covariance, abs=1e-7)
    assert first.residual == pytest.approx(second.residual)


@given(steps(fewest=2))
@settings(max_examples=50, deadline=None)
def test_more_runs_that_agree_never_widen(runs) -> None:
    """Slopes move with the factors, so that the law is exact for one vector of slopes: here for all steps alike."""
    alike = [replace(run, shares=COMPUTE) for run in runs]
    spreads = [
        float(fit_posterior(alike[:count], replace(PRIOR, residual=1.0)).find_spreads([step(0.0)])[0])
        for count in range(len(alike) + 1)
    ]
    assert spreads == sorted(spreads, reverse=True)
    deviations = [fit_posterior(runs[:count], PRIOR).deviations for count in (0, len(runs))]
    assert (deviations[1] <= deviations[0] * (1 + 1e-9)).all()


@given(steps(), st.integers(2, 5))
@settings(max_examples=50, deadline=None)
def test_a_repeated_run_counts_once(runs, repeats) -> None:
    once, often = fit_posterior(runs, PRIOR), fit_posterior(runs * repeats, PRIOR)
    assert often.means.tolist() == once.means.tolist()
    assert often.covariance.tolist() == once.covariance.tolist()
    assert often.residual == once.residual


def test_a_new_plan_tells_more_than_a_repeated_one() -> None:
    repeated = fit_posterior([step(0.1, plan="a"), step(0.1, plan="a")], PRIOR)
    other = fit_posterior([step(0.1, plan="a"), step(0.1, plan="b")], PRIOR)
    assert other.find_spreads([step(0.0)])[0] < repeated.find_spreads([step(0.0)])[0]


def test_the_repeats_of_a_plan_are_their_median() -> None:
    repeats = [step(ratio, plan="a") for ratio in (0.1, 0.12, 3.0)]
    assert fit_posterior(repeats, PRIOR).means == pytest.approx(fit_posterior([step(0.12)], PRIOR).means)


def test_an_outlier_pulls_no_harder_however_far_it_is() -> None:
    agreed = [step(0.1) for _ in range(4)]
    plain = fit_posterior(agreed, PRIOR)
    far, farther = (fit_posterior([*agreed, step(log(factor))], PRIOR) for factor in (5.0, 500.0))
    assert far.means == pytest.approx(farther.means, abs=1e-6)
    # its force is that of an error of 1.345 residuals: of 5 runs at most 1.345 * 0.1 / 4 more
    assert 0 < build_table([step(0.0)]).extrapolate(far.means - plain.means)[0][0] < 1.345 * 0.1 / 4
    assert dict(far.weights) and min(weight for _, weight in far.weights) < 0.1


def test_scattered_runs_widen_the_residual_and_steady_ones_narrow_it() -> None:
    steady = fit_posterior([step(0.0) for _ in range(8)], PRIOR)
    scattered = fit_posterior([step(ratio) for ratio in (-0.3, 0.3) * 4], PRIOR)
    assert steady.residual < PRIOR.residual < scattered.residual


@given(steps(fewest=8))
@settings(max_examples=30, deadline=None)
def test_exact_runs_are_met_by_a_free_prior(runs) -> None:
    """With a wide prior and a narrow residual the factors say of the runs what was measured."""
    factors = np.linspace(-0.3, 0.3, len(FACTORS))
    exact = [replace(run, measured=exp(build_table([run]).extrapolate(factors)[0][0])) for run in runs]
    posterior = fit_posterior(exact, Prior((0.0,) * len(FACTORS), (10.0,) * len(FACTORS), 1e-4))
    assert build_table(exact).extrapolate(posterior.means)[0] == pytest.approx(build_table(exact).ratios, abs=1e-3)


def test_a_factor_stays_within_bounds() -> None:
    wide = Prior((0.0,) * len(FACTORS), (10.0,) * len(FACTORS), 1e-3)
    posterior = fit_posterior([step(log(1e9), plan=number) for number in range(3)], wide)
    assert isinstance(posterior.factors, Factors)


@pytest.mark.parametrize(
    "figures", [((0.0,), (0.2,) * len(FACTORS), 0.1), ((0.0,) * len(FACTORS), (0.0,) * len(FACTORS), 0.1)]
)
def test_a_prior_without_a_figure_is_refused(figures) -> None:
    with pytest.raises(ValueError, match="prior"):
        Prior(*figures)
