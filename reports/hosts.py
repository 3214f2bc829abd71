"""Hosts whose memory a step uses, and what they are called."""

from simulator.memory import MemoryProfile
from simulator.timeline import Timeline


def used_hosts(timeline: Timeline) -> dict[str, MemoryProfile]:
    """Return by name the memory of every host that holds anything."""
    if not timeline.hosts:
        return {}
    return {_name(timeline, profile.rank_class): profile for profile in timeline.host_memory if profile.peak > 0}


def _name(timeline: Timeline, host: int) -> str:
    """Return a host and how many ranks it holds.

    >>> from simulator.program import HostClass
    >>> _name(Timeline("simulated", (), (), (), 0.0, "x", hosts=(HostClass("host 0", 1e12, ((0, 1), (1, 7))),)), 0)
    'host 0 (8 ranks)'
    """
    ranks = sum(number for _, number in timeline.hosts[host].members)
    return f"{timeline.hosts[host].name} ({ranks} {'rank' if ranks == 1 else 'ranks'})"
