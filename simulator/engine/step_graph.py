"""Step graphs: a program compiled for the engines, with dependencies and durations in columns.

`find_deadlock` names the tasks that wait for each other in a program that cannot finish.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.engine.flows import (
    MAX_TICKS,
    Bundle,
    BundleTable,
    build_bundle_table,
    find_disturbing_tenants,
    find_narrow_rows,
    find_shared_flows,
    find_watched_links,
)
from meshwise.simulator.program import Background, IntArray, Program, pause_collection
from meshwise.simulator.units import TICKS_PER_SECOND


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A program as the engines run it: tasks with successors, durations and contended transfers.

    Parameters
    ----------
    successor_start, successors
        The tasks that wait for task ``t`` are ``successors[successor_start[t]:successor_start[t + 1]]``.
    num_waits
        Number of tasks that each task waits for.
    durations
        Ticks of each task if nothing contends with it.
    latencies
        Ticks before the bytes of a contended task begin to move; the whole duration of other tasks.
    flow
        For every task whose transfer others can disturb, its index in ``bundles``; -1 for other tasks.
    capacity
        Byte/s of every link.
    tenants
        Flows of other tenants that can disturb those of the step.
    """

    successor_start: IntArray
    successors: IntArray
    num_waits: IntArray
    durations: IntArray
    latencies: IntArray
    flow: IntArray
    bundles: tuple[Bundle, ...] = ()
    capacity: tuple[float, ...] = ()
    tenants: tuple[tuple[Bundle, Background], ...] = ()

    __repr__ = brief_repr()

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.durations)

    @cached_property
    def successor_rows(self) -> list[tuple[int, ...]]:
        """The successors of every task."""
        start, successors = self.successor_start.tolist(), tuple(self.successors.tolist())
        return [successors[begin:end] for begin, end in pairwise(start)]

    @cached_property
    def latency_list(self) -> list[int]:
        """``latencies`` as a list."""
        values: list[int] = self.latencies.tolist()
        return values


@pause_collection()
def compile_program(program: Program) -> StepGraph:
    """Return the step graph of a program.

    A link whose tasks all occupy one stream is never contended, because a stream runs its tasks one after another. Such
    transfers become plain durations, which is exact.

    Raises
    ------
    ValueError
        If a task names a stream twice, or a stream or task that does not exist; if a duration is negative, or all
        together exceed 2**60 ticks.
    """
    table, count = _build_bundle_table(program), len(program.flows)
    disturbing_tenants = find_disturbing_tenants(program, table)
    is_watched = find_watched_links(program, table, disturbing_tenants)
    is_shared = find_shared_flows(table, is_watched)[:count]
    flow = np.where(np.append(is_shared, False)[program.flow_of], program.flow_of, -1)
    own_ticks, durations = _durations(program, table)
    capacity = tuple(link.bandwidth for link in program.links)
    bundles = table.to_bundles(find_narrow_rows(table, is_watched, capacity))
    return StepGraph(
        *_build_edges(program),
        durations,
        np.where(flow >= 0, own_ticks, durations),
        flow,
        bundles[:count],
        capacity,
        tuple((bundles[count + tenant], program.background[tenant]) for tenant in disturbing_tenants),
    )


def start_times(graph: StepGraph, ends: IntArray) -> IntArray:
    """Return the start of every task in ticks: the last end of the tasks that it waits for."""
    starts = np.zeros(graph.num_tasks, np.int64)
    np.maximum.at(starts, graph.successors, np.repeat(ends, np.diff(graph.successor_start)))
    return starts


def solo_durations(program: Program) -> IntArray:
    """Return the ticks of every task if nothing contends with it: its latency and its transfer alone."""
    return _durations(program, _build_bundle_table(program))[1]


def stream_rows(program: Program) -> tuple[IntArray, IntArray]:
    """Return all pairs (stream, task that occupies it), by stream and in the order in which it runs them.

    >>> from meshwise.simulator.program import RankClass, Stream, StreamKind, Task, TaskKind, program_of
    >>> tasks = [Task(TaskKind.FORWARD, streams, 1) for streams in ((1,), (0, 1), (1,))]
    >>> streams = [Stream(0, StreamKind.COMPUTE), Stream(0, StreamKind.DATA)]
    >>> [rows.tolist() for rows in stream_rows(program_of([RankClass("all", (0,), (0,))], streams, tasks))]
    [[0, 1, 1, 1], [1, 0, 1, 2]]
    """
    _check_indices(program.stream_of, len(program.streams), "stream")
    holders = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))
    order = np.argsort(program.stream_of, kind="stable")
    return program.stream_of[order], holders[order]


def _build_edges(program: Program) -> tuple[IntArray, IntArray, IntArray]:
    """Return the successors of all tasks as ragged columns, and the number of tasks that each task waits for."""
    count = program.num_tasks
    _check_indices(program.predecessor_of, count, "task")
    stream, holder = stream_rows(program)
    is_next = stream[1:] == stream[:-1]
    blocker, waiter = holder[:-1][is_next], holder[1:][is_next]
    if np.any(blocker == waiter):
        raise ValueError(f"a task names a stream once, met task {blocker[blocker == waiter][0]} with one twice")
    dependents = np.repeat(np.arange(count), np.diff(program.predecessor_start))
    keys = np.concatenate([blocker * count + waiter, program.predecessor_of * count + dependents])
    # For integers of 64 bits a stable sort merges runs: every stream is in order already.
    keys.sort(kind="stable")
    # A task may wait for another both on a stream and as a predecessor: the pair counts once.
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    source = keys // max(count, 1)
    target = keys - source * count
    successor_start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=count), out=successor_start[1:])
    return successor_start, target, np.bincount(target, minlength=count)


