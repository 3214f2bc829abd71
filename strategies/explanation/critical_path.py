"""Where the time of a step goes: its critical path, and the seconds of devices by kind of work.

A task starts when the last task that it waits for ends. So the tasks on the way back from the last end of a step follow
each other without a gap, and their times add up to the step time [1]_. To make anything off this path faster saves
nothing.

The seconds of a device by kind of work, with its waiting, also add up to the step time.

References
----------
.. [1] Kelley and Walker, "Critical-path planning and scheduling", Eastern Joint Computer Conference 1959.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.engine import ENGINES
from meshwise.simulator.engine.steady_state import find_window
from meshwise.simulator.engine.step_graph import StepGraph, compile_program
from meshwise.simulator.program import IntArray, Program, StreamKind, TaskKind, Work
from meshwise.simulator.spans import launch_times
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import TICKS_PER_SECOND

OTHER_RANKS = "passes of other pipeline ranks"
"""Kind of the time in which the path is at other pipeline positions than the one that it is at longest."""

LINK_SHARING = "waiting for shared links"
"""Kind of the extra time of transfers whose links others use, and of computing beneath communication."""


class PathSegment(NamedTuple):
    """A part of a critical path: the kind of work, where and for which microbatch it runs, and its ticks.

    ``position`` is the pipeline position that runs it, ``rank_class`` the class of ranks; -1 where several do.
    """

    kind: str
    position: int
    rank_class: int
    stage: int
    microbatch: int
    ticks: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of ``steps`` steps.

    ``segments`` are in order of time; a task that runs several kinds of work has one for each. ``position`` is the
    pipeline position at which the path is longest: the one that holds up the step.
    """

    segments: tuple[PathSegment, ...]
    position: int
    steps: int = 1

    __repr__ = brief_repr()

    @property
    def ticks(self) -> int:
        """Ticks of all segments, which are exactly those of the steps."""
        return sum(segment.ticks for segment in self.segments)

    def list_stretches(self) -> list[tuple[int, int, int]]:
        """Return the stretches of the path on one rank class: the class, the first and the last tick, in order.

        Segments that several classes run together, or that go from one class to another, lie between two stretches;
        where the path stays on the class they are part of its stretch.
        """
        stretches: list[tuple[int, int, int]] = []
        end = 0
        for segment in self.segments:
            start, end = end, end + segment.ticks
            if segment.rank_class < 0:
                continue
            if stretches and stretches[-1][0] == segment.rank_class:
                stretches[-1] = (segment.rank_class, stretches[-1][1], end)
            else:
                stretches.append((segment.rank_class, start, end))
        return stretches

    def sum_by_kind(self) -> dict[str, float]:
        """Return the seconds of one step by kind; they add up to the step time.

        Segments at other pipeline positions than the one that holds up the step are of the kind `OTHER_RANKS`;
        transfers between positions keep their kind.
        """
        kind_ticks: Counter[str] = Counter()
        for segment in self.segments:
            is_elsewhere = segment.position not in (self.position, -1)
            kind_ticks[OTHER_RANKS if is_elsewhere else segment.kind] += segment.ticks
        order = [*TaskKind, LINK_SHARING, OTHER_RANKS]
        return {kind: kind_ticks[kind] / self.steps / TICKS_PER_SECOND for kind in map(str, order) if kind_ticks[kind]}


