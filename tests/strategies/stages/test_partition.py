"""The divisions of layers that dynamic programs find, against all there are."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.stages.division import FloatArray
from meshwise.strategies.stages.dynamic_programs import least_bottleneck, least_sum, pivot, sum_and_slowest


@st.composite
def tables(draw: st.DrawFn) -> tuple[FloatArray, int]:
    stages, layers = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    each = st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, np.inf]), min_size=layers + 1, max_size=layers + 1)
    return np.array([draw(each) for _ in range(stages)]), layers


def divisions(times: FloatArray, layers: int) -> list[tuple[float, ...]]:
    """Return what the stages of every division take that is allowed."""
    counts = (c for c in product(range(layers + 1), repeat=len(times)) if sum(c) == layers)
    rows = (tuple(float(times[stage, n]) for stage, n in enumerate(c)) for c in counts)
    return [row for row in rows if np.isfinite(row).all()]


@given(tables(), st.integers(1, 9))
def test_every_formula_is_least_among_all_divisions(table: tuple[FloatArray, int], microbatches: int) -> None:
    times, layers = table
    rows = divisions(times, layers)
    formulas = [
        (least_sum(times, layers), sum),
        (least_bottleneck(times, layers), max),
        (sum_and_slowest(times, layers, microbatches), lambda row: sum(row) + (microbatches - 1) * max(row)),
        (
            pivot(times, layers, microbatches),
            lambda row: max(sum(row[:at]) + microbatches * each for at, each in enumerate(row)),
        ),
    ]
    for found, formula in formulas:
        assert (found is None) == (not rows)
        if found is not None:
            assert found.time == min(map(formula, rows))
            assert sum(found.counts) == layers
            assert found.time == formula(tuple(float(times[s, n]) for s, n in enumerate(found.counts)))
