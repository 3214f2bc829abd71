"""Deadlocks are found, named, and only where there are any."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import ENGINES, Deadlock
from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.step_graph import compile_program
from meshwise.simulator.program import Program, Task, TaskKind, ragged

from ..programs import program, programs


def task(streams: tuple[int, ...], before: tuple[int, ...] = (), **fields: object) -> Task:
    return Task(TaskKind.FORWARD, streams, 1, before, **fields)._replace(stage=streams[0])  # type: ignore[arg-type]


def waits(step: Program, task: int, other: int) -> bool:
    """Whether a task waits for another: by name, or because both hold a stream and the other is before it."""
    shared = set(step.streams_of(task)) & set(step.streams_of(other))
    return other in step.predecessors_of(task) or bool(shared and other < task)


@settings(max_examples=1000, deadline=None)
@given(programs(flows=True), st.data())
def test_planted_cycles_are_found_and_named(step: Program, data: st.DataObject) -> None:
    # an edge back from a task to one that it can start only after, or to itself
    order = walk_graph(compile_program(step)).order.tolist()
    first = data.draw(st.sampled_from(order))
    reached = {first}
    for index in order:
        if any(waits(step, index, other) for other in reached):
            reached.add(index)
    last = data.draw(st.sampled_from(sorted(reached)))
    rows = [[*step.predecessors_of(index), *([last] if index == first else [])] for index in range(step.num_tasks)]
    start, before = ragged(rows)
    stuck = replace(step, predecessor_start=start, predecessor_of=before)
    for engine in ENGINES.values():
        with pytest.raises(Deadlock) as caught:
            engine(stuck)
        cycle = caught.value.cycle
        assert cycle and len(set(cycle)) == len(cycle)
        for index, other in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            assert waits(stuck, index, other)
        text = str(caught.value)
        assert len(re.findall(r"\[stage \d \(rank \d\): ", text)) == min(len(cycle), 12)


def test_a_cycle_over_streams_is_told_without_what_lies_between() -> None:
    # 0 waits for 3 on the other rank, which comes after 2, which waits for 1, which comes after 0 on stream 0
    fields = {"operators": "layers.3", "microbatch": 1}
    tasks = [task((0,), (3,), **fields), task((0,), **fields), task((1,), (1,)), task((1,))]
    with pytest.raises(Deadlock) as caught:
        ENGINES["discrete_event"](program(tasks, 2))
    assert caught.value.cycle == (0, 3, 2, 1)
    assert str(caught.value) == (
        "4 of 4 tasks can never start, because some wait for each other: "
        "[stage 0 (rank 0): forward layers.3 of microbatch 1 on stage 0] waits for "
        "[stage 1 (rank 2): forward on stage 1] waits for [stage 1 (rank 2): forward on stage 1] waits for "
        "[stage 0 (rank 0): forward layers.3 of microbatch 1 on stage 0], which waits for the first"
    )


def test_peers_of_a_rendezvous_are_named() -> None:
    # the two ranks meet for 0 and 1 in the opposite order
    tasks = [task((0, 1), (1,)), task((2, 3)), task((1,)), task((3,), (2,))]
    with pytest.raises(Deadlock, match=r"\[stage 0 \(rank 0\): forward with stage 1 \(rank 2\) on stage 0\]"):
        ENGINES["longest_path"](program([tasks[0], tasks[1]._replace(predecessors=(0,))], 4))


def test_a_long_cycle_is_cut() -> None:
    tasks = [task((index,), ((index + 1) % 30,)) for index in range(30)]
    with pytest.raises(Deadlock, match="waits for 18 more, which waits for the first") as caught:
        ENGINES["longest_path"](program(tasks, 30))
    assert len(caught.value.cycle) == 30
