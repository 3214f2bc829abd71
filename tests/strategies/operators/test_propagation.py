"""Choices spread from those that are made."""

from random import Random

import numpy as np
import pytest

from meshwise.strategies.operators.brute_force import brute_force
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, restrict
from meshwise.strategies.operators.recursion import propagate


def graph(sizes: list[int], edges: list[tuple[int, int, list[list[int]]]]) -> CostGraph:
    zeros = tuple(np.zeros(size, np.int64) for size in sizes)
    tables = tuple(Edge(source, target, np.array(times, np.int64)) for source, target, times in edges)
    return CostGraph(zeros, zeros, zeros, tables, (-1,) * len(sizes))


def test_a_chain_follows_its_seed() -> None:
    same = [[0, 5], [5, 0]]
    chain = graph([2, 2, 2], [(0, 1, same), (1, 2, same)])
    assert propagate(chain, {1: 1}) == (1, 1, 1)
    assert propagate(chain, {1: 0}) == (0, 0, 0)
    assert propagate(chain, {}) == (0, 0, 0)


def test_it_is_greedy() -> None:
    # from node 0 the cheapest step to node 1 is its choice 0, behind which node 2 costs 9: the other way costs 1 in all
    trap = graph([1, 2, 1], [(0, 1, [[0, 1]]), (1, 2, [[9], [0]])])
    assert propagate(trap, {0: 0}) == (0, 0, 0)
    assert trap.time((0, 0, 0)) == 9
    assert brute_force(trap).time == 1  # type: ignore[union-attr]


def test_a_node_of_two_inputs_waits_for_both() -> None:
    # node 2 reads 0 and 1; when 1 has chosen too it is reached from 0, and takes what fits that one alone
    join = graph([1, 2, 2], [(0, 1, [[3, 0]]), (0, 2, [[0, 7]]), (1, 2, [[0, 7], [7, 0]])])
    assert propagate(join, {0: 0}) == (0, 1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_chain_whose_layouts_are_reached_for_nothing_it_is_the_best(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randint(2, 4) for _ in range(6)]
    edges = []
    for number in range(5):
        times = [[random.randint(1, 9) for _ in range(sizes[number + 1])] for _ in range(sizes[number])]
        for row in times:
            row[random.randrange(len(row))] = 0
        edges.append((number, number + 1, times))
    chain = graph(sizes, edges)
    start = random.randrange(sizes[0])
    pinned = restrict(chain, [np.array([start]), *(np.arange(size) for size in sizes[1:])])
    assert chain.time(propagate(chain, {0: start})) == brute_force(pinned).time == 0  # type: ignore[union-attr]
