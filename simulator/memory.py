"""Memory of ranks and hosts over time, by category: a sweep over all allocations and releases of a step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.program import Category, Deferred, IntArray, MemoryChange, Program, expand_rows
from meshwise.simulator.spans import piece_times
from meshwise.simulator.units import TICKS_PER_SECOND

CATEGORIES = tuple(Category)


class Column(Deferred[Any]):
    """An array as a sequence of numbers, or of tuples of numbers; NumPy reads the array itself."""

    def __init__(self, array: NDArray[np.float64]) -> None:
        super().__init__(self._items)
        self.array = array

    def _items(self) -> Iterable[Any]:
        return self.array.tolist() if self.array.ndim == 1 else map(tuple, self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype)


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes in use on one rank class, or on one host, over time.

    Parameters
    ----------
    rank_class
        Index of the rank class, or of the host.
    capacity
        Bytes that the device or host has.
    times
        Seconds at which the memory changes, in order; the first is 0.
    usage
        Bytes from each time on, by category in the order of `CATEGORIES`.
    """

    rank_class: int
    capacity: float
    times: Sequence[float]
    usage: Sequence[tuple[float, ...]]

    __repr__ = brief_repr("rank_class", "peak", "capacity", "times")

    @cached_property
    def totals(self) -> Sequence[float]:
        """Bytes from each time on, summed over categories."""
        return Column(np.asarray(self.usage, np.float64).reshape(len(self.times), -1).sum(axis=1))

    @cached_property
    def peak(self) -> float:
        """Largest total in bytes."""
        return float(np.max(np.asarray(self.totals), initial=0.0))

    @property
    def peak_time(self) -> float:
        """Seconds at which the peak is first reached."""
        return float(np.asarray(self.times)[np.argmax(np.asarray(self.totals))])


class _Changes(NamedTuple):
    """Allocations, and releases as negative sizes, of ``group`` at ``time`` on its device, or (``host`` is 1) host."""

    group: IntArray
    time: NDArray[Any]
    category: IntArray
    size: IntArray
    host: IntArray

    def select(self, rows: NDArray[Any]) -> "_Changes":
        return _Changes(*(column[rows] for column in self))


def cut_profile(profile: MemoryProfile, begin: float, end: float) -> MemoryProfile:
    """Return the part of a profile between two times in seconds; its own times count from ``begin``.

    >>> held = MemoryProfile(0, 9.0, (0.0, 1.0, 2.0, 3.0), ((1.0,), (2.0,), (3.0,), (4.0,)))
    >>> part = cut_profile(held, 1.5, 3.0)
    >>> part.times, part.usage
    ((0.0, 0.5), ((2.0,), (3.0,)))
    """
    times, usage = np.asarray(profile.times, np.float64), np.asarray(profile.usage, np.float64)
    start, stop = np.searchsorted(times, begin, side="right") - 1, np.searchsorted(times, end, side="left")
    shown_times = np.maximum(times[start:stop] - begin, 0.0)
    return replace(profile, times=Column(shown_times), usage=Column(usage[start:stop]))


def program_memory(program: Program, starts: IntArray, ends: IntArray) -> tuple[MemoryProfile, ...]:
    """Return the device memory of every rank class for a program whose tasks start and end at these ticks."""
    changes = _program_changes(program, starts, ends)
    levels = _sum_levels(
        ((change.rank_class, change) for change in program.resident_memory if not change.host),
        len(program.rank_classes),
    )
    return _build_profiles(program.capacity, _sweep_groups(levels, changes.select(changes.host == 0)))


def program_host_memory(program: Program, starts: IntArray, ends: IntArray) -> tuple[MemoryProfile, ...]:
    """Return the memory of every host for a program whose tasks start and end at these ticks.

    It is the sum over the ranks of the host; a program without hosts has none.
    """
    if not program.hosts:
        return ()
    # In order of rank class, so that the members of each are a row of a ragged column.
    members = sorted((member, host, count) for host, item in enumerate(program.hosts) for member, count in item.members)
    rank_class, host, num_ranks = np.array(members, np.int64).reshape(-1, 3).T
    start = np.searchsorted(rank_class, np.arange(len(program.rank_classes) + 1))
    changes = _program_changes(program, starts, ends)
    changes = changes.select(changes.host > 0)
    place, index = expand_rows(start, changes.group)
    changes = changes.select(place)._replace(group=host[index], size=changes.size[place] * num_ranks[index])
    class_levels = _sum_levels(
        ((change.rank_class, change) for change in program.resident_memory if change.host), len(program.rank_classes)
    )
    levels = np.zeros((len(program.hosts), len(CATEGORIES)), np.int64)
    np.add.at(levels, host, class_levels[rank_class] * num_ranks[:, None])
    return _build_profiles([item.capacity for item in program.hosts], _sweep_groups(levels, changes))


