"""UniAP's program against all stages and strategies, and against the exact assembly of stages."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.stages.block_division import divide_blocks
from meshwise.strategies.stages.dynamic_programs import choose_options
from meshwise.strategies.stages.joint_program import JointChoice, JointTables, solve_joint_program


@st.composite
def joint_tables(draw: st.DrawFn) -> tuple[JointTables, int]:
    """Draw up to three stages, four layers and three strategies, some of which a layer has not."""
    stages, layers, ways = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times = random.integers(1, 10, (stages, layers, ways)).astype(float)
    times[random.random(times.shape) < 0.15] = np.inf
    memory = random.integers(0, 6, times.shape).astype(float)
    limits = random.integers(0, 14, stages).astype(float)
    pair_shape = (max(layers - 1, 0), ways, ways)
    inner, crossing = (random.integers(0, 9, pair_shape).astype(float) for _ in range(2))
    return JointTables(times, memory, limits, inner, crossing), draw(st.integers(1, 8))


def every_choice(tables: JointTables, microbatches: int) -> list[JointChoice]:
    """Return all contiguous stages with all strategies that fit."""
    stages, layers, ways = tables.times.shape
    result = []
    for cuts in combinations(range(1, layers), stages - 1):
        for strategies in product(range(ways), repeat=layers):
            ends = (*cuts, layers)
            time = tables.compute_time(ends, strategies, microbatches)
            if np.isfinite(time) and tables.fits(ends, strategies):
                result.append(JointChoice(ends, strategies, time))
    return result


@given(joint_tables())
@settings(deadline=None, max_examples=80)
def test_the_program_finds_the_least_of_all_stages_and_strategies(case: tuple[JointTables, int]) -> None:
    tables, microbatches = case
    found, every = solve_joint_program(tables, microbatches), every_choice(tables, microbatches)
    assert (found is None) == (not every)
    if found is not None:
        assert found.time == pytest.approx(min(choice.time for choice in every), rel=1e-6)
        assert tables.fits(found.ends, found.strategies)
        assert found.time == tables.compute_time(found.ends, found.strategies, microbatches)


@pytest.mark.parametrize("seed", range(25))
def test_it_is_the_assembly_of_stages_that_are_each_the_best(seed: int) -> None:
    """Where what crosses does not depend on strategies, stages are independent: Galvatron's program for each span of
    layers (`choose_options`), and the exact assembly of spans (`divide_blocks`), find the same time."""
    random = np.random.default_rng(seed)
    stages, layers, ways, microbatches = int(random.integers(1, 4)), 6, 2, int(random.integers(1, 9))
    times = random.integers(1, 10, (stages, layers, ways)).astype(float)
    memory = random.integers(1, 5, times.shape).astype(float)
    limits = random.integers(6, 16, stages).astype(float)
    moves = random.integers(0, 4, (ways, ways)).astype(float)
    crossings = random.integers(0, 20, layers + 1).astype(float)
    crossing_times = np.broadcast_to(crossings[1:layers, None, None], (layers - 1, ways, ways))
    tables = JointTables(times, memory, limits, np.broadcast_to(moves, (layers - 1, ways, ways)), crossing_times)
    spans = np.full((stages, layers + 1, layers + 1), np.inf)
    for stage, (first, end) in product(range(stages), combinations(range(layers + 1), 2)):
        options = [[(times[stage, u, k], memory[stage, u, k]) for k in range(ways)] for u in range(first, end)]
        choice = choose_options(options, limits[stage], moves.tolist())
        spans[stage, first, end] = np.inf if choice is None else choice.time
    division, found = divide_blocks(spans, microbatches, crossings), solve_joint_program(tables, microbatches)
    assert (division is None) == (found is None)
    if division is not None and found is not None:
        # the assembly skips slowest times that are nearer than CLOSE: none are, for they are whole and far below 1,000
        assert found.time == pytest.approx(division.time, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_units_do_not_matter(seed: int) -> None:
    """Ticks of 1e15 and bytes of 1e12 give the same choice as small numbers, whatever tolerances a solver has."""
    random = np.random.default_rng(seed)
    times, memory = (random.integers(1, 100, (2, 5, 2)).astype(float) for _ in range(2))
    inner, crossing = (random.integers(0, 100, (4, 2, 2)).astype(float) for _ in range(2))
    small = JointTables(times, memory, np.full(2, 140.0), inner, crossing)
    large = JointTables(times * 1e15, memory * 1e12, np.full(2, 140e12), inner * 1e15, crossing * 1e15)
    found, large_found = solve_joint_program(small, 3), solve_joint_program(large, 3)
    assert (found is None) == (large_found is None) == (not every_choice(small, 3))
    if found is not None and large_found is not None:
        assert large_found.time == pytest.approx(found.time * 1e15, rel=1e-9)
        assert large.fits(large_found.ends, large_found.strategies)


def test_one_program_finds_what_one_strategy_for_all_layers_misses() -> None:
    """Layers take 2, 2, 6 with one strategy and 6, 6, 2 with the other, and 1 where strategies change.

    One strategy: stages of 4 and 6, and the slowest again for the second microbatch: 16. Both: stages of 4 and 2 with a
    change of 1 between: 4 + 2 + 1 + 4 = 11.
    """
    times = np.array([[[2.0, 6.0], [2.0, 6.0], [6.0, 2.0]]] * 2)
    moves = np.broadcast_to(np.array([[0.0, 1.0], [1.0, 0.0]]), (2, 2, 2))
    tables = JointTables(times, np.zeros((2, 3, 2)), np.ones(2), moves, moves)
    assert solve_joint_program(tables, 2) == JointChoice((2, 3), (0, 0, 1), 11.0)
    uniform = [choice.time for choice in every_choice(tables, 2) if len(set(choice.strategies)) == 1]
    assert min(uniform) == 16.0


def test_fewer_layers_than_stages_is_no_choice() -> None:
    costs, moves = np.ones((3, 2, 1)), np.zeros((1, 1, 1))
    assert solve_joint_program(JointTables(costs, costs, np.ones(3), moves, moves), 2) is None
