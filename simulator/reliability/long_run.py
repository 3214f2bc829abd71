"""A training run of days on machines that fail, as a value."""

from dataclasses import dataclass, replace
from math import inf

from simulator.brief import brief
from simulator.reliability.checkpoint import Checkpoint
from simulator.reliability.failure import FailureModel
from simulator.reliability.recovery import Recovery


@dataclass(frozen=True, slots=True)
class LongRun:
    """A job that runs until ``duration`` has passed or ``steps`` are done; one of the two is given.

    Failures strike at a constant rate, while the job recovers or waits too; spare hosts do not
    fail. The run starts with all its hosts and nothing to load.

    Parameters
    ----------
    step_time, duration
        s.
    devices, hosts
        What the job runs on.
    spares
        Further hosts that stand by.
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

    __repr__ = brief()

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

    @property
    def recovery_time(self) -> float:
        """Seconds from a failure to training again where a host is at hand and no other failure strikes."""
        return self.recovery.detection + self.recovery.restart + self.checkpoint.load

    def every(self, interval: float) -> "LongRun":
        """Return this run with a checkpoint every ``interval`` s."""
        return replace(self, checkpoint=replace(self.checkpoint, interval=interval))
