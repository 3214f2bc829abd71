"""A long training run on machines that fail, as a value, and its outcome.

A `CheckpointCycle` computes the progress of a job with checkpoints after any time without a failure. Before a job
trains again after a failure, the failure is detected, a sound host is found and the job restarts.
"""

from collections import Counter, deque
from dataclasses import dataclass, replace
from math import ceil, inf

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.reliability.failures import FailureKind, FailureModel
from meshwise.simulator.units import to_ticks


@dataclass(frozen=True, slots=True)
class Recovery:
    """Durations of the parts of a recovery, in s.

    Parameters
    ----------
    detection
        From a failure until it is noticed and its host is known.
    restart
        Scheduling and initialisation, without loading the checkpoint.
    repair
        From a failure until the broken host can be used again.
    replacement
        Until a host from elsewhere arrives. It is requested only where no spare is ready and no repair ends
        earlier, in exchange for the host that broke last. None where there are no such hosts.
    """

    detection: float
    restart: float
    repair: float
    replacement: float | None = None

    def __post_init__(self) -> None:
        for name in ("detection", "restart", "repair", "replacement"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ValueError(f"{name} is not negative and finite, met {value}")


class HostPool:
    """Hosts outside the job, by the instants from which they can be used, in ticks, earliest first."""

    def __init__(self, spares: int, recovery: Recovery) -> None:
        self._ready = deque([0] * spares)
        self._repair = to_ticks(recovery.repair)
        self._replacement = None if recovery.replacement is None else to_ticks(recovery.replacement)

    def add_broken(self, instant: int) -> None:
        """Add a broken host, which can be used again after its repair."""
        self._ready.append(instant + self._repair)

    def take_host(self, instant: int) -> int:
        """Return the instant at which the next host is available, and remove it from the pool.

        Every call follows one of `add_broken`, so that the pool is never empty.
        """
        if self._replacement is not None and self._ready[0] > instant + self._replacement:
            self._ready.pop()
            return instant + self._replacement
        return max(instant, self._ready.popleft())


_STEP_TOLERANCE = 1e-9  # relative distance within which an interval is a whole number of steps


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Interval and durations of checkpoints, in s.

    Parameters
    ----------
    interval
        Training time between two checkpoints; one is taken at the end of the step that completes it.
    blocking
        Time for which training stops for one.
    save
        From its start until it is durable, ``blocking`` included; equal to ``blocking`` where saving is
        synchronous. Only one is saved at a time: the next one waits.
    load
        Time to read one at a restart.
    """

    interval: float
    blocking: float
    save: float
    load: float

    def __post_init__(self) -> None:
        if self.interval <= 0:
            raise ValueError(f"interval is above 0, met {self.interval}")
        if min(self.blocking, self.load) < 0:
            raise ValueError(f"blocking and load are not negative, met {self.blocking} and {self.load}")
        if self.save < self.blocking:
            raise ValueError(f"save({self.save}) is at least blocking({self.blocking}), of which it is the rest")

    def steps(self, step_time: float) -> int:
        """Return the number of steps between two checkpoints.

        >>> Checkpoint(interval=60.0, blocking=1.0, save=1.0, load=1.0).steps(step_time=25.0)
        3
        """
        return max(1, ceil(self.interval / step_time * (1 - _STEP_TOLERANCE)))

    def cycle(self, step_time: float) -> "CheckpointCycle":
        """Return the cycle of training and saving of a job with steps of ``step_time`` s."""
        return CheckpointCycle(to_ticks(step_time), self.steps(step_time), to_ticks(self.blocking), to_ticks(self.save))


@dataclass(frozen=True, slots=True)
class CheckpointCycle:
    """A stretch of training from a checkpoint on, in ticks: ``steps`` steps, a checkpoint, and so on.

    Everything that ends at a tick counts as done at that tick.
    """

    step: int
    steps: int
    blocking: int
    save: int

    @property
    def work(self) -> int:
        """Ticks of training before each checkpoint."""
        return self.step * self.steps

    @property
    def period(self) -> int:
        """Ticks from the start of one checkpoint to that of the next."""
        return max(self.work + self.blocking, self.save)

    def count_started(self, elapsed: int) -> int:
        """Return the number of checkpoints started after ``elapsed`` ticks."""
        return 0 if elapsed < self.work else 1 + (elapsed - self.work) // self.period

    def count_durable(self, elapsed: int) -> int:
        """Return the number of durable checkpoints after ``elapsed`` ticks."""
        return self.count_started(elapsed - self.save)

    def trained_ticks(self, elapsed: int) -> int:
        """Return the ticks of ``elapsed`` in which the job trained."""
        count = self.count_started(elapsed)
        training_start = self.work + (count - 1) * self.period + self.blocking if count else 0
        return count * self.work + min(max(elapsed - training_start, 0), self.work)

    def ticks_to_steps(self, steps: int) -> int:
        """Return the ticks until ``steps`` steps, at least one, are complete."""
        count = (steps - 1) // self.steps
        training_start = self.work + (count - 1) * self.period + self.blocking if count else 0
        return training_start + (steps - count * self.steps) * self.step


@dataclass(frozen=True, slots=True)
class LongRun:
    """A job that runs until ``duration`` has passed or ``steps`` are done; exactly one of them is not None.

    Failures strike at a constant rate, also while the job recovers or waits; spare hosts do not fail. The run starts
    with all its hosts and nothing to load.

    Parameters
    ----------
    step_time, duration
        In s.
    devices, hosts
        Number of devices and hosts of the job.
    spares
        Number of further hosts that stand by.
    """

    step_time: float
    devices: int
    hosts: int
    failures: FailureModel
    checkpoint: Checkpoint
    recovery: Recovery
    duration: float | None = None
    steps: int | None = None
    spares: int = 0
    seed: int = 0

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if not 0 < self.step_time < inf:
            raise ValueError(f"step_time is above 0 and finite, met {self.step_time}")
        if min(self.devices, self.hosts) < 1:
            raise ValueError(f"devices and hosts are at least 1, met {self.devices} and {self.hosts}")
        if (self.duration is None) == (self.steps is None):
            raise ValueError(f"one of duration and steps is given, met {self.duration} and {self.steps}")
        length = self.duration if self.steps is None else self.steps
        if length is None or not 0 < length < inf:
            raise ValueError(f"duration and steps are above 0 and finite, met {length}")
        if min(self.spares, self.seed) < 0:
            raise ValueError(f"spares and seed are not negative, met {self.spares} and {self.seed}")

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the job, s."""
        return self.failures.mtbf(self.devices, self.hosts)

    def with_interval(self, interval: float) -> "LongRun":
        """Return this run with ``interval`` s of training between checkpoints."""
        return replace(self, checkpoint=replace(self.checkpoint, interval=interval))


@dataclass(frozen=True, slots=True)
class Interruption:
    """One failure and its cost; ``time`` and ``resumed`` are in s from the start of the run.

    Parameters
    ----------
    steps, kept
        Steps complete when it struck, and those of them in a durable checkpoint.
    lost
        Training that has to be repeated, in s.
    waited
        Time waited for a host, in s.
    resumed
        Instant at which training resumed; None where another failure or the end of the run came first.
    """

    time: float
    kind: FailureKind
    steps: int
    kept: int
    lost: float
    waited: float = 0.0
    resumed: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run; five parts, in s, add up to ``wall_time``: useful, lost, and the three activities.

    Parameters
    ----------
    steps
        Number of steps complete at the end.
    useful
        Training of these steps.
    lost
        Training that was repeated, and the unfinished step at the end of the run.
    checkpointing
        Time in which training stopped for checkpoints.
    recovering
        Detection, restart and loading.
    waiting
        Waiting for hosts.
    checkpoints
        Number of checkpoints that became durable.
    """

    wall_time: float
    steps: int
    useful: float
    lost: float
    checkpointing: float
    recovering: float
    waiting: float
    checkpoints: int
    interruptions: tuple[Interruption, ...]

    __repr__ = brief_repr()

    @property
    def goodput(self) -> float:
        """Goodput: useful over wall time."""
        return self.useful / self.wall_time

    @property
    def by_kind(self) -> dict[FailureKind, int]:
        """Number of interruptions by kind."""
        counts = Counter(interruption.kind for interruption in self.interruptions)
        return {kind: counts[kind] for kind in FailureKind}
