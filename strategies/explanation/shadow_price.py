"""What a little more of each resource would save: the shadow prices of a plan, by finite differences.

The price of a resource is what the objective gains for one more unit of it while all else stays optimal [1]_. Of
rates, the same plan is simulated on a machine of which one part is 1 % faster. Of memory no plan runs faster by
having more: its price is what a better plan saves that fits then.

References
----------
.. [1] Dantzig, "Linear programming and extensions", 1963, section 12-1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.units import format_size
from strategies.cost_model import SimulatedCost
from strategies.evaluation import Trial
from strategies.explanation.machine_part import MachinePart
from strategies.explanation.ranking import Allowed, Ranking, fits_with
from strategies.plan import Plan

PERCENT = 0.01
"""By how much parts are made faster."""

GIB = 2.0**30
"""By how many bytes memory is made larger."""


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What more of a resource saves.

    Parameters
    ----------
    resource, amount
        What there is, and how much, in words.
    more
        How much more of it, in words.
    saves
        Seconds of a step.
    plan
        The plan that is faster then; ``None`` where it is the same.
    """

    resource: str
    amount: str
    more: str
    saves: float
    plan: Plan | None = None


def prices_of_rates(ranking: Ranking, plan: Plan, parts: tuple[MachinePart, ...]) -> Iterator[ShadowPrice]:
    """Yield what the same plan saves where one part of the machine is 1 % faster."""
    now = ranking.step_time(plan)
    for part in parts:
        ranking.look()
        problem = replace(ranking.problem, cluster=part.scaled(1 + PERCENT))
        yield ShadowPrice(part.name, part.speed, "1 %", now - SimulatedCost(problem).step_time(plan))


def price_of_memory(ranking: Ranking, best: Trial, more: float = GIB) -> ShadowPrice:
    """Return what the best plan saves that fits where every device has ``more`` bytes."""
    has = ranking.problem.cluster.accelerator.memory
    better = ranking.fastest(fits_with(ranking.problem, lambda memory: memory + more)) or best
    saves = best.evaluation.step_time - better.evaluation.step_time
    return ShadowPrice(
        "memory", format_size(has), format_size(more), max(saves, 0.0), better.plan if saves > 0 else None
    )


def next_larger_memory(ranking: Ranking, best: Trial) -> Trial | None:
    """Return the plan that needs least memory of those faster than the best one that fits; ``None`` where none is."""
    found, least = None, float("inf")
    while True:
        faster = ranking.fastest(_needing_less(least))
        if faster is None or faster.evaluation.step_time >= best.evaluation.step_time:
            return found
        found, least = faster, faster.evaluation.peak_memory


def _needing_less(memory: float) -> Allowed:
    """Return whether a candidate lacks memory on devices, not on hosts, and needs less than some bytes."""
    return lambda candidate: not candidate.fits and candidate.peak < memory and candidate.hosts_fit
