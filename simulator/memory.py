"""Memory of a rank over time, by category: an open/close sweep over task starts and ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from simulator.program import Category, MemoryChange

CATEGORIES = tuple(Category)


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes held by one rank class over time.

    Parameters
    ----------
    times
        Seconds at which the memory changes, rising; the first is 0.
    usage
        For each time, bytes by category in the order of `CATEGORIES`, from then on.
    """

    rank_class: int
    capacity: float
    times: tuple[float, ...]
    usage: tuple[tuple[float, ...], ...]

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """Bytes in all from each time on."""
        return tuple(sum(row) for row in self.usage)

    @property
    def peak(self) -> float:
        """Largest total in bytes."""
        return max(self.totals, default=0.0)

    @property
    def peak_time(self) -> float:
        """Seconds at which the peak is first reached."""
        return self.times[self.totals.index(self.peak)]


def sweep(
    rank_class: int,
    capacity: float,
    resident: Iterable[MemoryChange],
    changes: Iterable[tuple[float, MemoryChange]],
) -> MemoryProfile:
    """Return the profile of one rank class from what it holds and when that changes.

    At one instant memory is given back before it is taken, as an in-order stream does.
    """
    level = [0.0] * len(CATEGORIES)
    for change in resident:
        if change.rank_class == rank_class:
            level[CATEGORIES.index(change.category)] += change.size
    times, usage = [0.0], [tuple(level)]
    events = sorted(
        ((time, change) for time, change in changes if change.rank_class == rank_class),
        key=lambda event: (event[0], event[1].size),
    )
    for time, change in events:
        level[CATEGORIES.index(change.category)] += change.size
        if time == times[-1]:
            usage[-1] = tuple(level)
        else:
            times.append(time)
            usage.append(tuple(level))
    return MemoryProfile(rank_class, capacity, tuple(times), tuple(usage))


def peak_total(profiles: Sequence[MemoryProfile]) -> float:
    """Return the largest peak over rank classes, in bytes."""
    return max((profile.peak for profile in profiles), default=0.0)
