"""A run that is counted between failures equals the same run second by second."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshwise.simulator.brief import to_full_text
from meshwise.simulator.reliability.failures import Component, Failure, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.job import replay_failures, simulate_run
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

from .reference import NEVER, Reference, runs, traces

DAY = 86400.0


@settings(max_examples=1000, deadline=None)
@given(runs(), traces)
def test_events_only_at_failures_give_what_every_second_by_itself_gives(run: LongRun, failures: list[Failure]) -> None:
    assert replay_failures(run, failures) == Reference(run, failures).outcome()


@settings(max_examples=300, deadline=None)
@given(runs(), traces)
def test_every_second_is_spent_on_one_thing(run: LongRun, failures: list[Failure]) -> None:
    outcome = replay_failures(run, failures)
    parts = (outcome.useful, outcome.lost, outcome.checkpointing, outcome.recovering, outcome.waiting)
    assert sum(parts) == outcome.wall_time
    assert outcome.useful == outcome.steps * run.step_time
    if run.steps is None:
        assert outcome.wall_time == run.duration
    else:
        assert outcome.steps == run.steps
        # all training that had to be repeated was lost to one of the interruptions
        assert sum(interruption.lost for interruption in outcome.interruptions) == outcome.lost


HAND = LongRun(
    step_time=10.0,
    devices=8,
    hosts=1,
    failures=NEVER,
    checkpoint=Checkpoint(interval=20.0, blocking=2.0, save=5.0, load=3.0),
    recovery=Recovery(detection=4.0, restart=6.0, repair=100.0),
    duration=100.0,
)


def test_a_run_by_hand() -> None:
    # 0-20 two steps, 20-22 blocked, 22-42 two more, 42-44 blocked, 44-45 one second of the fifth: the failure at
    # 45 finds 4 steps, but the second checkpoint durable only at 47, so 2 are kept and 20 + 1 s lost.
    # 45-58 detection 4, restart 6, load 3. 58-78, 80-100: 4 steps more. 6 steps in 100 s.
    outcome = replay_failures(HAND, [Failure(45.0, FailureKind.SOFTWARE, Restart.IN_PLACE)])
    assert (outcome.steps, outcome.goodput, outcome.lost) == (6, 0.6, 21.0)
    assert (outcome.checkpointing, outcome.recovering, outcome.waiting) == (6.0, 13.0, 0.0)
    (struck,) = outcome.interruptions
    assert (struck.steps, struck.kept, struck.lost, struck.resumed) == (4, 2, 21.0, 58.0)


def test_two_seconds_later_the_second_checkpoint_is_durable() -> None:
    outcome = replay_failures(HAND, [Failure(47.0, FailureKind.SOFTWARE, Restart.IN_PLACE)])
    assert (outcome.interruptions[0].kept, outcome.interruptions[0].lost) == (4, 3.0)


def test_a_broken_host_is_waited_for_and_a_failure_during_recovery_begins_it_again() -> None:
    broken = Failure(45.0, FailureKind.DEVICE, Restart.REPLACE_HOST)
    alone = replay_failures(HAND, [broken])
    # the job notices at 49 and waits for the repair, which ends at 145
    assert (alone.recovering, alone.waiting, alone.interruptions[0].resumed) == (4.0, 51.0, None)
    assert alone.interruptions[0].waited == 51.0
    spare = replay_failures(replace(HAND, spares=1), [broken])
    assert (spare.recovering, spare.waiting, spare.interruptions[0].resumed) == (13.0, 0.0, 58.0)
    # a second failure 9 s into the recovery of 13 s: 9 + 13 s, and nothing more is lost
    twice = replay_failures(replace(HAND, spares=1), [broken, Failure(54.0, FailureKind.SOFTWARE, Restart.IN_PLACE)])
    assert [struck.resumed for struck in twice.interruptions] == [None, 67.0]
    assert (twice.recovering, twice.interruptions[1].lost) == (22.0, 0.0)


def test_a_failure_at_the_end_of_the_run_is_no_part_of_it() -> None:
    assert replay_failures(HAND, [Failure(100.0, FailureKind.SOFTWARE, Restart.IN_PLACE)]).interruptions == ()
    # 9 steps: 4 checkpoints of 2 s stand between them
    done = replace(HAND, duration=None, steps=9)
    outcome = replay_failures(done, [Failure(98.0, FailureKind.SOFTWARE, Restart.IN_PLACE)])
    assert (outcome.wall_time, outcome.interruptions) == (98.0, ())


def busy(seed: int = 0) -> LongRun:
    rate = FailureRate(FailureKind.DEVICE, 20 * DAY, Component.DEVICE, Restart.REPLACE_HOST)
    checkpoint, recovery = Checkpoint(600.0, 5.0, 60.0, 30.0), Recovery(60.0, 300.0, DAY)
    return LongRun(
        7.3, 64, 8, FailureModel("busy", (rate,)), checkpoint, recovery, duration=20 * DAY, spares=4, seed=seed
    )


def test_the_same_seed_gives_the_same_run_and_another_seed_or_index_another() -> None:
    first = simulate_run(busy(), 1)
    assert to_full_text(first) == to_full_text(simulate_run(busy(), 1))
    assert len(first.interruptions) > 20
    assert first != simulate_run(busy(), 2)
    assert first != simulate_run(busy(1), 1)
    assert sum(first.by_kind.values()) == first.by_kind[FailureKind.DEVICE] == len(first.interruptions)


def test_a_run_that_makes_no_progress_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.simulator.reliability.job.MAX_INTERRUPTIONS", 50)
    rate = FailureRate(FailureKind.SOFTWARE, 1.0, Component.JOB, Restart.IN_PLACE)
    run = replace(HAND, duration=None, steps=1000, failures=FailureModel("hopeless", (rate,)))
    with pytest.raises(ValueError, match="a run has at most 50 interruptions, met more by"):
        simulate_run(run)
