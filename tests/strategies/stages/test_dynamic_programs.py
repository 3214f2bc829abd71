"""A way for every layer, against all ways."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.stages.dynamic_programs import GRID, Ways, fastest_ways, fastest_ways_on_grid

LAYERS = st.lists(
    st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), min_size=2, max_size=2), max_size=5
)
BETWEEN = st.lists(st.lists(st.integers(0, 3).map(float), min_size=2, max_size=2), min_size=2, max_size=2)


@given(LAYERS, st.integers(0, 30), BETWEEN)
def test_the_choice_is_the_fastest_of_all_that_fit(layers: list[Ways], limit: int, between: list[list[float]]) -> None:
    every = []
    for ways in product(range(2), repeat=len(layers)):
        time = sum(layer[way][0] for layer, way in zip(layers, ways, strict=True))
        time += sum(between[one][other] for one, other in pairwise(ways))
        if sum(layer[way][1] for layer, way in zip(layers, ways, strict=True)) <= limit:
            every.append(time)
    found = fastest_ways(layers, limit, between)
    assert (found is None) == (not every)
    if found is not None:
        assert found.time == min(every)
        assert found.memory == sum(layer[way][1] for layer, way in zip(layers, found.ways, strict=True)) <= limit


def test_rounding_every_layer_up_wastes_memory() -> None:
    # ten layers of 1.1 MB fit in 11 MB; rounded up to 2 MB each, five do and the others are recomputed
    layers = [[(1.0, 1.1 * GRID), (2.0, 0.0)]] * 10
    exact, coarse = fastest_ways(layers, 11.5 * GRID), fastest_ways_on_grid(layers, 11.5 * GRID)
    assert exact is not None and coarse is not None
    assert (exact.time, coarse.time) == (10.0, 15.0)


@given(LAYERS, st.integers(0, 30))
def test_the_grid_never_chooses_what_does_not_fit_nor_is_faster(layers: list[Ways], limit: int) -> None:
    bytes_of = [[(time, memory * GRID / 4) for time, memory in layer] for layer in layers]
    exact, coarse = (solve(bytes_of, limit * GRID / 4) for solve in (fastest_ways, fastest_ways_on_grid))
    if coarse is not None:
        assert exact is not None and exact.time <= coarse.time and coarse.memory <= limit * GRID / 4
