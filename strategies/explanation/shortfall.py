"""The device or host that lacks most memory for a plan, and what fills its memory at that moment."""

from dataclasses import dataclass, replace

from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The device or host that lacks most memory.

    Parameters
    ----------
    stages
        The pipeline stages of the device, or of all devices of the host.
    needed_memory, usable_memory
        Bytes at the peak, and bytes of the device or host that a plan may use.
    reported_memory
        Bytes that the framework reports for the device; for a host the usable bytes.
    memory_by_kind
        Bytes at the peak by kind.
    time
        The time of the peak, in seconds from the start of the step.
    activity
        The pass, microbatch and operator at the peak; empty for a host.
    host
        The name of the host; empty for a device.
    """

    stages: tuple[int, ...]
    needs: float
    has: float
    held: tuple[tuple[str, float], ...]
    time: float
    during: str
    host: str = ""
    reported: float = 0.0

    @property
    def lacks(self) -> float:
        """Bytes that are missing; negative where the plan fits."""
        return self.needs - self.has


def shortfall(problem: Problem, plan: Plan) -> Shortfall:
    """Return the shortfall of the device or host that lacks most in proportion to its memory, by simulation.

    Where none lacks memory, the fullest device counts.
    """
    timeline = simulate(lower(problem, plan), "longest_path")
    device, host = (max(profiles, key=_used, default=None) for profiles in (timeline.memory, timeline.host_memory))
    assert device is not None  # every plan has ranks
    if host is not None and _used(host) > max(_used(device), 1.0):
        members = timeline.hosts[host.rank_class]
        stages = {stage for index, _ in members.members for stage in timeline.rank_classes[index].stages}
        return _shortfall(host, tuple(sorted(stages)), "", members.name)
    span = timeline.running(device.rank_class, device.peak_time)
    during = f"{span.kind}, {span.operators}" if span else "nothing"
    if span and span.microbatch >= 0:
        during = f"{span.kind} of microbatch {span.microbatch}, {span.operators}"
    found = _shortfall(device, timeline.rank_classes[device.rank_class].stages, during)
    return replace(found, reported=_reported(problem, device.capacity))


def _reported(problem: Problem, usable: float) -> float:
    """Return the reported memory of the device with ``usable_memory`` usable bytes."""
    return next(each.memory for each in problem.cluster.accelerators if problem.usable(each) == usable)


def _used(profile: MemoryProfile) -> float:
    """Return the fraction of its memory that a device or host holds at its peak."""
    return profile.peak / profile.capacity


def _shortfall(profile: MemoryProfile, stages: tuple[int, ...], during: str, host: str = "") -> Shortfall:
    row = profile.usage[profile.totals.index(profile.peak)]
    return Shortfall(
        stages=stages,
        needs=profile.peak,
        has=profile.capacity,
        held=tuple((str(category), row[index]) for index, category in enumerate(CATEGORIES)),
        time=profile.peak_time,
        during=during,
        host=host,
        reported=profile.capacity,
    )
