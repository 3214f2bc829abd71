"""Eliminating one node after another finds the least sum; equal layers are met once."""

import pytest

from meshwise.strategies.operators import bucket_elimination
from meshwise.strategies.operators.brute_force import brute_force
from meshwise.strategies.operators.bucket_elimination import Buckets, buckets
from meshwise.strategies.operators.cost_graph import CostGraph

from .graphs import costs, layers, random_graph


def least(graph: CostGraph, eliminations: Buckets) -> tuple[int, tuple[int, ...]]:
    times = [graph.times[node] for node, _ in eliminations.nodes]
    return eliminations.minimum(times, [graph.edges[index].times for index, _ in eliminations.edges])


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_least_is_that_of_all_choices(seed: int, fill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fill:  # least fill is tried, and taken where its tables are smaller
        monkeypatch.setattr(bucket_elimination, "MANY_ENTRIES", 0)
    graph = random_graph(seed)
    time, choice = least(graph, buckets(graph))
    assert time == graph.time(choice) == brute_force(graph).time


def test_twice_the_layers_take_a_few_more_eliminations_only() -> None:
    few, many = (len(buckets(layers(number, 12, 3, seed=0)).steps) for number in (64, 128))
    assert many - few < 12


def test_refuses_a_graph_that_is_too_entangled() -> None:
    pairs = [(a, b, [[0] * 8] * 8) for b in range(10) for a in range(b)]
    with pytest.raises(ValueError, match="needs 1073741824"):  # 8 choices of 10 nodes: 2**30
        buckets(costs([[0] * 8] * 10, [[0] * 8] * 10, pairs))
