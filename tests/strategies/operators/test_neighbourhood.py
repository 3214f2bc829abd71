"""Mixtures are the best of all places of change; swaps only help."""

import pytest

from meshwise.strategies.operators.cost_graph import find_leanest_choice
from meshwise.strategies.operators.neighbourhood import Neighbourhood

from .graphs import random_graph


@pytest.mark.parametrize("seed", range(24))
def test_mixture_is_the_fastest_of_all_places_that_fits(seed: int) -> None:
    graph = random_graph(seed)
    first, second = (
        [int(index) for index in each] for each in ([t.argmin() for t in graph.times], find_leanest_choice(graph))
    )
    mixtures = [(*first[:place], *second[place:]) for place in range(len(first) + 1)]
    limit = sorted(map(graph.memory, mixtures))[len(mixtures) // 2]
    fastest = min(graph.time(each) for each in mixtures if graph.memory(each) <= limit)
    found = Neighbourhood(graph, limit).mix_choices(first, second)
    assert found in mixtures and graph.time(found) == fastest and graph.memory(found) <= limit
    assert Neighbourhood(graph, min(map(graph.memory, mixtures)) - 1).mix_choices(first, second) is None


@pytest.mark.parametrize("seed", range(24))
def test_swaps_fit_and_are_never_slower(seed: int) -> None:
    graph = random_graph(seed)
    start = find_leanest_choice(graph)
    polished = Neighbourhood(graph, 2 * graph.memory(start)).polish_choice(start)
    assert graph.time(polished) <= graph.time(start) and graph.memory(polished) <= 2 * graph.memory(start)


def test_without_a_tight_limit_no_swap_is_left() -> None:
    graph = random_graph(5)
    polished = Neighbourhood(graph, 10**15).polish_choice(find_leanest_choice(graph))
    swaps = [
        (*polished[:node], index, *polished[node + 1 :])
        for node, size in enumerate(graph.sizes)
        for index in range(size)
    ]
    assert graph.time(polished) == min(map(graph.time, swaps))
