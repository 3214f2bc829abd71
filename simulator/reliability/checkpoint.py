"""Checkpoints, and how far a job that takes them has come after any time without a failure."""

from dataclasses import dataclass
from math import ceil

from simulator.units import to_ticks

_WHOLE = 1e-9  # relative distance within which an interval is a whole number of steps


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """When the state of a job is saved and what that takes; s.

    Parameters
    ----------
    interval
        Training between two checkpoints; one is taken at the end of the step that completes it.
    blocking
        How long training stands still for one.
    save
        From its start until it is durable, ``blocking`` included; equal to ``blocking`` where saving is
        synchronous. One is saved at a time: a checkpoint that falls due earlier waits.
    load
        Reading one back at a restart.
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
        """Return how many steps lie between two checkpoints.

        >>> Checkpoint(interval=60.0, blocking=1.0, save=1.0, load=1.0).steps(step_time=25.0)
        3
        """
        return max(1, ceil(self.interval / step_time * (1 - _WHOLE)))

    def cycle(self, step_time: float) -> "CheckpointCycle":
        """Return how a job with steps of ``step_time`` s trains and saves in turn."""
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

    def started(self, elapsed: int) -> int:
        """Return how many checkpoints have been started."""
        return 0 if elapsed < self.work else 1 + (elapsed - self.work) // self.period

    def durable(self, elapsed: int) -> int:
        """Return how many checkpoints are durable."""
        return self.started(elapsed - self.save)

    def trained(self, elapsed: int) -> int:
        """Return the ticks in which training did not stand still."""
        count = self.started(elapsed)
        begun = self.work + (count - 1) * self.period + self.blocking if count else 0
        return count * self.work + min(max(elapsed - begun, 0), self.work)

    def reach(self, steps: int) -> int:
        """Return the ticks until ``steps`` steps, at least one, are complete."""
        count = (steps - 1) // self.steps
        begun = self.work + (count - 1) * self.period + self.blocking if count else 0
        return begun + (steps - count * self.steps) * self.step
