"""Why a program cannot finish: tasks that wait for each other, by name."""

import numpy as np
from numpy.typing import NDArray

from simulator.engine.step_graph import StepGraph
from simulator.program import Program

SHOWN = 12
"""Tasks of a cycle that a message names."""


class Deadlock(ValueError):
    """A program whose order of tasks cannot finish.

    Each task of ``cycle`` waits for the next one, and the last for the first.
    """

    def __init__(self, message: str, cycle: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle


def deadlock(program: Program, graph: StepGraph, finished: NDArray[np.bool_]) -> Deadlock:
    """Return the error that names a cycle among the tasks that did not finish."""
    cycle = _shorter(program, _cycle(graph, finished))
    names = " waits for ".join(describe(program, task) for task in cycle[:SHOWN])
    more = f" waits for {len(cycle) - SHOWN} more" if len(cycle) > SHOWN else ""
    blocked = len(finished) - int(np.count_nonzero(finished))
    return Deadlock(
        f"{blocked} of {len(finished)} tasks can never start, because some wait for each other: "
        f"{names}{more}, which waits for the first",
        cycle,
    )


def _cycle(graph: StepGraph, finished: NDArray[np.bool_]) -> list[int]:
    """Return tasks of which each waits for the next, and the last for the first."""
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    stuck = ~finished[source] & ~finished[graph.successors]
    blocker = np.full(graph.num_tasks, graph.num_tasks)
    np.minimum.at(blocker, graph.successors[stuck], source[stuck])
    place: dict[int, int] = {}
    task = int(np.argmin(finished))
    while task not in place:
        place[task] = len(place)
        task = int(blocker[task])
    return list(place)[place[task] :]


def _shorter(program: Program, cycle: list[int]) -> tuple[int, ...]:
    """Return the cycle without tasks between two of one stream: a task waits for all before it there."""
    streams = {task: set(program.streams_of(task)) for task in cycle}
    path: list[int] = []
    for task in cycle:
        while len(path) > 1 and task < path[-2] and streams[task] & streams[path[-2]]:
            path.pop()
        path.append(task)
    return tuple(path)


def describe(program: Program, task: int) -> str:
    """Return a task in words: rank class and rank, what it does, its peers, microbatch and stage."""
    item = program.work[program.work_of[task]]
    operators = list(dict.fromkeys(piece.operators for piece in item.pieces if piece.operators))
    what = f" {operators[0]}" if len(operators) == 1 else f" {operators[0]} to {operators[-1]}" if operators else ""
    classes = sorted({program.streams[stream].rank_class for stream in program.streams_of(task)})
    who, *peers = (_name(program, index) for index in classes) if classes else ("no rank",)
    beside = f" with {' and '.join(peers)}" if peers else ""
    microbatch = int(program.microbatch_of[task])
    when = f" of microbatch {microbatch}" if microbatch >= 0 else ""
    return f"[{who}: {item.kind}{what}{beside}{when} on stage {item.stage}]"


def _name(program: Program, rank_class: int) -> str:
    members = program.rank_classes[rank_class]
    rank = f"rank {members.representative}"
    return members.name if members.name == rank else f"{members.name} ({rank})"
