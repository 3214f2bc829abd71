"""Skeleton of a step: abstract tasks and what each waits for, before anything is known of machine or costs.

A skeleton speaks of *sites*: the ranks of a pipeline position, their tensor or data groups, or the pairs that send to
the next position. One abstract task at a site stands for one task of every class there.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import IntArray, StreamKind

RANK = "rank"
"""Kind of the sites of single ranks."""

ACTIVATIONS, PARAMETERS, GRADIENTS = "host activations", "host parameters", "host gradients"
"""Roles of copies between ranks and hosts while passes run."""

SUM_ON_HOST, SQUARES_ON_HOST = "host sum", "host squares"
"""Roles of work on a host: it adds gradients, and reads them for their norm."""


class Site(NamedTuple):
    """Where tasks run: ranks, groups or pairs of a ``kind`` at a pipeline position."""

    kind: str
    position: int


class TaskTemplate(NamedTuple):
    """What the tasks of all microbatches share.

    ``role`` and ``key`` identify it for the lowering; ``streams`` are the pipeline positions and streams that it
    occupies.
    """

    site: Site
    role: str
    key: tuple[int, ...]
    streams: tuple[tuple[int, StreamKind], ...]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """Abstract tasks in order.

    Parameters
    ----------
    templates
        The different templates; ``template_of`` and ``microbatch_of`` are for each task its template and microbatch.
    edge_sources, edge_targets, edge_positions
        Edges: task ``edge_targets[i]`` waits for task ``edge_sources[i]`` at a pipeline position that they share.
    step_of
        The step of every task, where several steps run in a row.
    """

    templates: tuple[TaskTemplate, ...]
    template_of: IntArray
    microbatch_of: IntArray
    edge_sources: IntArray
    edge_targets: IntArray
    edge_positions: IntArray
    step_of: IntArray | None = None


Waits = list[tuple[int | None, int]]
"""Tasks that must have ended, each with the pipeline position where that is known."""
Streams = tuple[tuple[int, StreamKind], ...]
"""Pipeline positions and streams that a task occupies."""


class TaskList:
    """Abstract tasks while they are collected.

    ``repeated_edges`` are the edges of a pass, counted from its first task, with the first tasks of all equal passes.
    """

    def __init__(self) -> None:
        self.templates: dict[TaskTemplate, int] = {}
        self.template_of: list[int] = []
        self.microbatch_of: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.repeated_edges: list[tuple[IntArray, list[int]]] = []

    def add_task(
        self,
        site: Site,
        role: str,
        key: tuple[int, ...],
        streams: Streams,
        microbatch: int,
        waits: Waits,
    ) -> int:
        """Add a task and return its number."""
        return self.append_task(self.number_template(site, role, key, streams), microbatch, waits)

    def number_template(self, site: Site, role: str, key: tuple[int, ...], streams: Streams) -> int:
        """Return the number of a template."""
        return self.templates.setdefault(TaskTemplate(site, role, key, streams), len(self.templates))

    def append_task(self, template: int, microbatch: int, waits: Waits) -> int:
        """Add a task of a template and return its number."""
        number = len(self.template_of)
        self.template_of.append(template)
        self.microbatch_of.append(microbatch)
        self.edges += [(predecessor, number, position) for predecessor, position in waits if predecessor is not None]
        return number

    def append_tasks(self, templates: list[int], microbatch: int) -> None:
        """Add tasks of one microbatch whose edges are known."""
        self.template_of += templates
        self.microbatch_of += [microbatch] * len(templates)

    def build_skeleton(self) -> Skeleton:
        """Return the collected tasks."""
        edges = self._build_edges()
        template_of, microbatch_of = (
            np.array(column, dtype=np.int64) for column in (self.template_of, self.microbatch_of)
        )
        return Skeleton(tuple(self.templates), template_of, microbatch_of, edges[:, 0], edges[:, 1], edges[:, 2])

    def _build_edges(self) -> IntArray:
        """Return all edges, sorted by the task that waits."""
        parts = [np.array(self.edges, dtype=np.int64).reshape(-1, 3)]
        for edges, starts in self.repeated_edges:
            # Only tasks shift, not the position.
            shift = np.array(starts, dtype=np.int64)[:, None, None] * (1, 1, 0)
            parts.append((edges + shift).reshape(-1, 3))
        edges = np.concatenate(parts)
        return edges[np.argsort(edges[:, 1], kind="stable")]
