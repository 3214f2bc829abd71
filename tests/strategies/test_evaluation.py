"""What a step spends its time on, by hand: averaged over rank classes, communication where nothing hides it."""

import pytest

from meshwise.simulator.engine import simulate
from meshwise.simulator.program import Task, TaskKind
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.evaluation import Resource, compute_resource_times

from ..simulator.programs import program

SECOND = TICKS_PER_SECOND


def test_seconds_of_two_ranks_by_hand() -> None:
    # the first rank computes 4 s and runs 2 s again, then data are exposed for 3 s; the second computes 1 s
    tasks = [
        Task(TaskKind.FORWARD, (0,), 4 * SECOND, stage=0, microbatch=0),
        Task(TaskKind.RECOMPUTE, (0,), 2 * SECOND, stage=0, microbatch=0),
        Task(TaskKind.DATA_COMMUNICATION, (2,), 3 * SECOND, (1,), stage=0),
        Task(TaskKind.FORWARD, (3,), 1 * SECOND, stage=1, microbatch=0),
    ]
    timeline = simulate(program(tasks, classes=2, kinds=3), "longest_path")
    found = compute_resource_times(timeline)
    assert timeline.step_time == 9
    assert found[Resource.COMPUTE] == pytest.approx((4 + 1) / 2)
    assert found[Resource.RECOMPUTE] == pytest.approx(2 / 2)
    assert found[Resource.BUBBLE] == pytest.approx(timeline.bubble * 9)
    assert found[Resource.DATA] == pytest.approx(timeline.exposed_communication()[TaskKind.DATA_COMMUNICATION])
    assert found[Resource.DATA] > 0 == found[Resource.TENSOR]


def test_data_beneath_computing_cost_nothing() -> None:
    tasks = [
        Task(TaskKind.FORWARD, (0,), 1 * SECOND, stage=0, microbatch=0),
        Task(TaskKind.BACKWARD, (0,), 4 * SECOND, stage=0, microbatch=0),
        Task(TaskKind.DATA_COMMUNICATION, (2,), 3 * SECOND, (0,), stage=0),
    ]
    found = compute_resource_times(simulate(program(tasks, classes=1, kinds=3), "longest_path"))
    assert found[Resource.DATA] == 0 and found[Resource.COMPUTE] == 5