def critical_path(program: Program, engine: str = "discrete_event") -> CriticalPath:
    """Return the critical path of a program; of a program of many steps, the window that stands for them.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish.
    ValueError
        Where ``engine`` is unknown.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, met {engine}")
    starts, ends = ENGINES[engine](program)
    graph, step_window = compile_program(program), find_window(program, ends)
    is_inside = ends <= step_window.end
    last_task = int(np.flatnonzero(is_inside)[np.argmax(ends[is_inside])])
    all_stages = sorted({rank_class.stages for rank_class in program.rank_classes})
    positions = {stages: position for position, stages in enumerate(all_stages)}
    task_positions = _find_common_values(program, [positions[rank_class.stages] for rank_class in program.rank_classes])
    task_classes = _find_common_values(program, range(len(program.rank_classes)))
    segments: list[PathSegment] = []
    pieces = [_trace_pieces(work, [piece.start for piece in work.pieces], work.duration)[0] for work in program.work]
    path = _trace_back(program, graph, starts, ends, last_task)
    for task, previous_task in zip(path, [*path[1:], -1], strict=True):
        begin, end = max(int(starts[task]), step_window.begin), int(ends[task])
        if end <= step_window.begin:
            break
        work_index, solo_ticks, task_ticks = program.work_of[task], int(graph.durations[task]), end - int(starts[task])
        task_work = program.work[work_index]
        follows_launch = previous_task >= 0 and program.work[program.work_of[previous_task]].kind is TaskKind.LAUNCH
        # a kernel that starts when its host has launched it: the path goes through the launches of the chain
        is_launched = follows_launch and task_work.kind is not TaskKind.LAUNCH
        spent_ticks = [
            *(_list_launched_ticks(task_work) if is_launched else pieces[work_index]),
            (str(task_work.kind), solo_ticks - task_work.duration),
            (LINK_SHARING, task_ticks - solo_ticks),
        ]
        spent_ticks = _take_late_part(spent_ticks, end - begin)
        place = task_positions[task], task_classes[task], task_work.stage, int(program.microbatch_of[task])
        # the path is walked from its end, and so is every task
        segments += [PathSegment(kind, *place, ticks) for kind, ticks in reversed(spent_ticks) if ticks]
    segments.reverse()
    return CriticalPath(tuple(segments), _find_longest_position(segments), step_window.steps)


def _trace_back(program: Program, graph: StepGraph, starts: IntArray, ends: IntArray, last_task: int) -> list[int]:
    """Return the tasks of the path from ``last_task`` back to a task that starts at 0.

    Of several predecessors that end when a task starts, the one on the same compute stream is taken: where a device is
    never idle, the path stays on it.
    """
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    is_tight = ends[source] == starts[graph.successors]
    source, target = source[is_tight], graph.successors[is_tight]
    compute_streams = _find_compute_streams(program)
    is_same_stream = (compute_streams[source] == compute_streams[target]) & (compute_streams[target] >= 0)
    previous_task = np.full(graph.num_tasks, -1)
    previous_task[target] = source
    previous_task[target[is_same_stream]] = source[is_same_stream]  # the second assignment wins
    path, task = [], last_task
    while task >= 0:
        path.append(task)
        task = int(previous_task[task]) if starts[task] > 0 else -1
    return path


def _find_compute_streams(program: Program) -> IntArray:
    """Return for every task the compute stream that it holds; -1 for none."""
    is_compute = np.array([stream.kind is StreamKind.COMPUTE for stream in program.streams])
    result = np.full(program.num_tasks, -1)
    stream_tasks = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))
    on_compute = is_compute[program.stream_of]
    result[stream_tasks[on_compute]] = program.stream_of[on_compute]
    return result


def _find_common_values(program: Program, class_values: Sequence[int]) -> list[int]:
    """Return for every task the value that all rank classes whose streams it holds share; -1 where they differ."""
    stream_values = np.array([class_values[stream.rank_class] for stream in program.streams])
    task_values = stream_values[program.stream_of]
    starts = program.stream_start[:-1]
    low_values, high_values = np.minimum.reduceat(task_values, starts), np.maximum.reduceat(task_values, starts)
    common_values: list[int] = np.where(low_values == high_values, low_values, -1).tolist()
    return common_values


def _list_launched_ticks(work: Work) -> list[tuple[str, int]]:
    """Return the kinds and ticks of a chain of kernels whose end is set by the launch of one of them on the host."""
    starts = launch_times(work.pieces)
    end = max(start + piece.end - piece.start for start, piece in zip(starts, work.pieces, strict=True))
    kind_ticks, launch_end = _trace_pieces(work, starts, end)
    return [(str(TaskKind.LAUNCH), launch_end + work.duration - end), *kind_ticks]


def _trace_pieces(work: Work, starts: Sequence[int], end: int) -> tuple[list[tuple[str, int]], int]:
    """Return the kinds and ticks of work on the path through the pieces of a task, in order, and where it begins.

    The path goes from the end back to the piece that ends when the next one starts; of several such pieces to one that
    computes, as between tasks.
    """
    kind_ticks: list[tuple[str, int]] = []
    rows = zip(starts, work.pieces, strict=True)
    pieces = [(start, start + piece.end - piece.start, piece.kind) for start, piece in rows]
    while ended_pieces := [piece for piece in pieces if piece[0] < end == piece[1]]:
        start, _, kind = next((piece for piece in ended_pieces if piece[2].computes), ended_pieces[0])
        kind_ticks.append((str(kind), end - start))
        end = start
    return kind_ticks[::-1], end


def _take_late_part(spent_ticks: list[tuple[str, int]], ticks: int) -> list[tuple[str, int]]:
    """Return the last ``ticks`` of the kinds and ticks of a task."""
    ticks_left, result = ticks, list[tuple[str, int]]()
    for kind, kind_ticks in reversed(spent_ticks):
        result.append((kind, min(kind_ticks, ticks_left)))
        ticks_left -= min(kind_ticks, ticks_left)
    return result[::-1]


def _find_longest_position(segments: list[PathSegment]) -> int:
    """Return the pipeline position at which a path has most ticks."""
    position_ticks: Counter[int] = Counter()
    for segment in segments:
        if segment.position >= 0:
            position_ticks[segment.position] += segment.ticks
    return max(position_ticks, key=lambda position: (position_ticks[position], -position), default=0)


WAITING = "waiting"
"""Kind of the time in which a device neither computes nor communicates: pipeline bubbles, and waiting for others."""

_ORDER = (*(kind for kind in TaskKind if kind.computes), *(kind for kind in TaskKind if not kind.computes))


def device_time(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of one step that a device spends on each kind of work, on average over all devices.

    Where several kinds run at once the first one counts: kinds that compute come first, then the order of `TaskKind`.
    So communication beneath computing counts as nothing.
    """
    class_sizes = [len(members.ranks) for members in timeline.rank_classes]
    rank_steps = sum(class_sizes) * timeline.steps
    kind_seconds: dict[str, float] = {}
    earlier_busy, kinds = 0.0, list[TaskKind]()
    for kind in _ORDER:
        kinds.append(kind)
        class_times = (count * timeline.busy_time(index, kinds) for index, count in enumerate(class_sizes))
        busy = sum(class_times) / max(rank_steps, 1)
        if busy > earlier_busy:
            kind_seconds[str(kind)] = busy - earlier_busy
        earlier_busy = busy
    if timeline.step_time > earlier_busy:
        kind_seconds[WAITING] = timeline.step_time - earlier_busy
    return kind_seconds


def compare_times(old_times: Mapping[str, float], new_times: Mapping[str, float]) -> dict[str, float]:
    """Return by kind the extra seconds of ``new_times``, the largest first; they add up to the difference of the sums.

    >>> compare_times({"forward": 2.0, "backward": 4.0}, {"forward": 2.0, "recompute": 1.5, "backward": 4.25})
    {'recompute': 1.5, 'backward': 0.25}
    """
    kinds = dict.fromkeys((*old_times, *new_times))
    extra_times = {kind: new_times.get(kind, 0.0) - old_times.get(kind, 0.0) for kind in kinds}
    return dict(sorted(((kind, value) for kind, value in extra_times.items() if value), key=lambda item: -item[1]))
