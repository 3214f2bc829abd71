"""Elimination equals brute force; as published it has the defects that are known of it."""

import pytest

from meshwise.strategies.operators import elimination
from meshwise.strategies.operators.cost_graph import CostGraph, Shortfall, Solution
from meshwise.strategies.operators.elimination import TooManyRowsError, eliminate
from meshwise.strategies.operators.frontier import frontier

from .brute_force import brute_force
from .graphs import CASES, case, cases, costs, random_graph


def test_equals_brute_force_on_300_graphs() -> None:
    for graph, limit, answer in cases():
        found = eliminate(graph, limit)
        if isinstance(answer, Shortfall):
            assert found == answer
            continue
        assert isinstance(found, Solution) and found.time == found.bound == answer.time == graph.time(found.choice)
        assert limit is None or found.memory == graph.memory(found.choice) <= limit


@pytest.mark.parametrize("kind", [0, 1])
def test_chains_and_residual_connections_need_no_other_method(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "frontier", None)
    for seed in range(kind, CASES, 4):  # every fourth graph is a chain, and the next one residual
        graph, limit, answer = case(seed)
        found = eliminate(graph, limit)
        assert found == answer if isinstance(answer, Shortfall) else found.time == answer.time


def test_lists_that_get_too_long_are_left_to_the_frontier() -> None:
    graph = random_graph(1)
    assert eliminate(graph, max_rows=100) == frontier(graph)
    with pytest.raises(TooManyRowsError, match="at most 100 rows in all"):
        eliminate(graph, faithful=True, max_rows=100)


def test_published_is_never_faster_and_never_over_the_limit() -> None:
    short = slow = 0
    for graph, limit, answer in cases():
        found = eliminate(graph, limit, faithful=True)
        if isinstance(found, Shortfall):
            short += isinstance(answer, Solution)
            continue
        assert isinstance(answer, Solution) and found.bound <= answer.time <= found.time
        assert limit is None or found.memory <= limit
        slow += found.time > answer.time
    assert short > 50 and slow > 10


def lean() -> CostGraph:
    """Node 0 saves a byte for a tick; lists that forget memory keep only its faster choice."""
    return costs([[1, 2], [0, 5]], [[2, 1], [1, 0]], [(0, 1, [[0, 0], [0, 0]])])


def test_published_lists_forget_memory_and_find_that_nothing_fits() -> None:
    # the leanest choice keeps 1 + 0 bytes; the published list has node 0 at 2 bytes only
    assert eliminate(lean(), 1).time == 2 + 5
    assert eliminate(lean(), 1, faithful=True) == Shortfall((0, 1), 2, 1)


def test_published_lists_forget_memory_and_find_a_slower_choice() -> None:
    # within 2 bytes: 2 + 0 ticks with 1 + 1 bytes; with node 0 at 2 bytes only 1 + 5 ticks are left
    assert eliminate(lean(), 2).time == 2 + 0
    assert eliminate(lean(), 2, faithful=True).time == 1 + 5


def forgotten(pairs: list[tuple[int, int]], source: int, consumer: int) -> CostGraph:
    """One node has two choices: nothing, with an edge from ``source`` of 5 ticks; or 3 ticks, with a free edge."""
    times = [[0, 3] if node == consumer else [0] for node in range(4)]
    tables = [
        [[5, 0]] if pair == (source, consumer) else [[0] * len(times[pair[1]])] * len(times[pair[0]]) for pair in pairs
    ]
    return costs(times, [[0] * len(each) for each in times], [(*p, t) for p, t in zip(pairs, tables, strict=True)])


@pytest.mark.parametrize(
    ("pairs", "consumer"),
    [
        pytest.param([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], 2, id="triangle"),
        pytest.param([(0, 2), (0, 3), (1, 2), (1, 3)], 3, id="star"),
    ],
)
def test_published_triangle_and_star_forget_what_the_other_consumer_chose(
    pairs: list[tuple[int, int]], consumer: int
) -> None:
    # the source is folded with the free edge; the consumer then chooses what is free alone, and pays 5, not 3
    graph = forgotten(pairs, 0, consumer)
    assert eliminate(graph).time == brute_force(graph).time == 3
    assert eliminate(graph, faithful=True).time == 5
