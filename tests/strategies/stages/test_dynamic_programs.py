"""The divisions of layers that dynamic programs find, and a way for every layer, against all there are."""

from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.stages.block_division import divide_blocks
from meshwise.strategies.stages.division import FloatArray
from meshwise.strategies.stages.dynamic_programs import (
    GRID_BYTES,
    LayerOptions,
    choose_options,
    choose_options_on_grid,
    minimize_bottleneck,
    minimize_pivot,
    minimize_sum,
    minimize_sum_and_slowest,
)

LAYERS = st.lists(
    st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), min_size=2, max_size=2), max_size=5
)
BETWEEN = st.lists(st.lists(st.integers(0, 3).map(float), min_size=2, max_size=2), min_size=2, max_size=2)


@given(LAYERS, st.integers(0, 30), BETWEEN)
def test_the_choice_is_the_fastest_of_all_that_fit(
    layers: list[LayerOptions], limit: int, between: list[list[float]]
) -> None:
    every = []
    for ways in product(range(2), repeat=len(layers)):
        time = sum(layer[way][0] for layer, way in zip(layers, ways, strict=True))
        time += sum(between[one][other] for one, other in pairwise(ways))
        if sum(layer[way][1] for layer, way in zip(layers, ways, strict=True)) <= limit:
            every.append(time)
    found = choose_options(layers, limit, between)
    assert (found is None) == (not every)
    if found is not None:
        assert found.time == min(every)
        assert found.memory == sum(layer[way][1] for layer, way in zip(layers, found.options, strict=True)) <= limit


def test_rounding_every_layer_up_wastes_memory() -> None:
    # ten layers of 1.1 MB fit in 11 MB; rounded up to 2 MB each, five do and the others are recomputed
    layers = [[(1.0, 1.1 * GRID_BYTES), (2.0, 0.0)]] * 10
    exact, coarse = choose_options(layers, 11.5 * GRID_BYTES), choose_options_on_grid(layers, 11.5 * GRID_BYTES)
    assert exact is not None and coarse is not None
    assert (exact.time, coarse.time) == (10.0, 15.0)


@given(LAYERS, st.integers(0, 30))
def test_the_grid_never_chooses_what_does_not_fit_nor_is_faster(layers: list[LayerOptions], limit: int) -> None:
    bytes_of = [[(time, memory * GRID_BYTES / 4) for time, memory in layer] for layer in layers]
    exact, coarse = (solve(bytes_of, limit * GRID_BYTES / 4) for solve in (choose_options, choose_options_on_grid))
    if coarse is not None:
        assert exact is not None and exact.time <= coarse.time and coarse.memory <= limit * GRID_BYTES / 4


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
        (minimize_sum(times, layers), sum),
        (minimize_bottleneck(times, layers), max),
        (minimize_sum_and_slowest(times, layers, microbatches), lambda row: sum(row) + (microbatches - 1) * max(row)),
        (
            minimize_pivot(times, layers, microbatches),
            lambda row: max(sum(row[:at]) + microbatches * each for at, each in enumerate(row)),
        ),
    ]
    for found, formula in formulas:
        assert (found is None) == (not rows)
        if found is not None:
            assert found.time == min(map(formula, rows))
            assert sum(found.counts) == layers
            assert found.time == formula(tuple(float(times[s, n]) for s, n in enumerate(found.counts)))


@given(tables(), st.integers(1, 9))
def test_on_equal_layers_the_programs_are_the_assembly_of_blocks(
    table: tuple[FloatArray, int], microbatches: int
) -> None:
    """So that what holds of blocks that differ, as in published examples, holds of these programs too."""
    times, layers = table
    if not layers:
        return
    times[:, 0] = np.inf  # a stage of the assembly has a block at least
    spans = np.full((len(times), layers + 1, layers + 1), np.inf)
    for first, end in combinations(range(layers + 1), 2):
        spans[:, first, end] = times[:, end - first]
    cases = ((microbatches, minimize_sum_and_slowest(times, layers, microbatches)),)
    cases += ((10**6, minimize_sum_and_slowest(times, layers, 10**6)),)
    for count, partition in cases:
        division = divide_blocks(spans, count)
        assert (partition is None) == (division is None)
        if partition is not None and division is not None:
            assert division.time == partition.time
    bottleneck = minimize_bottleneck(times, layers)
    if bottleneck is not None:
        assert cases[1][1] is not None
        counts = cases[1][1].counts
        assert max(float(times[stage, n]) for stage, n in enumerate(counts)) == bottleneck.time
