"""What a program becomes for the engines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.step_graph import compile_program, start_times
from meshwise.simulator.program import Background, Flow, Program, Task, TaskKind

from ..programs import TICK, program, programs


def task(streams: tuple[int, ...], before: tuple[int, ...] = (), usage: tuple[tuple[int, float], ...] = ()) -> Task:
    return Task(TaskKind.FORWARD, streams, 5, before, usage)


def test_edges_are_stream_order_and_predecessors_without_repetition() -> None:
    # 0 and 2 share stream 0, and 2 also names 0; 1 waits for 2; 3 holds both streams
    graph = compile_program(program([task((0,)), task((1,), (2,)), task((0,), (0,)), task((0, 1))], 2))
    assert graph.successor_start.tolist() == [0, 1, 2, 4, 4]
    assert graph.successors.tolist() == [2, 3, 1, 3]
    assert graph.num_waits.tolist() == [0, 1, 1, 2]


@settings(max_examples=300, deadline=None)
@given(programs(flows=True))
def test_edges_are_those_of_a_plain_loop(step: Program) -> None:
    expected: set[tuple[int, int]] = set()
    last: dict[int, int] = {}
    for index in range(step.num_tasks):
        expected |= {(before, index) for before in step.predecessors_of(index)}
        expected |= {(last[stream], index) for stream in step.streams_of(index) if stream in last}
        last |= dict.fromkeys(step.streams_of(index), index)
    graph = compile_program(step)
    source = np.repeat(np.arange(step.num_tasks), np.diff(graph.successor_start))
    assert list(zip(source.tolist(), graph.successors.tolist(), strict=True)) == sorted(expected)
    walk = walk_graph(graph, is_compiled=False)
    assert start_times(graph, walk.ends).tolist() == walk.starts.tolist()


def test_only_transfers_that_can_meet_others_are_flows() -> None:
    # link 0: tasks of streams 0 and 1, which share none; link 1: both hold stream 2; link 2: one task
    usages = [((0,), 0), ((1,), 0), ((0, 2), 1), ((1, 2), 1), ((3,), 2)]
    tasks = [task(streams, (), ((link, 7 * TICK),)) for streams, link in usages]
    step = program(tasks, 4)
    graph = compile_program(step)
    assert (graph.flow >= 0).tolist() == [True, True, False, False, False]
    assert graph.durations.tolist() == [12] * 5
    assert graph.latencies.tolist() == [5, 5, 12, 12, 12]
    tenant = Background("other", Flow(((2, 1.0),)), 0, 10, 0)
    heard = compile_program(replace(step, background=(tenant,)))
    assert (heard.flow >= 0).tolist() == [True, True, False, False, True]


def test_tenants_count_only_where_they_are_felt() -> None:
    step = program([task((0,), (), ((0, 7 * TICK),))])
    near, far, alone = (Background(name, Flow(usage), 0, 10, 0) for name, usage in NEIGHBOURS)
    assert [tenant.name for _, tenant in compile_program(replace(step, background=(near, far))).tenants] == [
        "near",
        "far",
    ]
    graph = compile_program(replace(step, background=(far, alone)))
    assert graph.tenants == () and graph.flow.tolist() == [-1]


NEIGHBOURS = (("near", ((0, 1.0), (1, 1.0))), ("far", ((1, 1.0),)), ("alone", ((2, 1.0),)))


def test_a_flow_that_moves_nothing_is_none() -> None:
    tasks = [task((0,), (), ((0, 0.0),)), task((1,), (), ((0, 1.0),))]
    assert compile_program(program(tasks, 2)).flow.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([task((0, 0))], "a task names a stream once, met task 0"),
        ([task((7,))], "a stream lies in 0..0, met 7"),
        ([task((0,), (3,))], "a task lies in 0..0, met 3"),
        ([task((0,), (-1,))], "a task lies in 0..0, met -1"),
        ([task((0,))._replace(duration=-4)], "ticks of a task lie in .*, met -4"),
        ([task((0,))._replace(duration=2**60)] * 2, "at most 1152921504606846976 ticks"),
        ([task((0,))._replace(duration=10**30)], "ticks of a task lie in .*, met 10{30}"),
        ([task((0,), (), ((0, 1e300),))], r"at most .* ticks .*, met 1e\+300 s"),
    ],
)
def test_nonsense_is_refused(tasks: list[Task], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_program(program(tasks))
