"""A contracted graph is smaller, and its tasks start and end when those of the original do."""

import numpy as np
import pytest
from hypothesis import given, settings

from meshwise.simulator.engine import compiled
from meshwise.simulator.engine.contraction import Contraction, contract_graph, expand_times
from meshwise.simulator.engine.discrete_event import run_graph
from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.step_graph import compile_program, start_times
from meshwise.simulator.program import Program, Task, TaskKind

from ..programs import program, programs


def contraction(step: Program) -> Contraction:
    result = contract_graph(compile_program(step))
    assert result is not None
    return result


@settings(max_examples=1000, deadline=None)
@given(programs(flows=True))
def test_the_longest_path_is_the_same_inside_too(step: Program) -> None:
    small = contraction(step)
    inner, outer = walk_graph(small.graph, is_compiled=False), walk_graph(small.source_graph, is_compiled=False)
    starts, ends = expand_times(small, inner.starts, inner.ends)
    assert starts.tolist() == outer.starts.tolist()
    assert ends.tolist() == outer.ends.tolist()


@settings(max_examples=1000, deadline=None)
@given(programs(flows=True))
def test_the_discrete_events_are_the_same_inside_too(step: Program) -> None:
    small = contraction(step)
    inner, outer = run_graph(small.graph), run_graph(small.source_graph)
    starts, ends = expand_times(small, start_times(small.graph, inner), inner)
    assert starts.tolist() == start_times(small.source_graph, outer).tolist()
    assert ends.tolist() == outer.tolist()


def test_a_chain_beside_implied_edges_becomes_one_task() -> None:
    # 0 -> 1 -> 2 on one stream, and 2 also waits for 0: that edge says nothing, and all three are one
    tasks = [Task(TaskKind.FORWARD, (0,), duration) for duration in (3, 4, 5)]
    tasks[2] = tasks[2]._replace(predecessors=(0,))
    small = contraction(program(tasks))
    assert small.graph.durations.tolist() == [12]
    assert small.offset.tolist() == [0, 3, 7]


def test_transfers_that_contend_stay_alone() -> None:
    sends = [Task(TaskKind.FORWARD, (stream,), 1, (), ((0, 1.0),)) for stream in (0, 0, 1)]
    small = contraction(program([*sends, Task(TaskKind.FORWARD, (0,), 2), Task(TaskKind.FORWARD, (0,), 3)], 2))
    # in order of time: the first send of each stream, the second of stream 0, and the two behind it in one
    assert small.chain_of.tolist() == [0, 2, 1, 3, 3]
    assert small.graph.flow.tolist() == [0, 0, 0, -1]


def test_launches_that_are_always_ahead_are_one_task_and_so_is_what_they_launch() -> None:
    # launches of 1 end at 1 .. 3, what they launch, of 5, begins at 1, 6 and 11: only the first one waits for its own
    launches = [Task(TaskKind.LAUNCH, (0,), 1) for _ in range(3)]
    passes = [Task(TaskKind.FORWARD, (1,), 5, (launch,)) for launch in range(3)]
    small = contraction(program([*launches, *passes], 2))
    assert small.chain_of.tolist() == [0, 1, 1, 2, 2, 2]
    assert small.graph.durations.tolist() == [1, 2, 15]


def test_what_contention_may_delay_is_waited_for() -> None:
    # alone the send of task 1 would end long before task 0, but beside that of task 2 nobody knows when
    sends = [Task(TaskKind.FORWARD, (stream,), 1, (), ((0, 1.0),)) for stream in (1, 2)]
    joined = Task(TaskKind.FORWARD, (3,), 1, (0, 1))
    small = contraction(program([Task(TaskKind.FORWARD, (0,), 10**15), *sends, joined], 4))
    assert small.graph.num_waits.tolist() == [0, 0, 0, 2]


def test_a_cycle_is_not_contracted() -> None:
    # every edge of this cycle is implied by two others: left out, nothing would be stuck any more
    tasks = [Task(TaskKind.FORWARD, (index,), 1, tuple({0, 1, 2} - {index})) for index in range(3)]
    assert contract_graph(compile_program(program(tasks, 3))) is None


@pytest.mark.skipif(not compiled.installed(), reason="numba is not installed")
def test_compiled_or_not_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    tasks = [
        Task(TaskKind.FORWARD, (int(random.integers(9)),), int(random.integers(50)), (i - 3,) if i % 5 == 3 else ())
        for i in range(400)
    ]
    graph = compile_program(program(tasks, 9))
    results = []
    for pays in (True, False):
        monkeypatch.setattr("meshwise.simulator.engine.contraction.pays", lambda tasks, pays=pays: pays)
        small = contract_graph(graph)
        assert small is not None and small.graph.num_tasks < 300
        columns = (small.chain_of, small.offset, small.graph.successors, small.graph.durations)
        results.append([column.tolist() for column in columns])
    assert results[0] == results[1]
