"""Computing beneath data communication: by hand, and against a clock that ticks."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.discrete_event import finish_times
from meshwise.simulator.program import Piece, Program, Task, TaskKind, Work
from meshwise.simulator.units import TICKS_PER_SECOND as SECOND

from ..programs import program, programs


def task(kind: TaskKind, streams: tuple[int, ...], duration: int, size: float = 0.0) -> Task:
    return Task(kind, streams, duration, (), ((0, size),) if size else ())


def ends(tasks: list[Task], slowdown: float, classes: int = 1) -> list[int]:
    return finish_times(program(tasks, classes, 2, slowdown))[1].tolist()


def test_computing_is_slowed_only_while_the_communication_runs() -> None:
    # 4 ticks at half speed do 2 of 10; the other 8 at full speed
    tasks = [task(TaskKind.FORWARD, (0,), 10), task(TaskKind.DATA_COMMUNICATION, (1,), 4)]
    assert ends(tasks, 2.0) == [12, 4]


def test_a_part_of_a_tick_is_a_whole_one() -> None:
    # 10 / (1 / 1.25) = 12.5
    tasks = [task(TaskKind.FORWARD, (0,), 10), task(TaskKind.DATA_COMMUNICATION, (1,), 100)]
    assert ends(tasks, 1.25) == [13, 100]


def test_latency_does_not_slow_but_bytes_do() -> None:
    # 1 s latency, then 2 bytes in [1, 3] s: computing does 1 s, then 2 s of its 2 s left at half speed, then 1 s
    tasks = [task(TaskKind.BACKWARD, (0,), 3 * SECOND), task(TaskKind.DATA_COMMUNICATION, (1,), SECOND, 2.0)]
    assert ends(tasks, 2.0) == [4 * SECOND, 3 * SECOND]


def test_communication_and_other_ranks_are_not_slowed() -> None:
    tasks = [
        task(TaskKind.TENSOR_COMMUNICATION, (0,), 10),
        task(TaskKind.DATA_COMMUNICATION, (1,), 10),
        task(TaskKind.FORWARD, (2,), 10),
    ]
    assert ends(tasks, 2.0, classes=2) == [10, 10, 10]


def test_a_rendezvous_slows_all_its_ranks() -> None:
    tasks = [task(TaskKind.DATA_COMMUNICATION, (1, 3), 100), *(task(TaskKind.FORWARD, (s,), 10) for s in (0, 2))]
    assert ends(tasks, 2.0, classes=2) == [100, 20, 20]


def test_a_task_of_several_pieces_is_not_slowed() -> None:
    step = program([task(TaskKind.FORWARD, (0,), 10), task(TaskKind.DATA_COMMUNICATION, (1,), 100)], 1, 2, 2.0)
    pieces = (Piece(TaskKind.FORWARD, "", 0, 4), Piece(TaskKind.FORWARD, "", 4, 10))
    step = replace(step, work=(Work(TaskKind.FORWARD, 0, 10, pieces), step.work[1]))
    assert finish_times(step)[1].tolist() == [10, 100]


def by_the_clock(step: Program) -> list[int]:
    """Return the ends of tasks without flows, by moving on tick after tick."""
    classes = [sorted({step.streams[s].rank_class for s in step.streams_of(t)}) for t in range(step.num_tasks)]
    kinds = [step.work[index].kind for index in step.work_of]
    before = [set(step.predecessors_of(t)) for t in range(step.num_tasks)]
    for index in range(step.num_tasks):
        held = set(step.streams_of(index))
        before[index] |= {other for other in range(index) if held & set(step.streams_of(other))}
    left = [Fraction(step.work[index].duration) for index in step.work_of]
    ended: dict[int, int] = {}
    now = 0
    while len(ended) < step.num_tasks:
        while True:
            running = [t for t in range(step.num_tasks) if t not in ended and before[t] <= ended.keys()]
            done = [t for t in running if left[t] <= 0]
            ended |= dict.fromkeys(done, now)
            if not done:
                break
        slowed = {c for t in running if kinds[t] is TaskKind.DATA_COMMUNICATION for c in classes[t]}
        for t in running:
            slow = kinds[t].computes and len(classes[t]) == 1 and classes[t][0] in slowed
            left[t] -= 1 / Fraction(step.slowdown) if slow else 1
        now += 1
    return [ended[t] for t in range(step.num_tasks)]


@settings(max_examples=300, deadline=None)
@given(programs(), st.sampled_from([1.0, 1.1, 1.25, 2.0]))
def test_every_end_is_that_of_a_clock_that_ticks(step: Program, slowdown: float) -> None:
    work = tuple(
        replace(item, duration=item.duration % 23, pieces=(item.pieces[0]._replace(end=item.duration % 23),))
        for item in step.work
    )
    step = replace(step, work=work, slowdown=slowdown)
    assert finish_times(step)[1].tolist() == by_the_clock(step)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_a_slowdown_costs_at_most_its_factor(step: Program) -> None:
    plain, slowed = finish_times(step)[1], finish_times(replace(step, slowdown=2.0))[1]
    assert np.all(plain <= slowed) and np.all(slowed <= 2 * plain)


def test_a_factor_of_one_changes_nothing() -> None:
    tasks = [task(TaskKind.FORWARD, (0,), 10), task(TaskKind.DATA_COMMUNICATION, (1,), 100)]
    assert ends(tasks, 1.0) == [10, 100]
    with pytest.raises(ValueError, match=r"slowdown is at least 1, met 0.5"):
        ends(tasks, 0.5)
