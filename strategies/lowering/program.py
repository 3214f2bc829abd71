"""From abstract tasks to a program: one task for every class at a task's site, as columns.

No code here loops over tasks: a skeleton of thousands of abstract tasks on thousands of rank classes becomes a program
of millions of tasks by array operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwise.simulator.memo import memoise
from meshwise.simulator.program import Flow, IntArray, Steps, Stream, StreamKind, Work
from meshwise.strategies.lowering.rank_classes.classes import ClassTable, find_unique_pairs
from meshwise.strategies.lowering.tasks.skeleton import RANK, Site, Skeleton, TaskTemplate

_KINDS = tuple(StreamKind)
_NUMBER = {kind: index for index, kind in enumerate(_KINDS)}


class TaskContent(NamedTuple):
    """What one task does, and the bytes that it puts on links."""

    work: Work
    flow: Flow | None = None


class Incidence(NamedTuple):
    """The rank classes of each instance of a site at one pipeline position, as two columns."""

    instance: IntArray
    rank_class: IntArray


class SiteTable:
    """The instances of every site: rank classes, or classes of groups and pairs; each computed once."""

    def __init__(self, table: ClassTable) -> None:
        self.table = table

    def list_instances(self, site: Site) -> tuple[int, ...]:
        """Return the classes (of ranks or groups) at a site, in order."""
        if site.kind == RANK:
            return self.table.by_position[site.position]
        return self.table.groups_at(site.kind, site.position)

    @memoise
    def find_incidence(self, site: Site, position: int) -> Incidence:
        """Return the rank classes of every instance that are at a pipeline position."""
        groups = self.list_instances(site)
        if site.kind == RANK:
            return Incidence(np.arange(len(groups)), np.array(groups, dtype=np.int64))
        classes, positions = self.table.tables[site.kind].classes, self.table.positions
        rows = [
            (i, rank_class)
            for i, group in enumerate(groups)
            for rank_class in classes[group]
            if positions[rank_class] == position
        ]
        pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Incidence(pairs[:, 0], pairs[:, 1])


@dataclass(frozen=True, eq=False)
class TaskFrame:
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
class TaskColumns:
    """A frame with the contents of its tasks: all columns of a program."""

    frame: TaskFrame
    work: tuple[Work, ...]
    flows: tuple[Flow, ...]
    work_of: IntArray
    flow_of: IntArray


def assemble(
    skeleton: Skeleton, table: ClassTable, describe: Callable[[TaskTemplate, int], TaskContent]
) -> TaskColumns:
    """Return the columns of a skeleton's tasks on every class.

    Parameters
    ----------
    describe
        Returns the content of a template's task on one instance of its site, a class of ranks or of groups.
    """
    task_frame = build_frame(skeleton, table)
    work, flows, work_rows, flow_rows = _collect_contents(skeleton, task_frame, describe)
    return TaskColumns(task_frame, work, flows, work_rows[task_frame.rows], flow_rows[task_frame.rows])


@lru_cache(maxsize=8)
def build_frame(skeleton: Skeleton, table: ClassTable) -> TaskFrame:
    """Return the tasks of a skeleton on the classes of a table; plans that differ in costs alone share it."""
    sites = SiteTable(table)
    instances = tuple(sites.list_instances(template.site) for template in skeleton.templates)
    counts = np.array([len(classes) for classes in instances], dtype=np.int64)
    task_counts = counts[skeleton.template_of]
    task_base = np.concatenate([[0], np.cumsum(task_counts)])
    row_base = np.concatenate([[0], np.cumsum(counts)])[:-1]
    rows = ragged_index(row_base[skeleton.template_of], task_counts)
    widths, flat_streams = _list_streams(skeleton, sites)
    used_streams, flat_streams = np.unique(flat_streams, return_inverse=True)
    width_base = np.concatenate([[0], np.cumsum(widths)])[:-1]
    predecessor_start, predecessor_of = _find_predecessors(skeleton, sites, task_base)
    return TaskFrame(
        instances=instances,
        rows=rows,
        streams=tuple(Stream(index // len(_KINDS), _KINDS[index % len(_KINDS)]) for index in used_streams.tolist()),
        microbatch_of=np.repeat(skeleton.microbatch_of, task_counts),
        stream_start=np.concatenate([[0], np.cumsum(widths[rows])]),
        stream_of=flat_streams[ragged_index(width_base[rows], widths[rows])],
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


def _collect_contents(
    skeleton: Skeleton, task_frame: TaskFrame, describe: Callable[[TaskTemplate, int], TaskContent]
) -> tuple[tuple[Work, ...], tuple[Flow, ...], IntArray, IntArray]:
    """Return works and flows, equal objects once, and their indices for every instance of every template."""
    work_numbers: dict[Work, int] = {}
    works: list[Work] = []
    flows: list[Flow] = []
    work_rows, flow_rows = [], []
    for template, instances in zip(skeleton.templates, task_frame.instances, strict=True):
        for instance in instances:
            task_content = describe(template, instance)
            number = work_numbers.setdefault(task_content.work, len(works))
            if number == len(works):
                works.append(task_content.work)
            work_rows.append(number)
            flow_rows.append(len(flows) if task_content.flow is not None else -1)
            if task_content.flow is not None:
                flows.append(task_content.flow)
    return tuple(works), tuple(flows), np.array(work_rows, dtype=np.int64), np.array(flow_rows, dtype=np.int64)


def _list_streams(skeleton: Skeleton, sites: SiteTable) -> tuple[IntArray, IntArray]:
    """Return the number of streams of every instance of every template, and all these streams in order, as numbers."""
    site_streams = {
        key: _list_site_streams(sites, *key)
        for key in {(template.site, template.streams) for template in skeleton.templates}
    }
    widths, flats = zip(
        *(site_streams[template.site, template.streams] for template in skeleton.templates), strict=True
    )
    return np.concatenate(widths), np.concatenate(flats)


def _list_site_streams(
    sites: SiteTable, site: Site, streams: tuple[tuple[int, StreamKind], ...]
) -> tuple[IntArray, IntArray]:
    """Return how many of some streams every instance of a site occupies, and these streams in order, as numbers."""
    instance, stream = [], []
    for position, kind in streams:
        incidence = sites.find_incidence(site, position)
        instance.append(incidence.instance)
        stream.append(incidence.rank_class * len(_KINDS) + _NUMBER[kind])
    instance_rows = np.concatenate(instance)
    width = np.bincount(instance_rows, minlength=len(sites.list_instances(site)))
    return width, np.concatenate(stream)[np.argsort(instance_rows, kind="stable")]


def _find_predecessors(skeleton: Skeleton, sites: SiteTable, base: IntArray) -> tuple[IntArray, IntArray]:
    """Return the explicit predecessors of all tasks: instances that share a class where an edge says so."""
    unique_sites = {template.site: None for template in skeleton.templates}
    numbers = {site: index for index, site in enumerate(unique_sites)}
    site_of = np.array([numbers[template.site] for template in skeleton.templates], dtype=np.int64)[
        skeleton.template_of
    ]
    site_list = list(unique_sites)
    num_sites = len(site_list)
    # Edges of one pair of sites and position connect the same instances: they are expanded together.
    keys = (site_of[skeleton.edge_sources] * num_sites + site_of[skeleton.edge_targets]) * len(
        sites.table.by_position
    ) + skeleton.edge_positions
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(keys[order]) != 0])) if len(keys) else order
    source_parts, target_parts = [], []
    for edges in np.split(order, starts[1:]):
        if not len(edges):
            continue
        key = int(keys[edges[0]])
        pair, position = divmod(key, len(sites.table.by_position))
        source_rows, target_rows = _pair_instances(
            sites, site_list[pair // num_sites], site_list[pair % num_sites], position
        )
        source_parts.append((base[skeleton.edge_sources[edges]][:, None] + source_rows).ravel())
        target_parts.append((base[skeleton.edge_targets[edges]][:, None] + target_rows).ravel())
    sources = np.concatenate(source_parts) if source_parts else np.empty(0, dtype=np.int64)
    targets = np.concatenate(target_parts) if target_parts else np.empty(0, dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=int(base[-1])))])
    return start, sources[np.argsort(targets, kind="stable")]


def _pair_instances(sites: SiteTable, first_site: Site, second_site: Site, position: int) -> tuple[IntArray, IntArray]:
    """Return the pairs of instances of two sites that share a rank class at a position."""
    first_incidence, second_incidence = (
        sites.find_incidence(first_site, position),
        sites.find_incidence(second_site, position),
    )
    # The usual case, a site with itself or with sites of the same classes, needs no search.
    if (
        np.array_equal(first_incidence.rank_class, second_incidence.rank_class)
        and (np.diff(first_incidence.instance) > 0).all()
    ):
        return first_incidence.instance, second_incidence.instance
    order = np.argsort(first_incidence.rank_class, kind="stable")
    sorted_classes = first_incidence.rank_class[order]
    low, high = (
        np.searchsorted(sorted_classes, second_incidence.rank_class),
        np.searchsorted(sorted_classes, second_incidence.rank_class, side="right"),
    )
    matched = first_incidence.instance[order][ragged_index(low, high - low)]
    return find_unique_pairs(
        [matched], [np.repeat(second_incidence.instance, high - low)], len(sites.list_instances(second_site))
    )


def list_steps(tasks: Skeleton, task_frame: TaskFrame, depth: int) -> Steps:
    """Return the tasks of every step; tasks of one template on one class are in the order in which they run.

    ``depth`` is that of the plan. Launches are left out: they wait only for each other, and so may run ahead of all
    other tasks for ever.
    """
    assert tasks.step_of is not None
    counts = np.array([len(classes) for classes in task_frame.instances], dtype=np.int64)
    step_numbers = np.repeat(tasks.step_of, counts[tasks.template_of])
    launches = np.array(
        [any(kind is StreamKind.LAUNCH for _, kind in template.streams) for template in tasks.templates]
    )
    kept_tasks = np.flatnonzero(np.repeat(~launches[tasks.template_of], counts[tasks.template_of]))
    order: IntArray = kept_tasks[np.lexsort((task_frame.rows[kept_tasks], step_numbers[kept_tasks]))]
    return Steps(order.reshape(int(step_numbers.max()) + 1, -1), depth)