def peak_total(profiles: Iterable[MemoryProfile]) -> float:
    """Return the largest peak of all profiles, in bytes; 0 for no profiles."""
    return max((profile.peak for profile in profiles), default=0.0)


def _build_profiles(
    capacity: Sequence[float], usages: Iterable[tuple[NDArray[Any], NDArray[np.float64]]]
) -> tuple[MemoryProfile, ...]:
    return tuple(
        MemoryProfile(index, capacity[index], Column(ticks / TICKS_PER_SECOND), Column(usage))
        for index, (ticks, usage) in enumerate(usages)
    )


def _sum_levels(resident_memory: Iterable[tuple[int, MemoryChange]], count: int) -> IntArray:
    """Return the resident bytes of each group, [group, category]."""
    levels = np.zeros((count, len(CATEGORIES)), np.int64)
    for group, change in resident_memory:
        levels[group, CATEGORIES.index(change.category)] += change.size
    return levels


def _program_changes(program: Program, starts: IntArray, ends: IntArray) -> _Changes:
    """Return the allocations of rank classes at the start of pieces, and their releases at the end."""
    pieces = [piece for item in program.work for piece in item.pieces]
    rows = [
        (CATEGORIES.index(category), size, int(host), end)
        for piece in pieces
        for end, part in enumerate((piece.acquisitions, piece.releases))
        for category, size, host in part
    ]
    category, size, host, is_release = np.array(rows, np.int64).reshape(-1, 4).T
    change_start = np.append(0, np.cumsum([len(p.acquisitions) + len(p.releases) for p in pieces])).astype(np.int64)
    # Most tasks change no memory: only the others are expanded into rows.
    has_changes = np.array(
        [any(p.acquisitions or p.releases for p in item.pieces) for item in program.work], dtype=bool
    )
    times = piece_times(program, starts, ends, np.flatnonzero(has_changes[program.work_of]))
    place, change = expand_rows(change_start, times.piece)
    place_of_row, group = _expand_rank_classes(program, times.task[place])
    place, change = place[place_of_row], change[place_of_row]
    time = np.where(is_release[change] > 0, times.end[place], times.start[place])
    signed_size = np.where(is_release > 0, -size, size)
    return _Changes(group, time, category[change], signed_size[change], host[change])


def _expand_rank_classes(program: Program, tasks: IntArray) -> tuple[IntArray, IntArray]:
    """Return pairs (index into ``tasks``, rank class): for each task every rank class that runs it, once."""
    place, index = expand_rows(program.stream_start, tasks)
    count = max(len(program.rank_classes), 1)
    rank_class = np.array([stream.rank_class for stream in program.streams], np.int64)
    keys = np.unique(place * count + rank_class[program.stream_of[index]])
    return keys // count, keys % count


def _sweep_groups(levels: IntArray, changes: _Changes) -> Iterator[tuple[NDArray[Any], NDArray[np.float64]]]:
    """Yield the times and the bytes [time, category] of every group, from its bytes at time 0 and its changes."""
    groups = np.arange(len(levels))
    group = np.concatenate([groups, changes.group])
    time = np.concatenate([np.zeros(len(levels), changes.time.dtype), changes.time])
    delta = np.zeros((len(group), len(CATEGORIES)), np.int64)
    delta[: len(levels)] = levels
    delta[np.arange(len(levels), len(group)), changes.category] = changes.size
    order = np.lexsort((time, group))
    group, time = group[order], time[order]
    # One sum over all groups is faster than one for each: what precedes a group is subtracted again.
    usage = np.cumsum(delta[order], axis=0)
    first_rows = np.searchsorted(group, groups)
    usage -= (usage[first_rows] - delta[order[first_rows]])[group]
    is_final = np.append((time[1:] != time[:-1]) | (group[1:] != group[:-1]), True)
    group, time, usage = group[is_final], time[is_final], usage[is_final].astype(np.float64)
    bounds = np.searchsorted(group, np.append(groups, len(levels))).tolist()
    for begin, end in pairwise(bounds):
        yield time[begin:end], usage[begin:end]
