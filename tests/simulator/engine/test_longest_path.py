"""Three ways to walk a graph that must agree."""

import numpy as np
import pytest
from hypothesis import given, settings

from meshwise.simulator.engine import compiled
from meshwise.simulator.engine.longest_path import (
    finish_times,
    walk_graph,
    walk_waves,
)
from meshwise.simulator.engine.step_graph import compile_program
from meshwise.simulator.program import Program, Task, TaskKind

from ..programs import program, programs

needs_numba = pytest.mark.skipif(not compiled.installed(), reason="numba is not installed")


@needs_numba
@settings(max_examples=1000, deadline=None)
@given(programs(flows=True))
def test_the_ways_agree(step: Program) -> None:
    graph = compile_program(step)
    loop = walk_graph(graph, is_compiled=False)
    for ours, kernel in zip(loop, walk_graph(graph, is_compiled=True), strict=True):
        assert ours.tolist() == kernel.tolist()
    for ours, waves in zip(loop[:2], walk_waves(graph), strict=True):
        assert ours.tolist() == waves.tolist()


@given(programs())
def test_the_order_is_topological(step: Program) -> None:
    graph = compile_program(step)
    order = walk_graph(graph, is_compiled=False).order
    assert sorted(order.tolist()) == list(range(step.num_tasks))
    place = np.argsort(order)
    source = np.repeat(np.arange(step.num_tasks), np.diff(graph.successor_start))
    assert np.all(place[source] < place[graph.successors])


def test_without_numba_and_with_many_streams_waves_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(TaskKind.FORWARD, (index,), index) for index in range(300)]
    step = program(tasks, 300)
    monkeypatch.setattr("meshwise.simulator.engine.longest_path.installed", lambda: False)
    assert finish_times(step)[1].tolist() == list(range(300))
