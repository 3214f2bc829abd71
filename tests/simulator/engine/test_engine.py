"""The engines: hand-computed programs, and laws that hold of every program."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import Deadlock, simulate, step_bound, step_time
from meshwise.simulator.engine import discrete_event as engine
from meshwise.simulator.engine.longest_path import finish_times as longest_path
from meshwise.simulator.program import Background, Flow, LinkClass, Program, Task, TaskKind
from meshwise.simulator.units import TICKS_PER_SECOND as SECOND

from ..programs import program, programs

discrete_event = partial(engine.finish_times, every_event=True)
THOROUGH = settings(max_examples=1000, deadline=None)


def task(streams: tuple[int, ...], duration: int, before: tuple[int, ...] = (), size: float = 0.0) -> Task:
    return Task(TaskKind.FORWARD, streams, duration, before, ((0, size),) if size else ())


def ends(step: Program, engine: str = "discrete_event") -> list[int]:
    return {"discrete_event": discrete_event, "longest_path": longest_path}[engine](step)[1].tolist()


def test_streams_are_in_order_and_predecessors_are_waited_for() -> None:
    # stream 0: 3, 2; stream 1: 1 after the first of stream 0, so it ends at 4; the last waits for both: 5 + 4
    tasks = [task((0,), 3), task((1,), 1, (0,)), task((0,), 2), task((1,), 4, (1, 2))]
    starts, found = discrete_event(program(tasks, 2))
    assert (starts.tolist(), found.tolist()) == ([0, 3, 3, 5], [3, 4, 5, 9])


def test_a_rendezvous_starts_when_the_last_member_arrives_and_holds_all() -> None:
    assert ends(program([task((0,), 3), task((1,), 5), task((0, 1), 2), task((0,), 1)], 2)) == [3, 5, 7, 8]


def test_a_predecessor_may_come_later_in_the_program() -> None:
    assert ends(program([task((0,), 3, (1,)), task((1,), 5)], 2)) == [8, 5]


def test_two_transfers_share_a_link_and_the_survivor_speeds_up() -> None:
    # 1 and 2 bytes at 1 byte/s: half rate each until 2 s, then the second finishes its last byte at 3 s
    step = program([task((0,), 0, (), 1.0), task((1,), 0, (), 2.0)], 2)
    assert ends(step) == [2 * SECOND, 3 * SECOND]
    assert ends(step, "longest_path") == [1 * SECOND, 2 * SECOND]


def test_latency_is_paid_before_bytes_flow() -> None:
    # the first flows alone in [0, 1] (1 of 2 bytes), both share in [1, 3], the second ends alone at 3 + 1 = 4
    assert ends(program([task((0,), 0, (), 2.0), task((1,), SECOND, (), 2.0)], 2)) == [3 * SECOND, 4 * SECOND]


def test_transfers_that_hold_a_common_stream_never_contend() -> None:
    # 1 s and 2 s one after another on stream 1, though their first streams differ
    assert ends(program([task((0, 1), 0, (), 1.0), task((1, 2), 0, (), 2.0)], 3)) == [1 * SECOND, 3 * SECOND]


def test_a_tenant_takes_half_the_link_again_and_again_and_does_not_extend_the_step() -> None:
    # the tenant moves 1 byte in [0, 2] and, as 3 s have passed, from 3 s on; the task moves 1 byte by 2 s,
    # 1 more by 3 s, and half of the last 1 by 4 s: it shares until the tenant's second byte is through at 5 s
    tenant = Background("other", Flow(((0, 1.0),)), 0, 3 * SECOND, 0)
    step = replace(program([task((0,), 0, (), 3.0)]), background=(tenant,))
    assert ends(step) == [5 * SECOND]
    slow = replace(step, background=(replace_tenant(tenant, start=4 * SECOND),))
    assert ends(slow) == [3 * SECOND]
    assert step_time(slow) == 3.0


def replace_tenant(tenant: Background, **fields: int) -> Background:
    return tenant._replace(**fields)


def test_a_tenant_is_never_there_twice_and_pays_latency() -> None:
    # 1 s latency and 1 byte: alone on the link it moves in [1, 2], [3, 4], ...; with period 0.5 it waits for its end
    tenant = Background("other", Flow(((0, 1.0),)), SECOND, SECOND // 2, 0)
    step = replace(program([task((0,), 0, (), 2.0)]), background=(tenant,))
    # task: 1 byte alone by 1 s; shares from 1 s to 3 s, when both have moved their last byte
    assert ends(step) == [3 * SECOND]


def test_a_deadlock_beside_a_tenant_is_found() -> None:
    tenant = Background("other", Flow(((0, 1.0),)), 0, SECOND, 0)
    # the last task never starts, so the tenant would never stop
    tasks = [task((0,), 1, (1,)), task((0,), 1), task((1,), 0, (), 1.0), task((0,), 1)]
    with pytest.raises(Deadlock):
        ends(replace(program(tasks, 2), background=(tenant,)))


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine is one of discrete_event, longest_path, met packets"):
        step_time(program([]), "packets")


def test_an_empty_program_takes_no_time() -> None:
    assert step_time(program([])) == step_time(program([]), "longest_path") == step_bound(program([])) == 0
    assert list(simulate(program([])).spans) == []


@given(programs())
@THOROUGH
def test_events_that_are_left_out_would_change_nothing(step: Program) -> None:
    for short, whole in zip(engine.finish_times(step), discrete_event(step), strict=True):
        assert short.tolist() == whole.tolist()


@THOROUGH
@given(programs())
def test_discrete_event_is_the_longest_path_without_sharing(step: Program) -> None:
    for ours, theirs in zip(discrete_event(step), longest_path(step), strict=True):
        assert ours.tolist() == theirs.tolist()


@THOROUGH
@given(programs(flows=True))
def test_bound_below_longest_path_below_discrete_event(step: Program) -> None:
    starts, path = longest_path(step)
    assert step_bound(step) <= path.max()
    begins, reference = discrete_event(step)
    assert np.all(path <= reference) and np.all(starts <= begins)


@THOROUGH
@given(programs(flows=True))
def test_no_link_carries_more_than_it_can(step: Program) -> None:
    timeline = simulate(step)
    # a rate is a float, so an end may be a thousandth of a tick early
    assert all(link.bytes <= link.bandwidth * (timeline.step_time + 1e-14) for link in timeline.links)
    # every byte is there: three links, the sizes of the tasks
    moved = sum(size for flow in step.flow_of.tolist() if flow >= 0 for _, size in step.flows[flow].usage)
    assert sum(link.bytes for link in timeline.links) == pytest.approx(moved)


@THOROUGH
@given(programs(flows=True), st.integers(0, 2))
def test_more_bandwidth_is_never_slower_without_sharing(step: Program, index: int) -> None:
    links = list(step.links)
    links[index] = LinkClass(links[index].name, 2.0)
    assert np.all(longest_path(replace(step, links=tuple(links)))[1] <= longest_path(step)[1])


@THOROUGH
@given(programs(flows=True), st.randoms(use_true_random=False))
def test_names_of_rank_classes_and_streams_do_not_matter(step: Program, random: object) -> None:
    streams, classes = np.arange(len(step.streams)), np.arange(len(step.rank_classes))
    random.shuffle(streams)  # type: ignore[attr-defined]
    random.shuffle(classes)  # type: ignore[attr-defined]
    moved = [step.streams[0]] * len(streams)
    for old, new in enumerate(streams.tolist()):
        stream = step.streams[old]
        moved[new] = stream._replace(rank_class=int(classes[stream.rank_class]))
    other = replace(
        step,
        rank_classes=tuple(step.rank_classes[i] for i in np.argsort(classes)),
        streams=tuple(moved),
        stream_of=streams[step.stream_of],
    )
    for ours, theirs in zip(discrete_event(step), discrete_event(other), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_the_same_bytes_under_any_hash_seed() -> None:
    code = (
        "import random, sys; sys.path.insert(0, sys.argv[1])\n"
        "from programs import KINDS, USAGES, program\n"
        "from meshwise.simulator.engine import simulate\n"
        "from meshwise.simulator.program import Task\n"
        "r = random.Random(1)\n"
        "tasks = [Task(r.choice(KINDS), tuple(sorted(r.sample(range(9), 2))), r.randrange(9999),\n"
        "              tuple({max(i - 1 - r.randrange(9), 0)} if i else ()), r.choice(USAGES)) for i in range(400)]\n"
        "t = simulate(program(tasks, 3, 3))\n"
        "print(*t.spans, t.bubble, t.exposed_communication(), *t.memory, *t.links)\n"
    )
    root = Path(__file__).parents[1]  # the folder of programs.py
    outputs = set()
    for seed in range(5):
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root.parent.parent)}
        command = [sys.executable, "-c", code, str(root)]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(outputs) == 1 and len(outputs.pop()) > 10_000
