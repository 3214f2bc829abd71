"""Mixed integer programs against all there are: the least critical path, and layers and points of every stage."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.stages.integer_programs import (
    DivisionProgram,
    Points,
    compute_mist_time,
    round_parts,
    solve_inter_stage,
)
from meshwise.strategies.stages.tables import build_division_problem

from .test_tables import CASES, divisions, small

POINT = st.tuples(st.integers(1, 9).map(float), st.integers(0, 9).map(float))
STAGE = st.dictionaries(st.integers(1, 3), st.lists(POINT, min_size=1, max_size=2), min_size=1, max_size=3)


@given(st.lists(STAGE, min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_the_choice_is_least_of_all(stages: list[Points], layers: int, microbatches: int) -> None:
    rows = [[(n, point) for n, points in stage.items() for point in points] for stage in stages]
    every = [
        compute_mist_time([point for _, point in choice], microbatches)
        for choice in product(*rows)
        if sum(n for n, _ in choice) == layers
    ]
    found = solve_inter_stage(stages, layers, microbatches)
    assert (found is None) == (not every)
    if found is not None:
        assert sum(found.counts) == layers
        assert found.time == pytest.approx(min(every), rel=1e-6)


@given(CASES)
@settings(max_examples=12, deadline=None)
def test_the_integer_program_finds_the_least_critical_path(case: tuple[tuple[str, int, int, int], float]) -> None:
    (schedule, pipeline, chunks, layers), room = case
    found = small(layers, room, pipeline)
    layout = Layout(pipeline=pipeline, schedule=schedule, chunks=chunks, stages="balanced")
    given_ = build_division_problem(StageCosts(found), complete(found, layout), (Recompute.FULL,), layers)
    every = [(c, a) for c, a, _ in divisions(found, layout, layers) if given_.fits(c, [a])]
    program = DivisionProgram(given_, accuracy=1e-4)
    result = program.solve_integer(1000)
    assert (result is None) == (not every)
    if result is not None:
        least = min(given_.compute_step_ticks(c, [a]) for c, a in every)
        assert program.bound <= least * (1 + 1e-6)
        if chunks == 1:  # every rank has one stage, so that its whole layers are those of the stage
            assert given_.compute_step_ticks(result.counts, result.recompute_counts) <= least * (1 + 2e-4)


@given(st.lists(st.floats(0, 5), min_size=6, max_size=6))
def test_rounding_keeps_the_sums_of_ranks(parts: list[float]) -> None:
    found = round_parts(np.array(parts), np.full(6, 9.0), 2)
    for rank in range(2):
        assert found[rank::2].sum() == round(sum(parts[rank::2]))
    assert (np.abs(found - parts) < 2).all()
