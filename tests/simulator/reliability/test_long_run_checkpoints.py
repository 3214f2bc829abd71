import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.reliability.long_run import Checkpoint, CheckpointCycle

cycles = st.builds(
    lambda step, steps, blocking, rest: CheckpointCycle(step, steps, blocking, blocking + rest),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 40),
)


def test_a_cycle_by_hand() -> None:
    # 3 steps of 10, then a checkpoint that blocks 4 and is durable after 20: starts at 30, 64, 98; durable at 50, 84
    cycle = CheckpointCycle(step=10, steps=3, blocking=4, save=20)
    assert [cycle.count_started(t) for t in (29, 30, 63, 64, 98)] == [0, 1, 1, 2, 3]
    assert [cycle.count_durable(t) for t in (49, 50, 83, 84)] == [0, 1, 1, 2]
    assert [cycle.trained_ticks(t) for t in (0, 29, 30, 34, 35, 64, 68, 70)] == [0, 29, 30, 30, 31, 60, 60, 62]
    assert [cycle.ticks_to_steps(steps) for steps in (1, 3, 4, 6, 7)] == [10, 30, 44, 64, 78]


def test_a_checkpoint_waits_until_the_last_one_is_durable() -> None:
    # due 14 after the start of the last one, which takes 20: each waits 6
    cycle = CheckpointCycle(step=10, steps=1, blocking=4, save=20)
    assert [cycle.ticks_to_steps(steps) for steps in (1, 2, 3)] == [10, 24, 44]
    assert cycle.trained_ticks(30) == cycle.trained_ticks(34) == 20
    assert cycle.trained_ticks(35) == 21


@settings(max_examples=1000, deadline=None)
@given(cycles, st.integers(1, 40))
def test_steps_are_reached_at_the_first_tick_at_which_they_are_complete(cycle: CheckpointCycle, steps: int) -> None:
    tick = cycle.ticks_to_steps(steps)
    assert cycle.trained_ticks(tick) == steps * cycle.step
    assert cycle.trained_ticks(tick - 1) == steps * cycle.step - 1


@settings(max_examples=1000, deadline=None)
@given(cycles, st.integers(0, 300))
def test_a_tick_trains_or_stands_still_and_checkpoints_come_in_order(cycle: CheckpointCycle, tick: int) -> None:
    assert cycle.trained_ticks(tick + 1) - cycle.trained_ticks(tick) in (0, 1)
    assert (
        cycle.count_durable(tick) <= cycle.count_started(tick) <= cycle.count_durable(tick) + 1
    )  # one at a time is saved
    assert cycle.count_started(tick) * cycle.work <= cycle.trained_ticks(tick)


@pytest.mark.parametrize(("interval", "steps"), [(30.0, 3), (30.1, 4), (1.0, 1), (29.9, 3)])
def test_a_checkpoint_is_taken_at_the_end_of_the_step_that_completes_the_interval(interval: float, steps: int) -> None:
    assert Checkpoint(interval, 1.0, 1.0, 1.0).steps(step_time=10.0) == steps


@given(st.floats(1e-3, 1e3), st.integers(1, 10**6))
def test_whole_steps_stay_whole_however_they_are_rounded(step_time: float, steps: int) -> None:
    assert Checkpoint(steps * step_time, 0.0, 0.0, 0.0).steps(step_time) == steps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.0, 1.0, 1.0, 1.0), "interval is above 0"),
        ((1.0, -1.0, 1.0, 1.0), "not negative"),
        ((1.0, 1.0, 1.0, -1.0), "not negative"),
        ((1.0, 2.0, 1.0, 1.0), r"save\(1.0\) is at least blocking\(2.0\)"),
    ],
)
def test_what_is_no_checkpoint_is_refused(fields: tuple[float, float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(*fields)
