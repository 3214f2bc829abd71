"""Eliminating one node after another finds the least sum; rows that are kept are beaten by none, and proofs hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.operators import bucket_elimination
from meshwise.strategies.operators.bucket_elimination import Buckets, Price, Sweep, build_buckets, find_undominated
from meshwise.strategies.operators.cost_graph import MAX_SUM, CostGraph, Solution, find_leanest_choice

from .brute_force import brute_force
from .graphs import costs, layers, random_graph


def least(graph: CostGraph, eliminations: Buckets) -> tuple[int, tuple[int, ...]]:
    times = [graph.times[node] for node, _ in eliminations.nodes]
    return eliminations.find_minimum(times, [graph.edges[index].times for index, _ in eliminations.edges])


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_least_is_that_of_all_choices(seed: int, fill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fill:  # least fill is tried, and taken where its tables are smaller
        monkeypatch.setattr(bucket_elimination, "MANY_ENTRIES", 0)
    graph = random_graph(seed)
    time, choice = least(graph, build_buckets(graph))
    assert time == graph.time(choice) == brute_force(graph).time


def test_twice_the_layers_take_a_few_more_eliminations_only() -> None:
    few, many = (len(build_buckets(layers(number, 12, 3, seed=0)).distinct_buckets) for number in (64, 128))
    assert many - few < 12


def test_refuses_a_graph_that_is_too_entangled() -> None:
    pairs = [(a, b, [[0] * 8] * 8) for b in range(10) for a in range(b)]
    with pytest.raises(ValueError, match="needs 1073741824"):  # 8 choices of 10 nodes: 2**30
        build_buckets(costs([[0] * 8] * 10, [[0] * 8] * 10, pairs))


ROWS = st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=40)


@given(ROWS, st.integers(1, 3))
def test_equals_comparing_all_pairs(rows: list[tuple[int, int, int, int]], criteria: int) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T[: criteria + 1]
    kept = find_undominated(*columns)
    seen = {row[: criteria + 1] for row in rows}
    best = {
        row
        for row in seen
        if not any(row != o and row[0] == o[0] and all(a >= b for a, b in zip(row, o, strict=True)) for o in seen)
    }
    assert len(kept) == len(best) and {tuple(map(int, columns[:, index])) for index in kept} == best


def test_large_values_in_many_groups_stay_apart() -> None:
    times = np.array([MAX_SUM - 1, MAX_SUM - 2, MAX_SUM - 1, MAX_SUM - 1])
    assert find_undominated(np.array([0, 0, 1, 2]), times).tolist() == [1, 2, 3]


def without_transient(seed: int) -> tuple[CostGraph, int, Solution]:
    graph = random_graph(seed)
    graph = CostGraph(
        graph.times, graph.kept_bytes, tuple(map(np.zeros_like, graph.kept_bytes)), graph.edges, graph.copies
    )
    budget = (graph.memory(find_leanest_choice(graph)) + brute_force(graph).memory) // 2
    answer = brute_force(graph, budget)
    assert isinstance(answer, Solution)
    return graph, budget, answer


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_fastest_below_and_nothing_below_the_fastest(seed: int) -> None:
    graph, budget, answer = without_transient(seed)
    sweep = Sweep(graph, budget, Price(seed % 7, 1 + seed % 3))
    found = sweep.find_below(answer.time + 1, 10**6)
    assert found.choice is not None and graph.time(found.choice) == found.bound == answer.time
    assert graph.memory(found.choice) <= budget
    assert sweep.find_below(answer.time, 10**6) == (None, answer.time)


@pytest.mark.parametrize("seed", range(40))
def test_with_few_partial_choices_the_bound_stays_below(seed: int) -> None:
    graph, budget, answer = without_transient(seed)
    for labels in (1, 3, 10):
        found = Sweep(graph, budget, Price(1, 2)).find_below(2 * answer.time + 1, labels)
        assert found.bound <= answer.time
        assert found.choice is None or graph.memory(found.choice) <= budget
