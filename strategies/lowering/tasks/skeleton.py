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


class Role:
    """What the tasks of a template are; the places of a template's ``key`` depend on it.

    Strings, not members of an enumeration: templates are looked up by them, and strings keep their hash.
    """

    PASS = "pass"
    """A part of a pass on a rank, key (stage, variant, part)."""
    LEAD = "lead"
    """Launching before such a part can run, with its key."""
    REST = "rest"
    """Launching while it runs, with its key."""
    COLLECTIVE = "collective"
    """A phase of a collective inside a pass, key (stage, variant, part, phase)."""
    SEND = "send"
    """Activations or gradients to another stage, key (stage, whether gradients)."""
    UNSHARD = "unshard"
    """A phase of the gather of a block's parameters, key (stage, block, phase)."""
    REDUCE = "reduce"
    """A phase of a sum of gradients, key (stage, bucket, phase); stage -1 and a kind of shares for all at once."""
    TIED = "tied"
    """A phase of the sum of a tied parameter's gradients, key (parameter, phase)."""
    REPLICATED = "replicated"
    """A phase of the sum of gradients that ranks along an operator axis have whole, key (phase,)."""
    SQUARES = "squares"
    """The read of the gradients for their norm, key ()."""
    NORM = "norm"
    """A phase of the sum of the norm, key (phase,)."""
    OPTIMIZER = "optimizer"
    """The update of the parameters on the device, key ()."""
    UPDATE = "update"
    """A chunk of a stage of an update whose states are on the host, key (stage of the update, end)."""
    GATHER = "gather"
    """A phase of the gather of parameters that were updated as shards, key (phase,)."""
    ACTIVATIONS = "host activations"
    """A copy of a block's activations to the host or back, key (stage, block)."""
    PARAMETERS = "host parameters"
    """A copy of a block's parameters from the host, key (stage, block)."""
    GRADIENTS = "host gradients"
    """A copy of a bucket of gradients to the host, key (stage, bucket)."""
    ROWS = "rows of tables"
    """A phase of what moves of tables that data ranks share beside a step, key (number, phase)."""
    SUM_ON_HOST = "host sum"
    """The host adds such a bucket to those of earlier microbatches, key (stage, bucket)."""
    SQUARES_ON_HOST = "host squares"
    """The host reads gradients for their norm, key ()."""


class Site(NamedTuple):
    """Where tasks run: ranks, groups or pairs of a ``kind`` at a pipeline position."""

    kind: str
    position: int


class TaskTemplate(NamedTuple):
    """What the tasks of all microbatches share.

    ``role``, one of `Role`, and ``key`` identify it for the lowering; ``streams`` are the pipeline positions and
    streams that it occupies.
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
