"""SimPy's environment with events that are pairs: the order, and SimPy's own events beside them."""

from collections.abc import Generator
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.engine.discrete_event import Environment


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_calls_come_by_tick_then_those_that_are_last_then_by_turn(calls: list[tuple[int, bool]]) -> None:
    environment, met = Environment(), list[tuple[int, bool, int]]()

    def happen(turn: int) -> None:
        met.append((environment.now, False, turn))
        if calls[turn][1]:
            environment.call_last(lambda turn: met.append((environment.now, True, turn)), turn)

    for turn, (delay, _) in enumerate(calls):
        environment.call(delay, happen, turn)
    environment.run()
    first = [(delay, False, turn) for turn, (delay, _) in enumerate(calls)]
    assert met == sorted(first + [(delay, True, turn) for turn, (delay, last) in enumerate(calls) if last])


@pytest.mark.parametrize("until", [None, 10])
def test_processes_of_simpy_run_beside_calls(until: int | None) -> None:
    environment, met = Environment(), list[tuple[str, int]]()

    def process() -> Generator[simpy.Event, Any, None]:
        for _ in range(3):
            yield environment.timeout(2)
            met.append(("process", environment.now))

    environment.process(process())
    for delay in (1, 3, 5):
        environment.call(delay, lambda _: met.append(("call", environment.now)), 0)
    environment.run(until)
    assert met == [("call", 1), ("process", 2), ("call", 3), ("process", 4), ("call", 5), ("process", 6)]
    assert environment.now == (until or 6)


def test_a_process_that_fails_is_heard() -> None:
    environment = Environment()

    def process() -> Generator[simpy.Event, Any, None]:
        yield environment.timeout(1)
        raise RuntimeError("no")

    environment.process(process())
    with pytest.raises(RuntimeError, match="no"):
        environment.run()


def test_it_stops_at_a_time() -> None:
    environment, met = Environment(), list[int]()
    for delay in (1, 2, 3):
        environment.call(delay, met.append, delay)
    environment.run(3)
    assert (met, environment.now) == ([1, 2], 3)
