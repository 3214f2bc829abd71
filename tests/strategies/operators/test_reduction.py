"""Without choices that are not needed the best is as fast; tied copies choose alike."""

from dataclasses import replace

import numpy as np

from meshwise.strategies.operators.brute_force import brute_force
from meshwise.strategies.operators.cost_graph import Solution, needed, restrict, tied

from .graphs import cases, costs, layers


def test_the_best_of_what_is_needed_is_as_fast() -> None:
    dropped = 0
    for graph, limit, answer in cases():
        if isinstance(answer, Solution):
            allowed = needed(graph, memory=limit is not None)
            best = brute_force(restrict(graph, allowed), limit)
            assert isinstance(best, Solution) and best.time == answer.time
            dropped += sum(graph.sizes) - sum(map(len, allowed))
    assert dropped > 1000


def test_a_choice_of_less_memory_is_needed_if_memory_counts() -> None:
    graph = costs([[1, 2, 2]], [[5, 4, 6]], [])
    assert [each.tolist() for each in needed(graph, memory=True)] == [[0, 1]]
    assert [each.tolist() for each in needed(graph, memory=False)] == [[0]]


def test_of_equal_choices_one_is_needed() -> None:
    assert [len(each) for each in needed(costs([[1, 1, 1]], [[5, 5, 5]], []), memory=True)] == [1]


def test_tied_copies_cost_what_the_same_choices_cost_apart() -> None:
    graph = layers(4, 5, 3, seed=0)
    smaller, place = tied(graph)
    assert len(smaller.times) == 5
    choice = np.random.default_rng(0).integers(0, 3, 5).tolist()
    apart = [choice[index] for index in place]
    assert (smaller.time(choice), smaller.memory(choice)) == (graph.time(apart), graph.memory(apart))


def test_an_edge_between_copies_is_paid_where_both_choose_alike() -> None:
    # choice 0: 1 + 1 ticks and 7 on the edge; choice 1: 2 + 2 ticks and 4; the 0 is for different choices only
    graph = replace(costs([[1, 2]] * 2, [[3, 3]] * 2, [(0, 1, [[7, 0], [0, 4]])]), copies=(0, 0))
    smaller, place = tied(graph)
    assert smaller.times[0].tolist() == [9, 8] and smaller.kept[0].tolist() == [6, 6] and place == (0, 0)