def _check_indices(indices: IntArray, count: int, noun: str) -> None:
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        bad_index = indices.min() if indices.min() < 0 else indices.max()
        raise ValueError(f"a {noun} lies in 0..{count - 1}, met {bad_index}")


def _build_bundle_table(program: Program) -> BundleTable:
    """Return the table of bundles of a program's flows, followed by those of its tenants."""
    flows = (*program.flows, *(tenant.flow for tenant in program.background))
    capacity = [link.bandwidth for link in program.links]
    return build_bundle_table([flow.usage for flow in flows], [flow.unit for flow in flows], capacity, TICKS_PER_SECOND)


def _durations(program: Program, table: BundleTable) -> tuple[IntArray, IntArray]:
    """Return the ticks of every task without its transfer, and with its transfer alone on the links."""
    values = [item.duration for item in program.work]
    if values and not 0 <= min(values) <= max(values) <= MAX_TICKS:
        bad_value = min(values) if min(values) < 0 else max(values)
        raise ValueError(f"the ticks of a task lie in 0..{MAX_TICKS} (13 days), met {bad_value}")
    own_ticks = np.array(values, dtype=np.int64)[program.work_of]
    solo_ticks = np.append(table.solo_ticks[: len(program.flows)], 0)[program.flow_of]
    # Summed as floats, for integers of 64 bits could overflow.
    if own_ticks.sum(dtype=np.float64) + solo_ticks.sum(dtype=np.float64) > MAX_TICKS:
        raise ValueError(
            f"the work of a step takes at most {MAX_TICKS} ticks (13 days), met {float(own_ticks.sum()):.3g}"
        )
    return own_ticks, own_ticks + solo_ticks


MAX_SHOWN = 12
"""Tasks of a cycle that a message names."""


class Deadlock(ValueError):
    """A program that cannot finish: each task of ``cycle`` waits for the next one, and the last for the first."""

    def __init__(self, message: str, cycle: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle


def find_deadlock(program: Program, graph: StepGraph, is_finished: NDArray[np.bool_]) -> Deadlock:
    """Return an error that names a cycle among the tasks that did not finish."""
    cycle = _shorten_cycle(program, _find_cycle(graph, is_finished))
    names = " waits for ".join(describe_task(program, task) for task in cycle[:MAX_SHOWN])
    more_text = f" waits for {len(cycle) - MAX_SHOWN} more" if len(cycle) > MAX_SHOWN else ""
    num_blocked = len(is_finished) - int(np.count_nonzero(is_finished))
    return Deadlock(
        f"{num_blocked} of {len(is_finished)} tasks can never start, because some wait for each other: "
        f"{names}{more_text}, which waits for the first",
        cycle,
    )


def _find_cycle(graph: StepGraph, is_finished: NDArray[np.bool_]) -> list[int]:
    """Return unfinished tasks of which each waits for the next one, and the last for the first."""
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    is_stuck = ~is_finished[source] & ~is_finished[graph.successors]
    blocker = np.full(graph.num_tasks, graph.num_tasks)
    np.minimum.at(blocker, graph.successors[is_stuck], source[is_stuck])
    # Every stuck task waits for a stuck one, so that the path must return to one of its own tasks.
    place: dict[int, int] = {}
    task = int(np.argmin(is_finished))
    while task not in place:
        place[task] = len(place)
        task = int(blocker[task])
    return list(place)[place[task] :]


def _shorten_cycle(program: Program, cycle: list[int]) -> tuple[int, ...]:
    """Return the cycle without tasks between two of the same stream, on which a task waits for all before it."""
    streams = {task: set(program.streams_of(task)) for task in cycle}
    path: list[int] = []
    for task in cycle:
        while len(path) > 1 and task < path[-2] and streams[task] & streams[path[-2]]:
            path.pop()
        path.append(task)
    return tuple(path)


def describe_task(program: Program, task: int) -> str:
    """Return a task in words: rank class and rank, kind, operators, peers, microbatch and stage."""
    item = program.work[program.work_of[task]]
    operators = list(dict.fromkeys(piece.operators for piece in item.pieces if piece.operators))
    operator_text = (
        f" {operators[0]}" if len(operators) == 1 else f" {operators[0]} to {operators[-1]}" if operators else ""
    )
    classes = sorted({program.streams[stream].rank_class for stream in program.streams_of(task)})
    rank_text, *peers = (_format_rank_class(program, index) for index in classes) if classes else ("no rank",)
    peer_text = f" with {' and '.join(peers)}" if peers else ""
    microbatch = int(program.microbatch_of[task])
    microbatch_text = f" of microbatch {microbatch}" if microbatch >= 0 else ""
    return f"[{rank_text}: {item.kind}{operator_text}{peer_text}{microbatch_text} on stage {item.stage}]"


def _format_rank_class(program: Program, rank_class: int) -> str:
    members = program.rank_classes[rank_class]
    rank = f"rank {members.representative}"
    return members.name if members.name == rank else f"{members.name} ({rank})"
