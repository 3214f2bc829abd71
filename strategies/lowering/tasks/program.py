"""From abstract tasks to a program: one task for every class at a task's site, as columns.

No code here loops over tasks: a skeleton of thousands of abstract tasks on thousands of rank classes becomes a program
of millions of tasks by array operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import Flow, IntArray, Stream, StreamKind, Work
from meshwise.strategies.lowering.rank_classes.classes import ClassTable, each_once
from meshwise.strategies.lowering.tasks.skeleton import RANK, Site, Skeleton, Slot

_KINDS = tuple(StreamKind)
_NUMBER = {kind: index for index, kind in enumerate(_KINDS)}


class Content(NamedTuple):
    """What one task does, and the bytes that it puts on links."""

    work: Work
    flow: Flow | None = None


class Incidence(NamedTuple):
    """The rank classes of each instance of a site at one pipeline position, as two columns."""

    instance: IntArray
    rank_class: IntArray


class Sites:
    """The instances of every site: rank classes, or classes of groups and pairs; each computed once."""

    def __init__(self, table: ClassTable) -> None:
        self.table = table
        self._incidences: dict[tuple[Site, int], Incidence] = {}

    def instances(self, site: Site) -> tuple[int, ...]:
        """Return the classes (of ranks or groups) at a site, in order."""
        if site.kind == RANK:
            return self.table.by_position[site.position]
        return self.table.groups_at(site.kind, site.position)

    def incidence(self, site: Site, position: int) -> Incidence:
        """Return the rank classes of every instance that are at a pipeline position."""
        if (site, position) not in self._incidences:
            self._incidences[site, position] = self._incidence(site, position)
        return self._incidences[site, position]

    def _incidence(self, site: Site, position: int) -> Incidence:
        found = self.instances(site)
        if site.kind == RANK:
            return Incidence(np.arange(len(found)), np.array(found, dtype=np.int64))
        classes, positions = self.table.tables[site.kind].classes, self.table.positions
        rows = [(i, c) for i, group in enumerate(found) for c in classes[group] if positions[c] == position]
        pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Incidence(pairs[:, 0], pairs[:, 1])


@dataclass(frozen=True, eq=False)
class Frame:
    """The tasks of a skeleton on the classes of a table, before their contents are known.

    Parameters
    ----------
    instances
        For every template, the classes (of ranks or groups) at its site.
    rows
        For every task, its row in a list of all templates' instances.
    """

    instances: tuple[tuple[int, ...], ...]
    rows: IntArray
    streams: tuple[Stream, ...]
    microbatch_of: IntArray
    stream_start: IntArray
    stream_of: IntArray
    predecessor_start: IntArray
    predecessor_of: IntArray


@dataclass(frozen=True, eq=False)
class Columns:
    """A frame with the contents of its tasks: all columns of a program."""

    frame: Frame
    work: tuple[Work, ...]
    flows: tuple[Flow, ...]
    work_of: IntArray
    flow_of: IntArray


def assemble(skeleton: Skeleton, table: ClassTable, content: Callable[[Slot, int], Content]) -> Columns:
    """Return the columns of a skeleton's tasks on every class.

    Parameters
    ----------
    describe
        Returns the content of a template's task on one instance of its site, a class of ranks or of groups.
    """
    place = frame(skeleton, table)
    work, flows, work_rows, flow_rows = _contents(skeleton, place, content)
    return Columns(place, work, flows, work_rows[place.rows], flow_rows[place.rows])


@lru_cache(maxsize=8)
def frame(skeleton: Skeleton, table: ClassTable) -> Frame:
    """Return the tasks of a skeleton on the classes of a table; plans that differ in costs alone share it."""
    sites = Sites(table)
    instances = tuple(sites.instances(slot.site) for slot in skeleton.slots)
    counts = np.array([len(found) for found in instances], dtype=np.int64)
    task_counts = counts[skeleton.slot_of]
    base = np.concatenate([[0], np.cumsum(task_counts)])
    row_base = np.concatenate([[0], np.cumsum(counts)])[:-1]
    rows = ragged_index(row_base[skeleton.slot_of], task_counts)
    widths, flat = _streams(skeleton, sites)
    used, flat = np.unique(flat, return_inverse=True)
    width_base = np.concatenate([[0], np.cumsum(widths)])[:-1]
    predecessor_start, predecessor_of = _predecessors(skeleton, sites, base)
    return Frame(
        instances=instances,
        rows=rows,
        streams=tuple(Stream(index // len(_KINDS), _KINDS[index % len(_KINDS)]) for index in used.tolist()),
        microbatch_of=np.repeat(skeleton.microbatch_of, task_counts),
        stream_start=np.concatenate([[0], np.cumsum(widths[rows])]),
        stream_of=flat[ragged_index(width_base[rows], widths[rows])],
        predecessor_start=predecessor_start,
        predecessor_of=predecessor_of,
    )


def ragged_index(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the indices ``starts[i], .., starts[i] + lengths[i] - 1`` of every row, one after another.

    >>> ragged_index(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    result: IntArray = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return result


def _contents(
    skeleton: Skeleton, place: Frame, content: Callable[[Slot, int], Content]
) -> tuple[tuple[Work, ...], tuple[Flow, ...], IntArray, IntArray]:
    """Return works and flows, equal objects once, and their indices for every instance of every template."""
    work: dict[int, int] = {}
    works: list[Work] = []
    flows: list[Flow] = []
    work_rows, flow_rows = [], []
    for slot, instances in zip(skeleton.slots, place.instances, strict=True):
        for instance in instances:
            found = content(slot, instance)
            # Works are cached by their makers, so that comparing identities suffices and nothing is hashed.
            number = work.setdefault(id(found.work), len(works))
            if number == len(works):
                works.append(found.work)
            work_rows.append(number)
            flow_rows.append(len(flows) if found.flow is not None else -1)
            if found.flow is not None:
                flows.append(found.flow)
    return tuple(works), tuple(flows), np.array(work_rows, dtype=np.int64), np.array(flow_rows, dtype=np.int64)


def _streams(skeleton: Skeleton, sites: Sites) -> tuple[IntArray, IntArray]:
    """Return the number of streams of every instance of every template, and all these streams in order, as numbers."""
    held = {key: _held(sites, *key) for key in {(slot.site, slot.streams) for slot in skeleton.slots}}
    widths, flats = zip(*(held[slot.site, slot.streams] for slot in skeleton.slots), strict=True)
    return np.concatenate(widths), np.concatenate(flats)


def _held(sites: Sites, site: Site, streams: tuple[tuple[int, StreamKind], ...]) -> tuple[IntArray, IntArray]:
    """Return how many of some streams every instance of a site occupies, and these streams in order, as numbers."""
    instance, stream = [], []
    for position, kind in streams:
        found = sites.incidence(site, position)
        instance.append(found.instance)
        stream.append(found.rank_class * len(_KINDS) + _NUMBER[kind])
    where = np.concatenate(instance)
    width = np.bincount(where, minlength=len(sites.instances(site)))
    return width, np.concatenate(stream)[np.argsort(where, kind="stable")]


def _predecessors(skeleton: Skeleton, sites: Sites, base: IntArray) -> tuple[IntArray, IntArray]:
    """Return the explicit predecessors of all tasks: instances that share a class where an edge says so."""
    of_site = {slot.site: None for slot in skeleton.slots}
    numbers = {site: index for index, site in enumerate(of_site)}
    site_of = np.array([numbers[slot.site] for slot in skeleton.slots], dtype=np.int64)[skeleton.slot_of]
    names = list(of_site)
    many = len(names)
    # Edges of one pair of sites and position connect the same instances: they are expanded together.
    keys = (site_of[skeleton.before] * many + site_of[skeleton.after]) * len(sites.table.by_position) + skeleton.through
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(keys[order]) != 0])) if len(keys) else order
    before, after = [], []
    for chosen in np.split(order, starts[1:]):
        if not len(chosen):
            continue
        key = int(keys[chosen[0]])
        pair, position = divmod(key, len(sites.table.by_position))
        left, right = _related(sites, names[pair // many], names[pair % many], position)
        before.append((base[skeleton.before[chosen]][:, None] + left).ravel())
        after.append((base[skeleton.after[chosen]][:, None] + right).ravel())
    sources = np.concatenate(before) if before else np.empty(0, dtype=np.int64)
    targets = np.concatenate(after) if after else np.empty(0, dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=int(base[-1])))])
    return start, sources[np.argsort(targets, kind="stable")]


def _related(sites: Sites, first: Site, second: Site, position: int) -> tuple[IntArray, IntArray]:
    """Return the pairs of instances of two sites that share a rank class at a position."""
    left, right = sites.incidence(first, position), sites.incidence(second, position)
    # The usual case, a site with itself or with sites of the same classes, needs no search.
    if np.array_equal(left.rank_class, right.rank_class) and (np.diff(left.instance) > 0).all():
        return left.instance, right.instance
    order = np.argsort(left.rank_class, kind="stable")
    ordered = left.rank_class[order]
    low, high = np.searchsorted(ordered, right.rank_class), np.searchsorted(ordered, right.rank_class, side="right")
    matched = left.instance[order][ragged_index(low, high - low)]
    return each_once([matched], [np.repeat(right.instance, high - low)], len(sites.instances(second)))
