"""A sweep proves what it says, however few partial choices it may keep."""

import numpy as np
import pytest

from meshwise.strategies.operators.brute_force import brute_force
from meshwise.strategies.operators.bucket_elimination import Price, Sweep
from meshwise.strategies.operators.cost_graph import CostGraph, Solution, least_memory

from .graphs import random_graph


def without_transient(seed: int) -> tuple[CostGraph, int, Solution]:
    graph = random_graph(seed)
    graph = CostGraph(graph.times, graph.kept, tuple(map(np.zeros_like, graph.kept)), graph.edges, graph.copies)
    budget = (graph.memory(least_memory(graph)) + brute_force(graph).memory) // 2
    answer = brute_force(graph, budget)
    assert isinstance(answer, Solution)
    return graph, budget, answer


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_fastest_below_and_nothing_below_the_fastest(seed: int) -> None:
    graph, budget, answer = without_transient(seed)
    sweep = Sweep(graph, budget, Price(seed % 7, 1 + seed % 3))
    found = sweep.below(answer.time + 1, 10**6)
    assert found.choice is not None and graph.time(found.choice) == found.bound == answer.time
    assert graph.memory(found.choice) <= budget
    assert sweep.below(answer.time, 10**6) == (None, answer.time)


@pytest.mark.parametrize("seed", range(40))
def test_with_few_partial_choices_the_bound_stays_below(seed: int) -> None:
    graph, budget, answer = without_transient(seed)
    for labels in (1, 3, 10):
        found = Sweep(graph, budget, Price(1, 2)).below(2 * answer.time + 1, labels)
        assert found.bound <= answer.time
        assert found.choice is None or graph.memory(found.choice) <= budget
