"""Mist's mixed integer program, against all layers and points there are."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.stages.integer_programs import Points, formula, inter_stage

POINT = st.tuples(st.integers(1, 9).map(float), st.integers(0, 9).map(float))
STAGE = st.dictionaries(st.integers(1, 3), st.lists(POINT, min_size=1, max_size=2), min_size=1, max_size=3)


@given(st.lists(STAGE, min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_the_choice_is_least_of_all(stages: list[Points], layers: int, microbatches: int) -> None:
    rows = [[(n, point) for n, points in stage.items() for point in points] for stage in stages]
    every = [
        formula([point for _, point in choice], microbatches)
        for choice in product(*rows)
        if sum(n for n, _ in choice) == layers
    ]
    found = inter_stage(stages, layers, microbatches)
    assert (found is None) == (not every)
    if found is not None:
        assert sum(found.counts) == layers
        assert found.time == pytest.approx(min(every), rel=1e-6)
