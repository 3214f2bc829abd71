"""A cost graph adds up its choices, refuses costs that make no sense, and leaves out choices that are not needed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshwise.strategies.operators.cost_graph import (
    CostGraph,
    Edge,
    Shortfall,
    Solution,
    find_leanest_choice,
    find_shortfall,
    list_needed_choices,
    merge_parallel_edges,
    restrict_choices,
    tie_copies,
)

from .brute_force import brute_force
from .graphs import cases, costs, layers, random_graph


def small() -> CostGraph:
    times, kept, transient = (
        tuple(np.array(each) for each in column) for column in (([1, 2], [3]), ([5, 1], [2]), ([0, 3], [1]))
    )
    return CostGraph(times, kept, transient, (Edge(0, 1, np.array([[7], [9]])),), (-1, -1))


def test_time_is_the_sum_and_memory_all_kept_and_the_most_transient() -> None:
    # choice (1, 0): 2 + 3 + 9 = 14 ticks; 1 + 2 kept and max(3, 1) transient are 6 bytes
    assert (small().time((1, 0)), small().memory((1, 0))) == (14, 6)
    assert (small().time((0, 0)), small().memory((0, 0))) == (11, 8)


@pytest.mark.parametrize("seed", range(20))
def test_least_memory_is_the_least_of_all_choices(seed: int) -> None:
    graph = random_graph(seed, 2_000)
    least = min(graph.memory(choice) for choice in product(*map(range, graph.sizes)))
    assert graph.memory(find_leanest_choice(graph)) == least
    assert find_shortfall(graph, least) is None is find_shortfall(graph, None)
    assert find_shortfall(graph, least - 1) == Shortfall(find_leanest_choice(graph), least, least - 1)


@pytest.mark.parametrize("seed", range(20))
def test_merged_edges_take_the_same_time(seed: int) -> None:
    graph = random_graph(seed)
    merged = merge_parallel_edges(graph)
    ends = [edge[:2] for edge in merged.edges]
    assert ends == sorted({edge[:2] for edge in graph.edges})
    choice = [int(each.argmax()) for each in graph.times]
    assert merged.time(choice) == graph.time(choice)


def test_gap_is_the_fraction_above_the_bound() -> None:
    assert Solution((0,), 11, 0, 10).gap == pytest.approx(0.1)
    assert Solution((0,), 0, 0, 0).gap == 0.0 and Solution((0,), 1, 0, 0).gap == float("inf")


ONE = (np.array([1]),)


@pytest.mark.parametrize(
    ("columns", "edges", "copies", "message"),
    [
        (((), (), ()), (), (), "at least one node"),
        ((ONE, ONE, ()), (), (-1,), "one entry a node"),
        ((ONE, ONE, ONE), (), (), "one entry a node"),
        (((np.array([1, 2]),), ONE, ONE), (), (-1,), "node 0: kept has one entry a choice"),
        (((np.array([1.5]),), ONE, ONE), (), (-1,), "node 0: times are 64-bit integers, got float64"),
        (((np.array([-1]),), ONE, ONE), (), (-1,), "node 0: times are not negative, got -1"),
        (((np.array([2**62]),), ONE, ONE), (), (-1,), "under 2\\*\\*62 ticks"),
        ((ONE * 2, ONE * 2, ONE * 2), (Edge(1, 0, np.array([[1]])),), (-1, -1), "edge 1 -> 0: 0 <= source < target"),
        ((ONE * 2, ONE * 2, ONE * 2), (Edge(0, 1, np.array([1])),), (-1, -1), "times have shape \\(1, 1\\)"),
        (((*ONE, np.array([2])), ONE * 2, ONE * 2), (), (3, 3), "node 1 and node 0 differ"),
    ],
)
def test_nonsense_is_refused(columns: tuple, edges: tuple, copies: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        CostGraph(*columns, edges, copies)


def test_the_best_of_what_is_needed_is_as_fast() -> None:
    dropped = 0
    for graph, limit, answer in cases():
        if isinstance(answer, Solution):
            allowed = list_needed_choices(graph, memory=limit is not None)
            best = brute_force(restrict_choices(graph, dict(enumerate(allowed))), limit)
            assert isinstance(best, Solution) and best.time == answer.time
            dropped += sum(graph.sizes) - sum(map(len, allowed))
    assert dropped > 1000


def test_a_choice_of_less_memory_is_needed_if_memory_counts() -> None:
    graph = costs([[1, 2, 2]], [[5, 4, 6]], [])
    assert [each.tolist() for each in list_needed_choices(graph, memory=True)] == [[0, 1]]
    assert [each.tolist() for each in list_needed_choices(graph, memory=False)] == [[0]]


def test_of_equal_choices_one_is_needed() -> None:
    assert [len(each) for each in list_needed_choices(costs([[1, 1, 1]], [[5, 5, 5]], []), memory=True)] == [1]


def test_tied_copies_cost_what_the_same_choices_cost_apart() -> None:
    graph = layers(4, 5, 3, seed=0)
    smaller, place = tie_copies(graph)
    assert len(smaller.times) == 5
    choice = np.random.default_rng(0).integers(0, 3, 5).tolist()
    apart = [choice[index] for index in place]
    assert (smaller.time(choice), smaller.memory(choice)) == (graph.time(apart), graph.memory(apart))


def test_an_edge_between_copies_is_paid_where_both_choose_alike() -> None:
    # choice 0: 1 + 1 ticks and 7 on the edge; choice 1: 2 + 2 ticks and 4; the 0 is for different choices only
    graph = replace(costs([[1, 2]] * 2, [[3, 3]] * 2, [(0, 1, [[7, 0], [0, 4]])]), copies=(0, 0))
    smaller, place = tie_copies(graph)
    assert smaller.times[0].tolist() == [9, 8] and smaller.kept_bytes[0].tolist() == [6, 6] and place == (0, 0)
