"""Makespans of many microbatches from runs of a few, on pipelines with their own recurrence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.extrapolation import extrapolated_makespan, recurrence
from simulator.engine.longest_path import finish_times

from .pipelines import Recurrence, gpipe, one_f_one_b, pipeline

SPREADS = {"uniform": (100, 100), "a tenth": (90, 110), "wild": (1, 1000)}


def durations(stages: int, spread: str, seed: int) -> tuple[list[int], list[int], int, list[int]]:
    random = np.random.default_rng(seed)
    low, high = SPREADS[spread]
    forward, backward, tail = random.integers(low, high + 1, (3, stages)).tolist()
    return forward, [2 * ticks for ticks in backward], int(random.integers(0, 30)), tail


@settings(max_examples=1000, deadline=None)
@given(st.integers(2, 8), st.integers(1, 512), st.sampled_from(sorted(SPREADS)), st.integers(0, 2**32))
def test_one_f_one_b_is_extrapolated_exactly(stages: int, microbatches: int, spread: str, seed: int) -> None:
    case = Recurrence(one_f_one_b, *durations(stages, spread, seed))
    found = extrapolated_makespan(case.rows, microbatches, stages)
    assert found is None or found == case.rows(microbatches)[1]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("spread", ["uniform", "a tenth"])
def test_it_is_found_by_simulating_a_fraction(stages: int, spread: str) -> None:
    case = Recurrence(one_f_one_b, *durations(stages, spread, 1))
    assert extrapolated_makespan(case.rows, 4096, stages) is not None
    assert case.simulated < 2048


@given(st.integers(2, 6), st.sampled_from(sorted(SPREADS)), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_gpipe_is_not_extrapolated(stages: int, spread: str, seed: int) -> None:
    # its first backward waits for the last forward: equal forwards and backwards would even look periodic
    forward, backward, send, tail = durations(stages, spread, seed)
    for behind in (backward, forward):
        case = Recurrence(gpipe, forward, behind, send, tail)
        assert extrapolated_makespan(case.rows, 300, stages) is None


def test_what_hides_the_period_at_first_is_noticed() -> None:
    # something beside the pipeline lasts 10,000 ticks: shorter runs end with it, and tell nothing of longer ones
    case = Recurrence(one_f_one_b, [10, 10], [20, 20], 0, [0, 0])

    def rows(count: int) -> tuple[np.ndarray, int]:
        ends, makespan = case.rows(count)
        return ends, max(makespan, 10_000)

    assert rows(500)[1] > 10_000
    assert extrapolated_makespan(rows, 500, 2) is None


def test_rows_that_depend_on_how_many_follow_are_noticed() -> None:
    case = Recurrence(one_f_one_b, [10, 10], [20, 20], 0, [0, 0])

    def rows(count: int) -> tuple[np.ndarray, int]:
        ends, makespan = case.rows(count)
        return ends + count, makespan

    assert extrapolated_makespan(case.rows, 500, 2) == case.rows(500)[1]
    assert extrapolated_makespan(rows, 500, 2) is None


def test_few_microbatches_are_not_worth_it() -> None:
    case = Recurrence(one_f_one_b, [10, 10], [20, 20], 0, [0, 0])
    assert extrapolated_makespan(case.rows, 20, 2) is None
    assert case.simulated == 0


def test_a_recurrence_is_the_earliest_repetition() -> None:
    assert recurrence(np.array([[0, 5], [3, 9], [6, 13]]), 1) is None
    found = recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 2)
    assert found is None or found.period == 2
    assert recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 1) == (0, 2, 3)


def test_the_recurrence_of_these_tests_is_the_engines() -> None:
    case = Recurrence(one_f_one_b, [10, 13, 11], [21, 25, 22], 3, [0, 0, 0])
    step = pipeline(3, 9, case.forward, case.backward, case.send)
    assert finish_times(step)[1].max() == case.rows(9)[1]
