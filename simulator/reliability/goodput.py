"""Goodput of a long run: its mean over simulated runs, and the checkpoint interval that maximises it.

The best interval comes from closed forms (Young, Daly) and from a search over simulated runs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, exp, expm1, log, sqrt
from statistics import fmean, stdev
from typing import Any

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.reliability.failures import FailureKind
from meshwise.simulator.reliability.job import simulate_run
from meshwise.simulator.reliability.long_run import LongRun, Outcome

NUM_RUNS = 8


@dataclass(frozen=True, slots=True)
class Goodput:
    """Outcomes of several simulated runs that differ only in their failures."""

    run: LongRun
    outcomes: tuple[Outcome, ...]

    __repr__ = brief_repr()

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


_GRID_FACTOR, _GRID_POINTS = 16, 17  # the grid goes from the first estimate over 16 to 16 times it
_GOLDEN_RATIO = (sqrt(5) - 1) / 2
_NUM_SECTIONS = 6  # of the bracket around the best point of the grid


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
    ratio = sqrt(cost / (2 * mtbf))
    return young_interval(cost, mtbf) * (1 + ratio / 3 + ratio**2 / 9) - cost


def expected_goodput(interval: float, cost: float, restart: float, mtbf: float) -> float:
    """Return the expected goodput of a long job with synchronous checkpoints and failures at a constant rate.

    ``interval / (mtbf exp(restart / mtbf) (exp((interval + cost) / mtbf) - 1))``: Daly's complete model (2006, as for
    `daly_interval`), in which failures strike in restarts too. All arguments are in s.

    >>> round(expected_goodput(interval=1000.0, cost=50.0, restart=100.0, mtbf=10_000.0), 4)
    0.8943
    """
    exponent = (interval + cost) / mtbf
    if exponent + restart / mtbf > _MAX_EXPONENT:
        return 0.0
    return interval / (mtbf * exp(restart / mtbf) * expm1(exponent))


def optimal_interval(cost: float, mtbf: float) -> float:
    """Return the training time between two checkpoints, in s, at which `expected_goodput` is the highest.

    Its derivative is 0 at ``(x - 1) exp(x - 1) = -exp(-1 - cost / mtbf)`` with ``x = interval / mtbf``, which Lambert's
    function solves. `daly_interval` is its expansion.

    >>> round(optimal_interval(cost=50.0, mtbf=10_000.0), 1), round(daly_interval(cost=50.0, mtbf=10_000.0), 1)
    (966.9, 966.9)
    """
    from scipy.special import lambertw  # takes longer to import than to read a scenario

    return mtbf * (1.0 + float(lambertw(-exp(-1.0 - cost / mtbf)).real))


_MAX_EXPONENT = 700.0  # e to more than that is no float


@dataclass(frozen=True, slots=True)
class BestInterval:
    """The checkpoint interval with the highest simulated goodput, and all evaluated ``candidates`` in order."""

    interval: float
    goodput: Goodput
    candidates: tuple[Goodput, ...]

    __repr__ = brief_repr()


def best_interval(run: LongRun, runs: int = NUM_RUNS) -> BestInterval:
    """Return the checkpoint interval at which ``runs`` simulated runs have the highest mean goodput.

    A grid of whole steps around Young's interval is evaluated, then golden-section search refines its best point. All
    candidates are struck by the same failures at the same wall-clock times, so that chance does not hide their
    difference. A run of a number of steps is evaluated over the time that these take undisturbed: with too rare
    checkpoints it might never end.
    """
    timed_run = run if run.steps is None else replace(run, duration=run.steps * run.step_time, steps=None)
    goodput_by_steps: dict[int, Goodput] = {}

    def mean_goodput(num_steps: int) -> float:
        if num_steps not in goodput_by_steps:
            goodput_by_steps[num_steps] = goodput(timed_run.with_interval(num_steps * run.step_time), runs)
        return goodput_by_steps[num_steps].mean

    grid = _interval_grid(run)
    best_point = max(range(len(grid)), key=lambda index: mean_goodput(grid[index]))
    _search_golden_section(mean_goodput, grid[max(best_point - 1, 0)], grid[min(best_point + 1, len(grid) - 1)])
    interval = (
        max(sorted(goodput_by_steps), key=mean_goodput) * run.step_time
    )  # of equal goodputs the shortest interval
    candidates = tuple(goodput_by_steps[steps] for steps in sorted(goodput_by_steps))
    return BestInterval(interval, goodput(run.with_interval(interval), runs), candidates)


def _interval_grid(run: LongRun) -> list[int]:
    """Return candidate numbers of steps between checkpoints, at most those of the run, on a logarithmic scale."""
    checkpoint = run.checkpoint
    max_steps = ceil((run.duration or 0) / run.step_time) if run.steps is None else run.steps
    young = young_interval(checkpoint.blocking, run.mtbf)
    center = min(max_steps, max(young, checkpoint.save - checkpoint.blocking, run.step_time) / run.step_time)
    exponents = (2 * index / (_GRID_POINTS - 1) - 1 for index in range(_GRID_POINTS))
    return sorted({min(max_steps, max(1, round(center * _GRID_FACTOR**exponent))) for exponent in exponents})


def _search_golden_section(value: Callable[[int], float], low: int, high: int) -> None:
    """Evaluate ``value`` at numbers of steps that close in on its maximum between ``low`` and ``high``.

    By hand, as ``value`` is defined on whole steps and remembers what it has evaluated.
    """
    lower, upper = log(low), log(high)
    for _ in range(_NUM_SECTIONS):
        inner, outer = upper - _GOLDEN_RATIO * (upper - lower), lower + _GOLDEN_RATIO * (upper - lower)
        if value(_to_steps(inner)) < value(_to_steps(outer)):
            lower = inner
        else:
            upper = outer


def _to_steps(logarithm: float) -> int:
    return max(1, round(exp(logarithm)))
