"""The exact core is exact, proves it, and is quick where layers repeat."""

from dataclasses import replace

import pytest

from meshwise.strategies.operators.bucket_elimination import Price, build_buckets
from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.frontier import Relaxation, frontier

from ...pace import least_cpu
from .graphs import case, cases, costs, halfway, layers


def test_equals_brute_force_on_300_graphs_and_proves_it() -> None:
    for graph, limit, answer in cases():
        found = frontier(graph, limit)
        if isinstance(answer, Shortfall):
            assert found == answer
            continue
        assert isinstance(found, Solution) and found.time == found.bound == answer.time
        assert found.time == graph.time(found.choice) and found.memory == graph.memory(found.choice)
        assert limit is None or found.memory <= limit


def test_the_bound_is_never_above_the_least_whatever_the_effort() -> None:
    open_gaps = 0
    for graph, limit, answer in cases():
        found = frontier(graph, limit, gap=0.3, max_labels=1)
        if isinstance(found, Solution):
            assert found.bound <= answer.time <= found.time
            open_gaps += found.bound < found.time
    assert open_gaps > 20


def test_no_price_of_memory_bounds_above_the_least() -> None:
    for graph, limit, answer in cases():
        if limit is None or isinstance(answer, Shortfall):
            continue
        relaxation = Relaxation(graph, build_buckets(graph))
        levels = relaxation.levels.tolist()
        for price in (Price(0, 1), Price(1, 3), Price(2, 1)):
            least, _ = relaxation.limit_graph(levels[-1]).find_minimum(price)
            assert price.bound(least, limit - levels[0]) <= answer.time


def test_numbers_of_copies_change_nothing() -> None:
    graph = layers(3, 5, 3, seed=1)
    limit = halfway(graph, frontier(graph))
    assert frontier(graph, limit) == frontier(replace(graph, copies=(-1,) * 15), limit)


def test_price_is_what_a_byte_more_saves() -> None:
    # 100 alike nodes take 7 ticks, or 4 with 3 bytes more: a byte saves a tick
    graph = costs([[7, 4]] * 100, [[0, 3]] * 100, [])
    found = frontier(graph, 150)
    assert isinstance(found, Solution) and found.time == found.bound == 50 * 7 + 50 * 4
    assert found.price == pytest.approx(1.0)
    assert frontier(graph, 300).price == 0.0


def test_what_a_byte_more_saves_is_told_by_more_than_the_very_next_one() -> None:
    # the first byte more saves 1000 ticks, those after it nothing: a hundredth of the limit, 100 bytes, saves 1000
    graph = costs([[1000, 0], [5, 5]], [[10_000, 10_001], [0, 1]], [])
    found = frontier(graph, 10_000)
    assert isinstance(found, Solution) and found.time == 1005
    assert found.price == pytest.approx(1000 / 100)


def test_no_price_promises_more_than_is_lost_to_the_limit() -> None:
    binding = 0
    for graph, limit, answer in map(case, range(100)):
        if limit is not None and isinstance(answer, Solution):
            found = frontier(graph, limit)
            assert isinstance(found, Solution) and found.price is not None and found.price >= 0
            assert found.price * max(1, limit // 100) <= answer.time - frontier(graph).time
            binding += found.price > 0
    assert binding > 20


def test_ticks_and_bytes_near_the_largest_numbers_stay_exact() -> None:
    big = 2**54
    graph = costs([[big, big + 1, 3 * big]] * 20, [[big, big - 1, 1]] * 20, [])
    found = frontier(graph, 20 * big - 7)
    assert isinstance(found, Solution) and found.time == found.bound == 20 * big + 7


def test_96_layers_with_a_limit_within_one_percent_in_a_second() -> None:
    graph = layers(96, 12, 27, seed=0)
    limit = halfway(graph, frontier(graph))
    found = frontier(graph, limit, gap=0.01)
    assert least_cpu(lambda: frontier(graph, limit, gap=0.01), 1.0) < 1.0
    assert isinstance(found, Solution) and found.gap <= 0.01 and found.memory <= limit and found.price > 0
