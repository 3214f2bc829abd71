"""A step as every rank executes it: nodes with their dependencies, the form of Chakra execution traces.

The simulator runs rank classes, and a collective as one task per phase of all its ranks. Here each class has the nodes
of one of its ranks, and a collective is one node with all of its phases. Its group or peer is left open, because it
differs from rank to rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import ENGINES
from meshwise.simulator.program import IntArray, Piece, StreamKind, TaskKind
from meshwise.strategies.lowering.lower import SitedProgram
from meshwise.strategies.lowering.tasks.skeleton import TaskTemplate

_PHASED = ("collective", "reduce", "replicated", "gather", "unshard", "tied", "norm")
"""Kinds of task templates whose key ends in the number of the phase."""
_SENDING = (StreamKind.SEND_FORWARD, StreamKind.SEND_BACKWARD)


class Communication(NamedTuple):
    """The communication of a node: the kind of its group, the collective and the bytes of the whole tensor.

    ``sends`` and ``receives`` tell the two ends of a transfer apart; both are false for a collective of a group.
    """

    group: str
    collective: Collective
    size: float
    sends: bool = False
    receives: bool = False


class Node(NamedTuple):
    """A task, or all phases of a collective, on one rank of a class; ``duration`` is simulated, in ticks.

    ``follows`` are the previous nodes on its streams, ``needs`` the nodes whose results it waits for.
    """

    task: int
    name: str
    kind: TaskKind
    stream: StreamKind
    stage: int
    microbatch: int
    duration: int
    follows: tuple[int, ...]
    needs: tuple[int, ...]
    size: float
    communication: Communication | None


@dataclass(frozen=True, eq=False)
class Execution:
    """The nodes of a simulated step."""

    sited: SitedProgram
    engine: str = "discrete_event"

    __repr__ = brief_repr()

    @cached_property
    def _group_cache(self) -> dict[str, IntArray]:
        return {}

    @cached_property
    def times(self) -> tuple[IntArray, IntArray]:
        """Start and end of every task, in ticks."""
        return ENGINES[self.engine](self.sited.program)

    @cached_property
    def root_tasks(self) -> IntArray:
        """For every task the task that is the first phase of its collective; itself where it has one phase."""
        program, last_task = self.sited.program, np.full(len(self.sited.program.streams), -1)
        root_of = np.arange(program.num_tasks)
        is_later_phase = np.array([slot.role in _PHASED and slot.key[-1] > 0 for slot, _ in self.sited.templates])[
            self.sited.rows
        ]
        for task, is_later_task in enumerate(is_later_phase.tolist()):
            streams = program.stream_of[program.stream_start[task] : program.stream_start[task + 1]]
            if is_later_task:
                root_of[task] = root_of[last_task[streams[0]]]
            last_task[streams] = task
        return root_of

    def list_nodes(self, rank_class: int) -> Iterator[Node]:
        """Yield the nodes of one rank of a class, in order."""
        program, roots, (starts, ends) = self.sited.program, self.root_tasks, self.times
        own_streams = {index for index, stream in enumerate(program.streams) if stream.rank_class == rank_class}
        phases: dict[int, list[int]] = {}
        task_streams: dict[int, list[int]] = {}
        for task in self._list_tasks(sorted(own_streams)):
            phases.setdefault(int(roots[task]), []).append(task)
            task_streams[task] = [stream for stream in program.streams_of(task) if stream in own_streams]
        last_task: dict[int, int] = {}
        for root, tasks in sorted(phases.items()):
            predecessors = {last_task[stream] for stream in task_streams[root] if stream in last_task}
            needs = {
                int(roots[predecessor]) for task in tasks for predecessor in program.predecessors_of(task)
            } & phases.keys()
            duration = int(ends[tasks[-1]] - starts[root])
            yield self._make_node(
                root, task_streams[root][0], duration, tuple(sorted(predecessors)), tuple(sorted(needs - {root}))
            )
            last_task |= dict.fromkeys((stream for task in tasks for stream in task_streams[task]), root)

    def _list_tasks(self, streams: list[int]) -> list[int]:
        """Return the tasks that occupy any of these streams, in order."""
        program = self.sited.program
        holders = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))
        tasks: list[int] = np.unique(holders[np.isin(program.stream_of, streams)]).tolist()
        return tasks

    def _make_node(
        self, task: int, stream: int, duration: int, follows: tuple[int, ...], needs: tuple[int, ...]
    ) -> Node:
        program = self.sited.program
        work, kind = program.work[program.work_of[task]], program.streams[stream].kind
        piece, microbatch = work.pieces[0], int(program.microbatch_of[task])
        slot, _ = self.sited.templates[self.sited.rows[task]]
        communication = _find_communication(slot, piece, kind)
        fields = work.stage, microbatch, duration, follows, needs, piece.bytes, communication
        return Node(task, piece.operators, work.kind, kind, *fields)

    def group_rows(self, kind: str) -> IntArray:
        """Return the groups of a kind, shape [groups, ranks]."""
        if kind not in self._group_cache:
            self._group_cache[kind] = self.sited.table.placed.group_devices(kind)[0]
        return self._group_cache[kind]


def _find_communication(slot: TaskTemplate, piece: Piece, stream: StreamKind) -> Communication | None:
    """Return the communication of a task; ``None`` for computation and for copies between a rank and its host."""
    if not piece.kind.communicates:
        return None
    collective = Collective(piece.operators.rpartition(": ")[2].split()[0])
    is_transfer, is_sending = collective is Collective.SEND, stream in _SENDING
    return Communication(
        slot.site.kind, collective, piece.bytes, is_transfer and is_sending, is_transfer and not is_sending
    )
