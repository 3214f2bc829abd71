"""The engines: hand-computed programs, agreement, contention, deadlock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import Link, Port, PortKind
from simulator.engine import Deadlock, simulate, step_time
from simulator.engine.discrete_event import finish_times as discrete_event
from simulator.engine.longest_path import finish_times as longest_path
from simulator.program import (
    Category,
    MemoryChange,
    Origin,
    Program,
    RankClass,
    Stream,
    StreamKind,
    Task,
    TaskKind,
    Transfer,
)
from simulator.units import TICKS_PER_SECOND

NIC = Port(PortKind.NIC_OUT, 0)
SECOND = TICKS_PER_SECOND


def task(
    streams: tuple[int, ...],
    duration: int,
    before: tuple[int, ...] = (),
    transfers: tuple[Transfer, ...] = (),
    kind: TaskKind = TaskKind.FORWARD,
) -> Task:
    return Task(kind, streams, duration, before, Origin(0, 0, ""), transfers)


def program(tasks: list[Task], streams: int, bandwidth: float = 1.0) -> Program:
    rows = tuple(Stream(index, StreamKind.COMPUTE) for index in range(streams))
    classes = tuple(RankClass(f"rank {index}", (index,), (index,)) for index in range(streams))
    return Program(classes, rows, tuple(tasks), (), 100.0, ((NIC, Link(0.0, bandwidth)),))


def test_streams_are_in_order_and_predecessors_are_waited_for() -> None:
    # stream 0: 3, 2; stream 1: 1 after the first of stream 0, so it ends at 4; the last waits for both: 5 + 4
    tasks = [task((0,), 3), task((1,), 1, (0,)), task((0,), 2), task((1,), 4, (1, 2))]
    assert discrete_event(program(tasks, 2)) == ([0, 3, 3, 5], [3, 4, 5, 9])


def test_a_rendezvous_starts_when_the_last_member_arrives_and_holds_all() -> None:
    tasks = [task((0,), 3), task((1,), 5), task((0, 1), 2), task((0,), 1)]
    assert discrete_event(program(tasks, 2))[1] == [3, 5, 7, 8]


def test_two_transfers_share_a_port_and_the_survivor_speeds_up() -> None:
    # 1 and 2 bytes at 1 byte/s: half rate each until 2 s, then the second finishes its last byte at 3 s
    tasks = [task((0,), 0, (), (Transfer(NIC, 1.0),)), task((1,), 0, (), (Transfer(NIC, 2.0),))]
    assert discrete_event(program(tasks, 2))[1] == [2 * SECOND, 3 * SECOND]
    assert longest_path(program(tasks, 2))[1] == [1 * SECOND, 2 * SECOND]


def test_latency_is_paid_before_bytes_flow() -> None:
    # the first flows alone in [0, 1] (1 of 2 bytes), both share in [1, 3], the second ends alone at 3 + 1 = 4
    tasks = [task((0,), 0, (), (Transfer(NIC, 2.0),)), task((1,), SECOND, (), (Transfer(NIC, 2.0),))]
    assert discrete_event(program(tasks, 2))[1] == [3 * SECOND, 4 * SECOND]


def test_transfers_of_one_stream_never_contend() -> None:
    tasks = [task((0,), 0, (), (Transfer(NIC, 1.0),)), task((0,), 0, (), (Transfer(NIC, 2.0),))]
    assert discrete_event(program(tasks, 1)) == longest_path(program(tasks, 1))


def test_a_deadlock_is_named() -> None:
    tasks = [task((0,), 1, (3,)), task((0,), 1), task((1,), 1, (1,)), task((1,), 1)]
    for engine in ("discrete_event", "longest_path"):
        with pytest.raises(Deadlock, match=r"rank 0: forward .* waits for .*rank 1: forward"):
            step_time(program(tasks, 2), engine)


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine is one of discrete_event, longest_path"):
        step_time(program([], 1), "packets")


@st.composite
def programs(draw: st.DrawFn, transfers: bool) -> Program:
    streams = draw(st.integers(1, 4))
    tasks = []
    for index in range(draw(st.integers(1, 25))):
        members = tuple(sorted(draw(st.sets(st.integers(0, streams - 1), min_size=1, max_size=2))))
        before = tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else ()
        size = draw(st.sampled_from([0.0, 1e-9, 3e-9, 7e-9])) if transfers else 0.0
        moved = (Transfer(NIC, size),) if size else ()
        tasks.append(task(members, draw(st.integers(0, 50)), before, moved))
    return program(tasks, streams)


@given(programs(transfers=False))
def test_discrete_event_is_the_longest_path_without_contention(step: Program) -> None:
    assert discrete_event(step) == longest_path(step)


@settings(max_examples=200)
@given(programs(transfers=True))
def test_the_longest_path_never_exceeds_the_discrete_event(step: Program) -> None:
    reference, bound = discrete_event(step)[1], longest_path(step)[1]
    assert all(low <= high for low, high in zip(bound, reference, strict=True))


@given(programs(transfers=True), st.floats(1, 8))
def test_more_bandwidth_is_never_slower_by_the_longest_path(step: Program, factor: float) -> None:
    wide = Program(step.rank_classes, step.streams, step.tasks, (), 100.0, ((NIC, Link(0.0, factor)),))
    assert max(longest_path(wide)[1]) <= max(longest_path(step)[1])


def test_memory_rises_and_returns() -> None:
    def memory(*sizes: int) -> tuple[MemoryChange, ...]:
        return tuple(MemoryChange(0, Category.ACTIVATIONS, size) for size in sizes)

    first = task((0,), SECOND)._replace(acquired=memory(10))
    second = task((0,), SECOND)._replace(acquired=memory(5), released=memory(-15))
    step = program([first, second], 1)
    step = Program(step.rank_classes, step.streams, step.tasks, (MemoryChange(0, Category.PARAMETERS, 7),), 100.0)
    profile = simulate(step).memory[0]
    assert profile.times == (0.0, 1.0, 2.0)
    assert profile.totals == (17.0, 22.0, 7.0)
    assert (profile.peak, profile.peak_time) == (22.0, 1.0)
