"""The device or host that lacks most memory for a plan, and what fills its memory at that moment."""

from dataclasses import dataclass, replace

from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The device or host that lacks most memory, in bytes, with those at its peak by kind.

    Parameters
    ----------
    stages
        The pipeline stages of the device, or of all devices of the host.
    reported_memory
        Bytes that the framework reports for the device; for a host the usable bytes.
    time
        The time of the peak, in seconds from the start of the step.
    activity
        The pass, microbatch and operator at the peak; empty for a host.
    host
        The name of the host; empty for a device.
    """

    stages: tuple[int, ...]
    needed_memory: float
    usable_memory: float
    memory_by_kind: tuple[tuple[str, float], ...]
    time: float
    activity: str
    host: str = ""
    reported_memory: float = 0.0

    @property
    def missing_memory(self) -> float:
        """Bytes that are missing; negative where the plan fits."""
        return self.needed_memory - self.usable_memory


def find_shortfall(problem: Problem, plan: Plan) -> Shortfall:
    """Return the shortfall of the device or host that lacks most in proportion to its memory, by simulation.

    Where none lacks memory, the fullest device counts.
    """
    timeline = simulate(lower(problem, plan), "longest_path")
    device, host = (
        max(profiles, key=_find_used_fraction, default=None) for profiles in (timeline.memory, timeline.host_memory)
    )
    assert device is not None  # every plan has ranks
    if host is not None and _find_used_fraction(host) > max(_find_used_fraction(device), 1.0):
        members = timeline.hosts[host.rank_class]
        stages = {stage for index, _ in members.members for stage in timeline.rank_classes[index].stages}
        return _build_shortfall(host, tuple(sorted(stages)), "", members.name)
    span = timeline.find_span(device.rank_class, device.peak_time)
    activity = f"{span.kind}, {span.operators}" if span else "nothing"
    if span and span.microbatch >= 0:
        activity = f"{span.kind} of microbatch {span.microbatch}, {span.operators}"
    device_shortfall = _build_shortfall(device, timeline.rank_classes[device.rank_class].stages, activity)
    accelerators = problem.cluster.accelerators
    memory = next(item.memory for item in accelerators if problem.usable_memory(item) == device.capacity)
    return replace(device_shortfall, reported_memory=memory)


def _find_used_fraction(profile: MemoryProfile) -> float:
    """Return the fraction of its memory that a device or host holds at its peak."""
    return profile.peak / profile.capacity


def _build_shortfall(profile: MemoryProfile, stages: tuple[int, ...], activity: str, host: str = "") -> Shortfall:
    row = profile.usage[profile.totals.index(profile.peak)]
    return Shortfall(
        stages=stages,
        needed_memory=profile.peak,
        usable_memory=profile.capacity,
        memory_by_kind=tuple((str(category), row[index]) for index, category in enumerate(CATEGORIES)),
        time=profile.peak_time,
        activity=activity,
        host=host,
        reported_memory=profile.capacity,
    )
