"""Goodput of a long run: its mean over simulated runs, and the checkpoint interval that maximises it.

The best interval comes from closed forms (Young, Daly) and from a search over simulated runs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

from meshwise.simulator.brief import brief
from meshwise.simulator.reliability.failures import FailureKind
from meshwise.simulator.reliability.job import simulate_run
from meshwise.simulator.reliability.long_run import LongRun, Outcome

NUM_RUNS = 8


@dataclass(frozen=True, slots=True)
class Goodput:
    """Outcomes of several simulated runs that differ only in their failures."""

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
        """Return means over the runs, and the interruptions of the first run, as JSON-ready data; times in s."""
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


_SPAN, _POINTS = 16, 17  # the grid goes from the first estimate over 16 to 16 times it
_GOLDEN = (sqrt(5) - 1) / 2
_SECTIONS = 6  # of the bracket around the best point of the grid


def young_interval(cost: float, mtbf: float) -> float:
    """Return the optimum training time between two checkpoints, in s, to first order in ``cost / mtbf``.

    ``sqrt(2 cost mtbf)``, with the ``cost`` of a checkpoint and the job's mean time between failures
    in s: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974).

    >>> young_interval(cost=50.0, mtbf=10_000.0)
    1000.0
    """
    return sqrt(2 * cost * mtbf)


def daly_interval(cost: float, mtbf: float) -> float:
    """Return the optimum training time between two checkpoints, in s, to higher order in ``cost / mtbf``.

    J. T. Daly, Future Generation Computer Systems 22 (2006); ``mtbf`` itself from
    ``cost = 2 mtbf`` on.

    >>> round(daly_interval(cost=50.0, mtbf=10_000.0), 2)  # 1000 * (1 + 0.05 / 3 + 0.05**2 / 9) - 50
    966.94
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = sqrt(cost / (2 * mtbf))
    return young_interval(cost, mtbf) * (1 + part / 3 + part**2 / 9) - cost


@dataclass(frozen=True, slots=True)
class BestInterval:
    """The checkpoint interval with the highest simulated goodput, and all evaluated ``candidates`` in order."""

    interval: float
    goodput: Goodput
    tried: tuple[Goodput, ...]

    __repr__ = brief()


def best_interval(run: LongRun, runs: int = NUM_RUNS) -> BestInterval:
    """Return the checkpoint interval at which ``runs`` simulated runs have the highest mean goodput.

    A grid of whole steps around Young's interval is evaluated, then golden-section search refines its best point. All
    candidates are struck by the same failures at the same wall-clock times, so that chance does not hide their
    difference. A run of a number of steps is evaluated over the time that these take undisturbed: with too rare
    checkpoints it might never end.
    """
    judged = run if run.steps is None else replace(run, duration=run.steps * run.step_time, steps=None)
    found: dict[int, Goodput] = {}

    def value(steps: int) -> float:
        if steps not in found:
            found[steps] = goodput(judged.every(steps * run.step_time), runs)
        return found[steps].mean

    grid = _grid(run)
    place = max(range(len(grid)), key=lambda index: value(grid[index]))
    _golden_section(value, grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)])
    interval = max(sorted(found), key=value) * run.step_time  # of equal goodputs the shortest interval
    tried = tuple(found[steps] for steps in sorted(found))
    return BestInterval(interval, goodput(run.every(interval), runs), tried)


def _grid(run: LongRun) -> list[int]:
    """Return candidate numbers of steps between checkpoints, at most those of the run, on a logarithmic scale."""
    checkpoint = run.checkpoint
    most = ceil((run.duration or 0) / run.step_time) if run.steps is None else run.steps
    young = young_interval(checkpoint.blocking, run.mtbf)
    middle = min(most, max(young, checkpoint.save - checkpoint.blocking, run.step_time) / run.step_time)
    exponents = (2 * index / (_POINTS - 1) - 1 for index in range(_POINTS))
    return sorted({min(most, max(1, round(middle * _SPAN**exponent))) for exponent in exponents})


def _golden_section(value: Callable[[int], float], low: int, high: int) -> None:
    """Evaluate ``value`` at numbers of steps that close in on its maximum between ``low`` and ``high``.

    By hand, as ``value`` is defined on whole steps and remembers what it has evaluated.
    """
    left, right = log(low), log(high)
    for _ in range(_SECTIONS):
        inner, outer = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        if value(_steps(inner)) < value(_steps(outer)):
            left = inner
        else:
            right = outer


def _steps(logarithm: float) -> int:
    return max(1, round(exp(logarithm)))
