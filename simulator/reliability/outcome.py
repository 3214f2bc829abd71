"""What a long run did with its time."""

from collections import Counter
from dataclasses import dataclass

from simulator.brief import brief
from simulator.reliability.failure import FailureKind


@dataclass(frozen=True, slots=True)
class Interruption:
    """One failure and what it cost; s from the start of the run.

    Parameters
    ----------
    steps, kept
        Steps complete when it struck, and those of them that a durable checkpoint holds.
    lost
        Training that has to be repeated.
    waited
        For a host.
    resumed
        When training went on; None where another failure or the end of the run came first.
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
    """One run: the five parts of its time, s, add up to ``wall_time``.

    Parameters
    ----------
    steps
        Complete at the end.
    useful
        Training that counts: those steps.
    lost
        Training that was repeated, and the step that the end of the run cut off.
    checkpointing
        Standing still for checkpoints.
    recovering
        Detection, restart and loading.
    waiting
        For a host.
    checkpoints
        How many became durable.
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

    __repr__ = brief()

    @property
    def goodput(self) -> float:
        """Effective training time: useful over wall time."""
        return self.useful / self.wall_time

    @property
    def by_kind(self) -> dict[FailureKind, int]:
        """Interruptions of every kind."""
        counts = Counter(interruption.kind for interruption in self.interruptions)
        return {kind: counts[kind] for kind in FailureKind}
