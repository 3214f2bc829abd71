"""What can be traded: plans that no other beats in step time, memory, devices and cost at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from strategies.evaluation import Trial
from strategies.explanation.ranking import Allowed, Among, Ranking, fits, ranking
from strategies.problem import Problem
from strategies.search.space import Space

SLOWEST = 1.25
"""How many times the step time of the best plan a front goes up to."""

APART = 0.98
"""A plan of the front needs at most this fraction of the memory of the one before."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A plan of a front.

    Parameters
    ----------
    fits
        Whether devices have its memory.
    cost
        Device-hours for a million tokens.
    """

    trial: Trial
    devices: int
    fits: bool
    cost: float


def memory_front(ranked: Ranking, best: Trial) -> Iterator[Tradeoff]:
    """Yield ever slower plans that need ever less memory, from the fastest of all, whether it fits or not.

    Of plans that need about the same memory only the fastest is shown; the front ends at `SLOWEST`.
    """
    least = float("inf")
    while (found := ranked.fastest(_within(least), below=SLOWEST * best.evaluation.step_time)) is not None:
        yield _tradeoff(ranked.problem, found)
        least = found.evaluation.peak_memory * APART


def device_front(
    problem: Problem, space: Space, best: Trial, seconds: Callable[[], float]
) -> Iterator[tuple[int, Tradeoff | None, Among | None]]:
    """Yield for ever fewer nodes, divisors of those there are, their devices and the fastest plan that fits on them.

    And among which plans it is; ``None`` of ``best``, and where no plan of these fits: then fewer nodes are not looked
    at.

    Raises
    ------
    OutOfTime
        Where no ``seconds`` are left.
    """
    yield problem.cluster.num_devices, _tradeoff(problem, best), None
    nodes = problem.cluster.num_nodes
    for count in range(nodes // 2, 0, -1):
        if nodes % count:
            continue
        smaller = replace(problem, cluster=problem.cluster.resized(count))
        ranked = ranking(smaller, _unlimited(space), seconds=seconds)
        found = ranked.fastest(fits)
        yield smaller.cluster.num_devices, _tradeoff(smaller, found) if found else None, ranked.among
        if found is None:
            return


def _within(memory: float) -> Allowed:
    return lambda candidate: candidate.peak <= memory


def _unlimited(space: Space) -> Space:
    """Return a space that leaves degrees open, for fewer devices have others."""
    return replace(space, data=None, pipeline=None)


def _tradeoff(problem: Problem, trial: Trial) -> Tradeoff:
    training, devices = problem.training, trial.plan.mesh.num_ranks
    tokens = training.global_batch * training.sequence
    hours = devices * trial.evaluation.step_time / 3600
    return Tradeoff(trial, devices, trial.evaluation.fits, hours / tokens * 1e6)
