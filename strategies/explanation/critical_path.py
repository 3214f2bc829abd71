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

from meshwise.simulator.brief import brief
from meshwise.simulator.engine import ENGINES
from meshwise.simulator.engine.steady_state import window
from meshwise.simulator.engine.step_graph import StepGraph, compile_program
from meshwise.simulator.program import IntArray, Program, StreamKind, TaskKind, Work
from meshwise.simulator.spans import launch_times
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import TICKS_PER_SECOND

ELSEWHERE = "passes of other pipeline ranks"
"""Kind of the time in which the path is at other pipeline positions than the one that it is at longest."""

SHARING = "waiting for shared links"
"""Kind of the extra time of transfers whose links others use, and of computing beneath communication."""


class Segment(NamedTuple):
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

    Parameters
    ----------
    segments
        In order of time; a task that runs several kinds of work has one segment for each.
    position
        The pipeline position at which the path is longest: the one that holds up the step.
    """

    segments: tuple[Segment, ...]
    position: int
    steps: int = 1

    __repr__ = brief()

    @property
    def ticks(self) -> int:
        """Ticks of all segments, which are exactly those of the steps."""
        return sum(segment.ticks for segment in self.segments)

    def stretches(self) -> list[tuple[int, int, int]]:
        """Return the stretches of the path on one rank class: the class, the first and the last tick, in order.

        Segments that several classes run together, or that go from one class to another, lie between two stretches;
        where the path stays on the class they are part of its stretch.
        """
        found: list[tuple[int, int, int]] = []
        end = 0
        for segment in self.segments:
            start, end = end, end + segment.ticks
            if segment.rank_class < 0:
                continue
            if found and found[-1][0] == segment.rank_class:
                found[-1] = (segment.rank_class, found[-1][1], end)
            else:
                found.append((segment.rank_class, start, end))
        return found

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of one step by kind; they add up to the step time.

        Segments at other pipeline positions than the one that holds up the step are of the kind `ELSEWHERE`; transfers
        between positions keep their kind.
        """
        found: Counter[str] = Counter()
        for segment in self.segments:
            others = segment.position not in (self.position, -1)
            found[ELSEWHERE if others else segment.kind] += segment.ticks
        order = [*TaskKind, SHARING, ELSEWHERE]
        return {kind: found[kind] / self.steps / TICKS_PER_SECOND for kind in map(str, order) if found[kind]}


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
    graph, shown = compile_program(program), window(program, ends)
    inside = ends <= shown.end
    last = int(np.flatnonzero(inside)[np.argmax(ends[inside])])
    positions = {stages: at for at, stages in enumerate(sorted({each.stages for each in program.rank_classes}))}
    position_of = _common(program, [positions[each.stages] for each in program.rank_classes])
    class_of = _common(program, range(len(program.rank_classes)))
    segments: list[Segment] = []
    pieces = [_pieces(work) for work in program.work]
    path = _back(program, graph, starts, ends, last)
    for task, before in zip(path, [*path[1:], -1], strict=True):
        first, end = max(int(starts[task]), shown.begin), int(ends[task])
        if end <= shown.begin:
            break
        number, alone, taken = program.work_of[task], int(graph.durations[task]), end - int(starts[task])
        about = program.work[number]
        launches = before >= 0 and program.work[program.work_of[before]].kind is TaskKind.LAUNCH
        # a kernel that starts when its host has launched it: the path goes through the launches of the chain
        kinds = _launched(about) if launches and about.kind is not TaskKind.LAUNCH else pieces[number]
        spent = _late_part(_spent(about, kinds, alone, taken), end - first)
        place = position_of[task], class_of[task], about.stage, int(program.microbatch_of[task])
        # the path is walked from its end, and so is every task
        segments += [Segment(kind, *place, ticks) for kind, ticks in reversed(spent) if ticks]
    segments.reverse()
    return CriticalPath(tuple(segments), _longest(segments), shown.steps)


def _back(program: Program, graph: StepGraph, starts: IntArray, ends: IntArray, last: int) -> list[int]:
    """Return the tasks of the path from ``last_task`` back to a task that starts at 0.

    Of several predecessors that end when a task starts, the one on the same compute stream is taken: where a device is
    never idle, the path stays on it.
    """
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    tight = ends[source] == starts[graph.successors]
    source, target = source[tight], graph.successors[tight]
    computes = _computing(program)
    together = (computes[source] == computes[target]) & (computes[target] >= 0)
    before = np.full(graph.num_tasks, -1)
    before[target] = source
    before[target[together]] = source[together]  # the second assignment wins
    path, task = [], last
    while task >= 0:
        path.append(task)
        task = int(before[task]) if starts[task] > 0 else -1
    return path


