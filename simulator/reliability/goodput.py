"""Goodput of a long run: its mean over several simulated runs."""

from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from simulator.brief import brief
from simulator.reliability.failure import FailureKind
from simulator.reliability.job import simulate_run
from simulator.reliability.long_run import LongRun
from simulator.reliability.outcome import Outcome

NUM_RUNS = 8


@dataclass(frozen=True, slots=True)
class Goodput:
    """What several runs that differ only in their failures did with their time."""

    run: LongRun
    outcomes: tuple[Outcome, ...]

    __repr__ = brief()

    @property
    def mean(self) -> float:
        """Mean goodput."""
        return self.average("goodput")

    @property
    def standard_error(self) -> float:
        """Standard error of the mean goodput."""
        return stdev(outcome.goodput for outcome in self.outcomes) / sqrt(len(self.outcomes))

    def average(self, name: str) -> float:
        """Return the mean over the runs of a field of `Outcome`."""
        return fmean(getattr(outcome, name) for outcome in self.outcomes)

    def interruptions(self, kind: FailureKind | None = None) -> float:
        """Return the mean number of interruptions, of one kind or in all."""
        return fmean(len(outcome.interruptions) if kind is None else outcome.by_kind[kind] for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return means over the runs, and the interruptions of the first, as JSON-ready data; s."""
        kinds = {str(kind): self.interruptions(kind) for kind in FailureKind}
        names = ("wall_time", "steps", "useful", "lost", "checkpointing", "recovering", "waiting", "checkpoints")
        return {
            "goodput": self.mean,
            "standard_error": self.standard_error,
            "runs": len(self.outcomes),
            "mtbf": self.run.mtbf,
            "checkpoint_interval": self.run.checkpoint.interval,
            "interruptions": self.interruptions(),
            "interruptions_by_kind": kinds,
            **{name: self.average(name) for name in names},
            "events": [asdict(interruption) for interruption in self.outcomes[0].interruptions],
        }


def goodput(run: LongRun, runs: int = NUM_RUNS) -> Goodput:
    """Return the goodput of ``runs`` simulated runs, at least two, each with its own failures."""
    if runs < 2:
        raise ValueError(f"runs are at least 2, for a standard error; met {runs}")
    return Goodput(run, tuple(simulate_run(run, index) for index in range(runs)))
