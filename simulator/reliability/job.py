"""A long run as SimPy processes: a job that trains and recovers, and failures that strike it.

Events are failures and the phases of a recovery. `CheckpointCycle` counts the steps and checkpoints of an undisturbed
stretch, exactly as one event for each of them would.
"""

from collections.abc import Generator, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import simpy

from meshwise.simulator.reliability.failures import Failure, Restart
from meshwise.simulator.reliability.long_run import HostPool, Interruption, LongRun, Outcome
from meshwise.simulator.units import to_seconds, to_ticks

MAX_INTERRUPTIONS = 100_000
"""Most interruptions of a run: one with more makes hardly any progress, and is refused as a mistake."""

_LAST_PRIORITY = 2  # priority of SimPy events that come after all others of their instant
Events = Generator[simpy.Event, None, None]


def simulate_run(run: LongRun, index: int = 0) -> Outcome:
    """Return the outcome of one simulated run; every ``index`` draws other failures from the run's seed."""
    return replay_failures(run, run.failures.draw_failures(run.devices, run.hosts, run.seed, index))


def replay_failures(run: LongRun, failures: Iterable[Failure]) -> Outcome:
    """Return the outcome of a run that is struck by ``failures``, which are in order of time.

    Work that ends at the instant of a failure counts as done; a failure at the end of the run does not count.

    Raises
    ------
    ValueError
        Where the run is interrupted more than `MAX_INTERRUPTIONS` times.
    """
    # whole ticks: sums of floats would let a checkpoint and a failure of one instant change places
    environment = simpy.Environment(initial_time=0)
    job = _Job(environment, run)
    process = environment.process(job.run_process())
    environment.process(_strike_job(environment, process, failures))
    environment.run(until=process if run.duration is None else to_ticks(run.duration))
    return job.make_outcome()


class _Strike(simpy.Event):
    """An event that is processed after all others of its instant, so that work which ends then counts as done."""

    def __init__(self, environment: simpy.Environment, delay: int) -> None:
        super().__init__(environment)
        self._ok, self._value = True, None
        environment.schedule(self, _LAST_PRIORITY, delay)  # type: ignore[arg-type]


def _strike_job(environment: simpy.Environment, job: simpy.Process, failures: Iterable[Failure]) -> Events:
    for failure in failures:
        yield _Strike(environment, to_ticks(failure.time) - int(environment.now))
        job.interrupt(failure)


class _Activity(IntEnum):
    TRAINING = 0
    CHECKPOINTING = 1
    RECOVERING = 2
    WAITING = 3


class _Job:
    """The state of a run; times in ticks."""

    def __init__(self, environment: simpy.Environment, run: LongRun) -> None:
        self.environment, self.run = environment, run
        self.cycle = run.checkpoint.cycle(run.step_time)
        self.detection = to_ticks(run.recovery.detection)
        self.restart = to_ticks(run.recovery.restart) + to_ticks(run.checkpoint.load)
        self.pool = HostPool(run.spares, run.recovery)
        self.missing_hosts = 0  # hosts that broke and that none was taken for
        self.hosts_complete = 0  # when every host taken from the pool is there
        self.steps = 0
        self.durable_steps = 0  # steps that a durable checkpoint holds
        self.unsaved_ticks = 0  # ticks of training since then
        self.checkpoints = 0
        self.activity, self.activity_start = _Activity.TRAINING, 0
        self.activity_ticks = [0] * len(_Activity)
        self.interruptions: list[Interruption] = []

    def run_process(self) -> Events:
        """Train until all steps are done, and recover from every failure."""
        was_interrupted = False
        while True:
            try:
                if was_interrupted:
                    yield from self._recover()
                yield self._train()
                return
            except simpy.Interrupt as interrupt:
                self._stop(interrupt.cause)  # type: ignore[arg-type]
                was_interrupted = True

    def make_outcome(self) -> Outcome:
        """Return the outcome of the run up to now."""
        self._begin(self.activity)
        useful = self.steps * self.cycle.step
        _, checkpointing, recovering, waiting = map(to_seconds, self.activity_ticks)
        return Outcome(
            wall_time=to_seconds(self.activity_start),
            steps=self.steps,
            useful=to_seconds(useful),
            lost=to_seconds(self.activity_ticks[_Activity.TRAINING] - useful),
            checkpointing=checkpointing,
            recovering=recovering,
            waiting=waiting,
            checkpoints=self.checkpoints,
            interruptions=tuple(self.interruptions),
        )

    def _train(self) -> simpy.Event:
        """Begin to train, and return the event at which all steps are done."""
        instant = self._begin(_Activity.TRAINING)
        if self.interruptions:
            self._amend(resumed=to_seconds(instant))
        if self.run.steps is None:
            return self.environment.event()
        return self.environment.timeout(self.cycle.ticks_to_steps(self.run.steps - self.durable_steps))

    def _recover(self) -> Events:
        """Detect the failure, wait for all hosts, and restart."""
        yield self.environment.timeout(self.detection)
        instant = self._begin(_Activity.WAITING)
        for _ in range(self.missing_hosts):
            self.hosts_complete = self.pool.take_host(instant)  # no host comes before one that was taken earlier
        self.missing_hosts = 0
        yield self.environment.timeout(max(0, self.hosts_complete - instant))
        self._begin(_Activity.RECOVERING)
        yield self.environment.timeout(self.restart)

    def _stop(self, failure: Failure) -> None:
        """Fall back to the last durable checkpoint."""
        instant = self._begin(_Activity.RECOVERING)
        if len(self.interruptions) == MAX_INTERRUPTIONS:
            progress_text = f"met more by {to_seconds(instant):.6g} s, after {self.durable_steps} steps"
            raise ValueError(f"a run has at most {MAX_INTERRUPTIONS} interruptions, {progress_text}")
        lost = to_seconds(self.unsaved_ticks)
        self.interruptions.append(Interruption(to_seconds(instant), failure.kind, self.steps, self.durable_steps, lost))
        self.steps, self.unsaved_ticks = self.durable_steps, 0
        if failure.restart is Restart.REPLACE_HOST:
            self.pool.add_broken(instant)
            self.missing_hosts += 1

    def _begin(self, activity: _Activity) -> int:
        """Book the time since the last change to the activity that ends, begin ``activity``, and return the instant."""
        instant = int(self.environment.now)
        elapsed = instant - self.activity_start
        if self.activity is _Activity.TRAINING:
            self._book_training(elapsed)
        else:
            self.activity_ticks[self.activity] += elapsed
        if self.activity is _Activity.WAITING:
            self._amend(waited=to_seconds(elapsed))
        self.activity, self.activity_start = activity, instant
        return instant

    def _amend(self, **fields: Any) -> None:
        self.interruptions[-1] = replace(self.interruptions[-1], **fields)

    def _book_training(self, elapsed: int) -> None:
        trained_ticks, num_durable = self.cycle.trained_ticks(elapsed), self.cycle.count_durable(elapsed)
        self.activity_ticks[_Activity.TRAINING] += trained_ticks
        self.activity_ticks[_Activity.CHECKPOINTING] += elapsed - trained_ticks
        self.steps = self.durable_steps + trained_ticks // self.cycle.step
        self.durable_steps += num_durable * self.cycle.steps
        self.unsaved_ticks = trained_ticks - num_durable * self.cycle.work
        self.checkpoints += num_durable
