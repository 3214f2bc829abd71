"""Brute force is what one loop over all choices finds."""

from itertools import product

import pytest

from meshwise.strategies.operators.cost_graph import Shortfall, Solution

from .brute_force import brute_force
from .graphs import costs, random_graph


@pytest.mark.parametrize("seed", range(12))
def test_equals_one_loop_over_all_choices(seed: int) -> None:
    graph = random_graph(seed, 2_000)
    choices = list(product(*map(range, graph.sizes)))
    limit = sorted(map(graph.memory, choices))[len(choices) // 3]
    for most in (None, limit):
        fitting = [choice for choice in choices if most is None or graph.memory(choice) <= most]
        best = min(fitting, key=graph.time)
        time = graph.time(best)
        assert brute_force(graph, most) == Solution(best, time, graph.memory(best), time)


def test_names_the_least_memory_when_nothing_fits() -> None:
    assert brute_force(costs([[1, 2]], [[5, 4]], []), 3) == Shortfall((1,), 4, 3)


def test_refuses_more_choices_than_it_can_try() -> None:
    with pytest.raises(ValueError, match="the graph has 1073741824"):
        brute_force(costs([[0, 1]] * 30, [[0, 0]] * 30, []))
