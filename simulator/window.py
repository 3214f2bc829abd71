"""The part of a run that stands for one training step."""

from typing import NamedTuple

from simulator.units import TICKS_PER_SECOND


class Window(NamedTuple):
    """The ticks from ``begin`` to ``end``, in which ``steps`` whole steps go by.

    Parameters
    ----------
    repeats
        Whether the run repeats itself from then on, so that all later steps take just as long; else ``steps`` are
        so many that their mean is near that of all.
    """

    begin: int
    end: int
    steps: int = 1
    repeats: bool = True

    @property
    def ticks(self) -> int:
        """Whole ticks of one step, the mean of ``steps``."""
        return (self.end - self.begin) // self.steps

    @property
    def step_time(self) -> float:
        """Seconds of one step, the mean of ``steps``."""
        return (self.end - self.begin) / self.steps / TICKS_PER_SECOND
