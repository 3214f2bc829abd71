"""The integer program equals brute force, and keeps what it has when it is stopped."""

import os
import signal
import threading

import highspy
import pytest

from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.integer_programming import integer_programming

from .graphs import CASES, case, costs, halfway, layers


def test_equals_brute_force_on_300_graphs() -> None:
    for seed in range(CASES):
        graph, limit, answer = case(seed)
        found = integer_programming(graph, limit, prune=seed % 2 == 0)
        if isinstance(answer, Shortfall):
            assert found == answer
            continue
        assert isinstance(found, Solution) and found.time == answer.time >= found.bound
        assert found.gap < 1e-8 and found.time == graph.time(found.choice)
        assert limit is None or found.memory == graph.memory(found.choice) <= limit


def test_small_numbers_are_proven_exactly() -> None:
    found = integer_programming(costs([[7, 4]] * 10, [[0, 3]] * 10, []), 15)
    assert isinstance(found, Solution) and found.time == found.bound == 5 * 7 + 5 * 4


def test_a_limit_holds_to_the_byte() -> None:
    # a trillion bytes: one byte less, and the faster choice no longer fits
    graph = costs([[1, 2]], [[10**12, 1]], [])
    assert integer_programming(graph, 10**12).time == 1
    assert integer_programming(graph, 10**12 - 1).time == 2


def test_tied_copies_choose_alike_and_are_never_faster() -> None:
    graph = layers(3, 4, 3, seed=0)
    limit = halfway(graph, frontier(graph))
    alike = integer_programming(graph, limit, tie=True)
    assert isinstance(alike, Solution) and alike.memory <= limit
    assert len(set(zip(graph.copies, alike.choice, strict=True))) == 4
    assert alike.time >= frontier(graph, limit).time
    assert isinstance(integer_programming(graph, 1, tie=True), Shortfall)


def hard() -> tuple:  # type: ignore[type-arg]
    graph = layers(16, 12, 16, seed=0)
    return graph, halfway(graph, frontier(graph))


def test_out_of_time_it_keeps_a_choice_that_fits_and_a_bound() -> None:
    graph, limit = hard()
    found = integer_programming(graph, limit, seconds=0.2, prune=False)
    assert found.memory <= limit and found.bound <= frontier(graph, limit, gap=0.01).time <= found.time


def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, limit = hard()
    start = highspy.Highs.startSolve

    def interrupted(solver: highspy.Highs) -> threading.Thread:
        thread = start(solver)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return thread  # type: ignore[no-any-return]

    monkeypatch.setattr(highspy.Highs, "startSolve", interrupted)
    found = integer_programming(graph, limit, prune=False)
    assert found.memory <= limit and 0 < found.bound < found.time == graph.time(found.choice)
    assert found.was_interrupted
