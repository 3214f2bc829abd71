"""Bills of runs, by hand; and cutoffs, beyond which no step time is better."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.search.objective import Bill, Objective, Rates, RunTerms

NODE = Rates(devices=8, price=16.0, power=8 * 700.0)
"""8 devices of 2 US dollars an hour and 700 W."""


def test_a_bill_by_hand() -> None:
    """1e9 tokens in batches of 1e6 are 1000 steps of 7.2 s: 2 hours of 16 dollars and of 5.6 kW."""
    bill = RunTerms(tokens=1e9, stated_batch=1e6).write_bill(NODE, 1e6, 7.2)
    assert (bill.steps, bill.seconds, bill.devices) == (1000, 7200, 8)
    assert (bill.cost, bill.energy) == (pytest.approx(32.0), pytest.approx(11.2))


def test_failures_make_a_run_longer_and_dearer() -> None:
    terms = RunTerms(tokens=1e9, stated_batch=1e6)
    whole, half = (terms.write_bill(NODE, 1e6, 7.2, goodput) for goodput in (1.0, 0.5))
    assert (half.seconds, half.cost) == (2 * whole.seconds, 2 * (whole.cost or 0))


def test_large_batches_need_more_tokens() -> None:
    """At the critical batch twice the tokens of small batches are needed, at three times that four times as many."""
    terms = RunTerms(tokens=2e9, stated_batch=1e6, critical_batch=1e6)
    assert terms.count_steps(1e6) == 2000  # the tokens are stated for this batch
    assert terms.count_steps(3e6) == pytest.approx(2e9 * (4 / 2) / 3e6)
    plain = RunTerms(tokens=2e9, stated_batch=1e6)
    assert plain.count_steps(3e6) == pytest.approx(2e9 / 3e6)


TIMES = st.floats(0.01, 100.0)


@given(
    st.sampled_from(Objective), TIMES, TIMES, st.integers(1, 64), st.integers(1, 64), st.sampled_from([inf, 3e5, 3e6])
)
def test_no_step_time_beyond_the_cutoff_is_better(
    objective: Objective, step_time: float, other_time: float, devices: int, other_devices: int, deadline: float
) -> None:
    terms = RunTerms(tokens=1e9, stated_batch=1e4, deadline=deadline)
    rates, other_rates = (Rates(count, 2.0 * count, 700.0 * count) for count in (devices, other_devices))
    best = terms.write_bill(rates, 1e4, step_time)
    cutoff = terms.find_cutoff(other_rates, 1e4, objective, best)
    bill = terms.write_bill(other_rates, 1e4, other_time)
    is_better = terms.is_met(bill) and _rank(bill, objective) < _rank(best, objective)
    if other_time > cutoff * (1 + 1e-9):
        assert not is_better
    if other_time < cutoff * (1 - 1e-9):
        assert is_better


def _rank(bill: Bill, objective: Objective) -> tuple[float, float]:
    return (float(bill.devices), bill.seconds) if objective is Objective.DEVICES else (bill.find_value(objective), 0.0)
