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

_LAST = 2  # priority of SimPy events that come after all others of their instant
Events = Generator[simpy.Event, None, None]


def simulate_run(run: LongRun, index: int = 0) -> Outcome:
    """Return the outcome of one simulated run; every ``index`` draws other failures from the run's seed."""
    return replay(run, run.failures.failures(run.devices, run.hosts, run.seed, index))


def replay(run: LongRun, failures: Iterable[Failure]) -> Outcome:
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
    process = environment.process(job.live())
    environment.process(_strikes(environment, process, failures))
    environment.run(until=process if run.duration is None else to_ticks(run.duration))
    return job.outcome()


class _Strike(simpy.Event):
    """An event that is processed after all others of its instant, so that work which ends then counts as done."""

    def __init__(self, environment: simpy.Environment, delay: int) -> None:
        super().__init__(environment)
        self._ok, self._value = True, None
        environment.schedule(self, _LAST, delay)  # type: ignore[arg-type]


def _strikes(environment: simpy.Environment, job: simpy.Process, failures: Iterable[Failure]) -> Events:
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
        self.missing = 0  # hosts that broke and that none was taken for
        self.complete_at = 0  # when every host taken from the pool is there
        self.steps = 0
        self.kept = 0  # steps that a durable checkpoint holds
        self.at_risk = 0  # ticks of training since then
        self.checkpoints = 0
        self.activity, self.since = _Activity.TRAINING, 0
        self.spent = [0] * len(_Activity)
        self.interruptions: list[Interruption] = []

    def live(self) -> Events:
        """Train until all steps are done, and recover from every failure."""
        struck = False
        while True:
            try:
                if struck:
                    yield from self._recover()
                yield self._train()
                return
            except simpy.Interrupt as interrupt:
                self._stop(interrupt.cause)  # type: ignore[arg-type]
                struck = True

    def outcome(self) -> Outcome:
        """Return the outcome of the run up to now."""
        self._begin(self.activity)
        useful = self.steps * self.cycle.step
        _, checkpointing, recovering, waiting = map(to_seconds, self.spent)
        return Outcome(
            wall_time=to_seconds(self.since),
            steps=self.steps,
            useful=to_seconds(useful),
            lost=to_seconds(self.spent[_Activity.TRAINING] - useful),
            checkpointing=checkpointing,
            recovering=recovering,
            waiting=waiting,
            checkpoints=self.checkpoints,
            interruptions=tuple(self.interruptions),
        )

    def _train(self) -> simpy.Event:
        """Begin to train, and return the event at which all steps are done."""
        now = self._begin(_Activity.TRAINING)
        if self.interruptions:
            self._amend(resumed=to_seconds(now))
        if self.run.steps is None:
            return self.environment.event()
        return self.environment.timeout(self.cycle.reach(self.run.steps - self.kept))

    def _recover(self) -> Events:
        """Detect the failure, wait for all hosts, and restart."""
        yield self.environment.timeout(self.detection)
        now = self._begin(_Activity.WAITING)
        for _ in range(self.missing):
            self.complete_at = self.pool.take(now)  # no host comes before one that was taken earlier
        self.missing = 0
        yield self.environment.timeout(max(0, self.complete_at - now))
        self._begin(_Activity.RECOVERING)
        yield self.environment.timeout(self.restart)

    def _stop(self, failure: Failure) -> None:
        """Fall back to the last durable checkpoint."""
        now = self._begin(_Activity.RECOVERING)
        if len(self.interruptions) == MAX_INTERRUPTIONS:
            met = f"met more by {to_seconds(now):.6g} s, after {self.kept} steps"
            raise ValueError(f"a run has at most {MAX_INTERRUPTIONS} interruptions, {met}")
        lost = to_seconds(self.at_risk)
        self.interruptions.append(Interruption(to_seconds(now), failure.kind, self.steps, self.kept, lost))
        self.steps, self.at_risk = self.kept, 0
        if failure.restart is Restart.REPLACE_HOST:
            self.pool.broke(now)
            self.missing += 1

    def _begin(self, activity: _Activity) -> int:
        """Book the time since the last change to the activity that ends, begin ``activity``, and return the instant."""
        now = int(self.environment.now)
        elapsed = now - self.since
        if self.activity is _Activity.TRAINING:
            self._book_training(elapsed)
        else:
            self.spent[self.activity] += elapsed
        if self.activity is _Activity.WAITING:
            self._amend(waited=to_seconds(elapsed))
        self.activity, self.since = activity, now
        return now

    def _amend(self, **fields: Any) -> None:
        self.interruptions[-1] = replace(self.interruptions[-1], **fields)

    def _book_training(self, elapsed: int) -> None:
        trained, durable = self.cycle.trained(elapsed), self.cycle.durable(elapsed)
        self.spent[_Activity.TRAINING] += trained
        self.spent[_Activity.CHECKPOINTING] += elapsed - trained
        self.steps = self.kept + trained // self.cycle.step
        self.kept += durable * self.cycle.steps
        self.at_risk = trained - durable * self.cycle.work
        self.checkpoints += durable