def _computing(program: Program) -> IntArray:
    """Return for every task the compute stream that it holds; -1 for none."""
    computes = np.array([stream.kind is StreamKind.COMPUTE for stream in program.streams])
    result = np.full(program.num_tasks, -1)
    holder = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))
    chosen = computes[program.stream_of]
    result[holder[chosen]] = program.stream_of[chosen]
    return result


def _common(program: Program, of_class: Sequence[int]) -> list[int]:
    """Return for every task the value that all rank classes whose streams it holds share; -1 where they differ."""
    of_stream = np.array([of_class[stream.rank_class] for stream in program.streams])
    found = of_stream[program.stream_of]
    starts = program.stream_start[:-1]
    least, most = np.minimum.reduceat(found, starts), np.maximum.reduceat(found, starts)
    common: list[int] = np.where(least == most, least, -1).tolist()
    return common


def _spent(work: Work, pieces: list[tuple[str, int]], alone: int, taken: int) -> list[tuple[str, int]]:
    """Return the kinds and ticks of a task in order; ``solo_ticks`` are its ticks without contention."""
    return [*pieces, (str(work.kind), alone - work.duration), (SHARING, taken - alone)]


def _pieces(work: Work) -> list[tuple[str, int]]:
    """Return the kinds and ticks of work on the path through a task, in order."""
    return _through(work, [piece.start for piece in work.pieces], work.duration)[0]


def _launched(work: Work) -> list[tuple[str, int]]:
    """Return the kinds and ticks of a chain of kernels whose end is set by the launch of one of them on the host."""
    starts = launch_times(work.pieces)
    end = max(start + piece.end - piece.start for start, piece in zip(starts, work.pieces, strict=True))
    found, launched = _through(work, starts, end)
    return [(str(TaskKind.LAUNCH), launched + work.duration - end), *found]


def _through(work: Work, starts: Sequence[int], end: int) -> tuple[list[tuple[str, int]], int]:
    """Return the kinds and ticks of work on the path through the pieces of a task, in order, and where it begins.

    The path goes from the end back to the piece that ends when the next one starts; of several such pieces to one that
    computes, as between tasks.
    """
    found: list[tuple[str, int]] = []
    pieces = [
        (start, start + piece.end - piece.start, piece.kind) for start, piece in zip(starts, work.pieces, strict=True)
    ]
    while ended := [each for each in pieces if each[0] < end == each[1]]:
        start, _, kind = next((each for each in ended if each[2].computes), ended[0])
        found.append((str(kind), end - start))
        end = start
    return found[::-1], end


def _late_part(spent: list[tuple[str, int]], ticks: int) -> list[tuple[str, int]]:
    """Return the last ``ticks`` of the kinds and ticks of a task."""
    left, result = ticks, list[tuple[str, int]]()
    for kind, each in reversed(spent):
        result.append((kind, min(each, left)))
        left -= min(each, left)
    return result[::-1]


def _longest(segments: list[Segment]) -> int:
    """Return the pipeline position at which a path has most ticks."""
    held: Counter[int] = Counter()
    for segment in segments:
        if segment.position >= 0:
            held[segment.position] += segment.ticks
    return max(held, key=lambda position: (held[position], -position), default=0)


WAITING = "waiting"
"""Kind of the time in which a device neither computes nor communicates: pipeline bubbles, and waiting for others."""

_ORDER = (*(kind for kind in TaskKind if kind.computes), *(kind for kind in TaskKind if not kind.computes))


def device_time(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of one step that a device spends on each kind of work, on average over all devices.

    Where several kinds run at once the first one counts: kinds that compute come first, then the order of `TaskKind`.
    So communication beneath computing counts as nothing.
    """
    ranks = [len(members.ranks) for members in timeline.rank_classes]
    whole = sum(ranks) * timeline.steps
    found: dict[str, float] = {}
    before, kinds = 0.0, list[TaskKind]()
    for kind in _ORDER:
        kinds.append(kind)
        busy = sum(count * timeline.busy(each, kinds) for each, count in enumerate(ranks)) / max(whole, 1)
        if busy > before:
            found[str(kind)] = busy - before
        before = busy
    if timeline.step_time > before:
        found[WAITING] = timeline.step_time - before
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by kind the extra seconds of ``new_times``, the largest first; they add up to the difference of the sums.

    >>> difference({"forward": 2.0, "backward": 4.0}, {"forward": 2.0, "recompute": 1.5, "backward": 4.25})
    {'recompute': 1.5, 'backward': 0.25}
    """
    kinds = dict.fromkeys((*before, *after))
    more = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in kinds}
    return dict(sorted(((kind, value) for kind, value in more.items() if value), key=lambda item: -item[1]))
