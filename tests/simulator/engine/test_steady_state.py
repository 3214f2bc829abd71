"""The step time of steps in a row: what one more adds once they repeat, and when they do."""

from dataclasses import replace

import numpy as np
import pytest

from meshwise.simulator.engine import longest_path, simulate, step_ticks, step_time
from meshwise.simulator.engine.steady_state import find_recurrence, find_window
from meshwise.simulator.program import Program, RankClass, Steps, Stream, StreamKind, Task, TaskKind, program_of
from meshwise.simulator.timeline import Window

FORWARD, BACKWARD = TaskKind.FORWARD, TaskKind.BACKWARD


def loop(steps: int, forward: int, slow: int, in_flight: int) -> Program:
    """Return steps of two tasks on two streams; the first one is at most ``in_flight`` steps ahead of the second."""
    tasks = []
    for step in range(steps):
        behind = (2 * (step - in_flight) + 1,) if step >= in_flight else ()
        tasks += [Task(FORWARD, (0,), forward, behind), Task(BACKWARD, (1,), slow, (2 * step,))]
    streams = [Stream(0, StreamKind.COMPUTE), Stream(1, StreamKind.COMPUTE)]
    program = program_of([RankClass("a", (0,), (0,)), RankClass("b", (1,), (1,))], streams, tasks)
    return replace(program, steps=Steps(np.arange(2 * steps).reshape(steps, 2), in_flight))


def test_a_step_takes_what_its_slower_stream_takes() -> None:
    # the second stream is never idle once it has begun: 5 ticks a step; the first one has 5 - 3 = 2 ticks to spare
    assert step_ticks(loop(12, 3, 5, 2)) == 5
    assert step_time(loop(12, 3, 5, 2), "longest_path") == 5e-12


def test_a_step_takes_what_goes_round_where_one_is_in_flight() -> None:
    # each waits for the other: 3 + 5
    assert step_ticks(loop(12, 3, 5, 1)) == 8


def test_a_period_of_several_steps_is_taken_as_a_whole() -> None:
    # two steps are in flight and go round in 1 + 1 + 8 ticks: 2 every 10, one 1 tick behind the other, the next 9
    tasks = []
    for step in range(12):
        behind = (3 * (step - 2) + 2,) if step >= 2 else ()
        tasks.append(Task(FORWARD, (0,), 1, behind))
        tasks.append(Task(BACKWARD, (1,), 1, (3 * step,)))
        tasks.append(Task(BACKWARD, (), 8, (3 * step + 1,)))  # on no stream: only a delay
    steps = Steps(np.arange(36).reshape(12, 3), 2)
    like = loop(1, 1, 1, 1)
    program = replace(program_of(like.rank_classes, like.streams, tasks), steps=steps)
    _, ends = longest_path.finish_times(program)
    assert np.diff(ends[steps.tasks].max(axis=1)).tolist() == [1, 9] * 5 + [1]
    found = find_window(program, ends)
    assert (found.steps, found.end - found.begin, found.repeats) == (2, 10, True)
    assert found.step_time == 5e-12


def test_the_mean_stands_for_steps_that_do_not_repeat() -> None:
    # steps of 2, 3, 4, .. ticks beside some of 1 tick, on streams of their own: of 12 the last is left out, and of the
    # 11 others the last 5 stand for all, of 8 + 9 + 10 + 11 + 12 ticks after 2 + .. + 7
    like = loop(1, 1, 1, 1)
    tasks = [task for step in range(12) for task in (Task(FORWARD, (0,), step + 2), Task(FORWARD, (1,), 1))]
    program = program_of(like.rank_classes, like.streams, tasks)
    program = replace(program, steps=Steps(np.arange(24).reshape(12, 2), 1))
    _, ends = longest_path.finish_times(program)
    assert find_window(program, ends) == Window(27, 77, 5, repeats=False)
    assert simulate(program).step_time == 10e-12


@pytest.mark.parametrize(("forward", "backward"), [(3, 5), (5, 3)])
def test_a_timeline_shows_the_period_alone(forward: int, backward: int) -> None:
    # of 5 ticks one stream is busy 3, the other 5: 2 of 10 are idle; what runs across the period's ends is cut
    timeline = simulate(loop(12, forward, backward, 2))
    assert (timeline.steps, timeline.step_time, timeline.length) == (1, 5e-12, 5e-12)
    assert timeline.bubble == pytest.approx(0.2)
    assert all(0 <= span.start < span.end <= 5e-12 for span in timeline.spans)
    assert timeline.begin > 0
    assert (timeline.busy_time(0), timeline.busy_time(1)) == pytest.approx((forward * 1e-12, backward * 1e-12))


def test_one_step_is_all_of_its_program() -> None:
    program = replace(loop(3, 3, 5, 2), steps=None)
    _, ends = longest_path.finish_times(program)
    assert find_window(program, ends) == Window(0, 18)
    assert simulate(program).begin == 0


def test_a_recurrence_is_the_earliest_repetition() -> None:
    assert find_recurrence(np.array([[0, 5], [3, 9], [6, 13]]), 1) is None
    found = find_recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 2)
    assert found is None or found.period == 2
    assert find_recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 1) == (0, 2, 3)
