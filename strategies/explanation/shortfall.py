"""Which device lacks how much memory for a plan, and what fills it at that moment."""

from dataclasses import dataclass

from simulator.engine import simulate
from simulator.memory import CATEGORIES
from strategies.lowering import lower
from strategies.plan import Plan
from strategies.problem import Problem


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The device that lacks most.

    Parameters
    ----------
    stages
        Its pipeline stages.
    needs, has
        Bytes at its peak, and of the device.
    held
        Bytes at that moment by kind.
    time
        Seconds from the start of the step.
    during
        What runs then: pass, microbatch and operator.
    """

    stages: tuple[int, ...]
    needs: float
    has: float
    held: tuple[tuple[str, float], ...]
    time: float
    during: str

    @property
    def lacks(self) -> float:
        """Bytes that are missing; negative where some are left."""
        return self.needs - self.has


def shortfall(problem: Problem, plan: Plan) -> Shortfall:
    """Return what the device holds whose memory is used most, by simulation."""
    timeline = simulate(lower(problem, plan), "longest_path")
    fullest = max(timeline.memory, key=lambda profile: profile.peak - profile.capacity)
    row = fullest.usage[fullest.totals.index(fullest.peak)]
    span = timeline.running(fullest.rank_class, fullest.peak_time)
    during = f"{span.kind}, {span.operators}" if span else "nothing"
    if span and span.microbatch >= 0:
        during = f"{span.kind} of microbatch {span.microbatch}, {span.operators}"
    return Shortfall(
        stages=timeline.rank_classes[fullest.rank_class].stages,
        needs=fullest.peak,
        has=fullest.capacity,
        held=tuple((str(category), row[index]) for index, category in enumerate(CATEGORIES)),
        time=fullest.peak_time,
        during=during,
    )
