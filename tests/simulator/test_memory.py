"""Memory over time: by hand, and against a plain loop over what tasks take and give back."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import Category, Change, HostClass, MemoryChange, Piece, Program, Task, TaskKind, Work
from meshwise.simulator.units import TICKS_PER_SECOND as SECOND

from .profiles import sweep
from .programs import program, programs


def activations(size: int, host: bool = False) -> Change:
    return Change(Category.ACTIVATIONS, size, host)


def test_memory_rises_and_returns() -> None:
    first = Task(TaskKind.FORWARD, (0,), SECOND, acquisitions=(activations(10),))
    second = Task(TaskKind.FORWARD, (0,), SECOND, acquisitions=(activations(5),), releases=(activations(15),))
    step = replace(
        program([first, second]), resident_memory=(MemoryChange(0, Category.PARAMETERS, 7),), capacity=(100.0,)
    )
    profile = simulate(step).memory[0]
    assert profile.times == (0.0, 1.0, 2.0)
    assert profile.totals == (17.0, 22.0, 7.0)
    assert profile.usage[1] == (7.0, 0.0, 0.0, 15.0, 0.0)
    assert (profile.peak, profile.peak_time, profile.capacity) == (22.0, 1.0, 100.0)


def test_pieces_take_at_their_own_time_and_on_each_rank_of_the_task_once() -> None:
    # both ranks take 4 in the middle of the task, though the first holds it with two streams
    pieces = (
        Piece(TaskKind.FORWARD, "", 0, SECOND),
        Piece(TaskKind.FORWARD, "", SECOND, 3 * SECOND, acquisitions=(activations(4),), releases=(activations(1),)),
    )
    step = program([Task(TaskKind.FORWARD, (0, 1, 2), 3 * SECOND)], 2, 2)
    step = replace(step, work=(Work(TaskKind.FORWARD, 0, 3 * SECOND, pieces),))
    for profile in simulate(step).memory:
        assert (profile.times, profile.totals) == ((0.0, 1.0, 3.0), (0.0, 4.0, 3.0))


def test_what_is_given_back_at_an_instant_is_free_for_what_is_taken_then() -> None:
    tasks = [Task(TaskKind.FORWARD, (0,), SECOND, acquisitions=(activations(6),), releases=(activations(6),))] * 2
    assert simulate(program(tasks)).peak_memory == 6.0


def test_a_host_holds_what_all_its_members_put_there() -> None:
    # one host has two ranks of stage 0 and one of stage 1, each with 3 resident and 5 more on stage 0
    tasks = [Task(TaskKind.HOST_COPY, (0,), SECOND, acquisitions=(activations(5, True), activations(9)))]
    hosts = (HostClass("mixed", 64.0, ((0, 2), (1, 1))), HostClass("idle", 32.0, ()))
    resident = tuple(MemoryChange(index, Category.OPTIMIZER, 3, True) for index in range(2))
    timeline = simulate(replace(program(tasks, 2), hosts=hosts, resident_memory=resident))
    mixed, idle = timeline.host_memory
    assert (mixed.times, mixed.totals, mixed.capacity) == ((0.0,), (2 * 3 + 3 + 2 * 5.0,), 64.0)
    assert (idle.totals, idle.peak) == ((0.0,), 0.0)
    assert [profile.peak for profile in timeline.memory] == [9.0, 0.0]
    assert timeline.hosts == hosts


def test_a_profile_of_plain_tuples_is_the_same_profile() -> None:
    profile = MemoryProfile(0, 9.0, (0.0, 1.0), ((1.0, 0, 0, 0, 0), (2.0, 0, 0, 3.0, 0)))
    change = MemoryChange(0, Category.ACTIVATIONS, 3), MemoryChange(0, Category.PARAMETERS, 1)
    swept = sweep(0, 9.0, [change[1]], [(1.0, change[0]), (1.0, change[1]), (0.5, change[0]._replace(rank_class=1))])
    assert swept == profile
    assert (profile.totals.index(5.0), profile.peak_time, repr(swept.times)) == (1, 1.0, "(0.0, 1.0)")
    assert np.array(swept.usage).shape == (2, len(CATEGORIES))


@settings(max_examples=300, deadline=None)
@given(programs(flows=True))
def test_memory_is_that_of_a_plain_loop(step: Program) -> None:
    hosts = tuple(HostClass("host", 9.0, tuple((c, 2) for c in range(len(step.rank_classes)))) for _ in range(2))
    timeline = simulate(replace(step, hosts=hosts))
    times = {s.operators: (s.start, s.end) for s in timeline.spans}
    events: list[tuple[float, int, Change, int]] = []
    for task in range(step.num_tasks):
        piece = step.work[step.work_of[task]].pieces[0]
        for rank_class in {step.streams[stream].rank_class for stream in step.streams_of(task)}:
            start, end = times[piece.operators]
            events += [(start, rank_class, change, 1) for change in piece.acquisitions]
            events += [(end, rank_class, change, -1) for change in piece.releases]
    for index, profile in enumerate(timeline.memory):
        own = [(t, change.size * sign) for t, c, change, sign in events if c == index and not change.host]
        assert profile.times == tuple(sorted({0.0, *(t for t, _ in own)}))
        assert profile.totals == tuple(sum(size for t, size in own if t <= now) for now in profile.times)
    host = [(t, 2 * change.size * sign) for t, _, change, sign in events if change.host]
    for profile in timeline.host_memory:
        assert profile.totals == tuple(sum(size for t, size in host if t <= now) for now in profile.times)
