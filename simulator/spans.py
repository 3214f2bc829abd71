"""Spans in columns: when the pieces of each task ran, on which streams, and how long ranks were busy.

An engine computes the start and end of a task; its pieces follow each other in between. If the host launches the
kernels of a chain one by one, the engine starts the chain so late that no kernel waits for its launch. In truth its
first kernels run earlier. Let r be the time at which all else that the chain waits for has ended, h the time at which
the host begins to launch it, s the offset of a piece in the chain, and h + l the time at which the piece would run if
r were long past. The piece then starts at max(r + s, h + l).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.program import Deferred, IntArray, Piece, Program, StreamKind, TaskKind, expand_rows
from meshwise.simulator.units import TICKS_PER_SECOND


class PieceTimes(NamedTuple):
    """For every piece that ran: its task, its index among all pieces of the program, and its start and end in ticks."""

    task: IntArray
    piece: IntArray
    start: IntArray
    end: IntArray


def piece_times(program: Program, starts: IntArray, ends: IntArray, tasks: IntArray) -> PieceTimes:
    """Return the start and end of the pieces of ``tasks``; a piece that lasts as long as its task ends with it."""
    piece_start = np.append(0, np.cumsum([len(item.pieces) for item in program.work], dtype=np.int64))
    table = [(p.start, p.end, p.end == item.duration) for item in program.work for p in item.pieces]
    begin, end, ends_with_task = np.array(table, np.int64).reshape(-1, 3).T
    place, piece = expand_rows(piece_start, program.work_of[tasks])
    task = tasks[place]
    piece_starts = starts[task] + begin[piece]
    piece_ends = np.where(ends_with_task[piece] > 0, ends[task], starts[task] + end[piece])
    # All other pieces run at their offset from the start of the task.
    chains = np.array([len(item.pieces) > 1 and any(p.launch_end for p in item.pieces) for item in program.work], bool)
    rows = np.flatnonzero(chains[program.work_of[task]])
    if len(rows):
        launches = [launch_times(item.pieces) for item in program.work]
        arrivals, launch_starts = _arrivals(program, starts, ends, chains[program.work_of])
        offsets = np.array([ticks for row in launches for ticks in row], np.int64)[piece[rows]]
        piece_starts[rows] = np.maximum(arrivals[task[rows]] + begin[piece[rows]], launch_starts[task[rows]] + offsets)
        piece_ends[rows] = piece_starts[rows] + (end - begin)[piece[rows]]
    return PieceTimes(task, piece, piece_starts, piece_ends)


def launch_times(pieces: Sequence[Piece]) -> list[int]:
    """Return the starts of pieces that wait only for their launches and earlier pieces, in ticks from the first launch.

    >>> durations, launches = (5, 1, 1), (2, 4, 9)
    >>> ends = (5, 6, 7)
    >>> rows = zip(durations, launches, ends, strict=True)
    >>> launch_times([Piece(TaskKind.FORWARD, "", e - d, e, launch_end=n) for d, n, e in rows])
    [2, 7, 9]
    """
    times = list[int]()
    ready_time = last_end = end = 0
    for piece in pieces:
        if piece.start >= end:  # else it is beside the one before it
            ready_time = last_end
        times.append(max(ready_time, piece.launch_end))
        last_end, end = max(last_end, times[-1] + piece.end - piece.start), max(end, piece.end)
    return times


def _arrivals(
    program: Program, starts: IntArray, ends: IntArray, is_chain: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[IntArray, IntArray]:
    """Return for tasks of ``is_chain`` the ticks at which all but launches has ended, and at which launching begins.

    If several rank classes run a task, it is the latest of their times.
    """
    arrivals, launch_starts = np.zeros_like(starts), np.zeros_like(starts)
    launches = np.array([item.kind is TaskKind.LAUNCH for item in program.work], bool)[program.work_of]
    tasks = np.flatnonzero(is_chain)
    place, index = expand_rows(program.predecessor_start, tasks)
    task, predecessor = tasks[place], program.predecessor_of[index]
    is_launch = launches[predecessor]
    np.maximum.at(launch_starts, task[is_launch], starts[predecessor[is_launch]])
    np.maximum.at(arrivals, task[~is_launch], ends[predecessor[~is_launch]])
    # A stable sort by stream keeps tasks of a stream in the order in which it runs them.
    order = np.argsort(program.stream_of, kind="stable")
    holder = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))[order]
    followers = np.flatnonzero((np.diff(program.stream_of[order]) == 0) & is_chain[holder[1:]])
    np.maximum.at(arrivals, holder[followers + 1], ends[holder[followers]])
    return arrivals, launch_starts


STREAM_KINDS = tuple(StreamKind)
TASK_KINDS = tuple(TaskKind)
Times = NDArray[np.int64] | NDArray[np.float64]


class Span(NamedTuple):
    """A piece of a task on one rank class, from ``start`` to ``end`` in seconds after the start of the step.

    ``bytes`` is the size of the message of a communication: the whole tensor that it reduces, gathers or scatters.
    """

    rank_class: int
    stream: StreamKind
    kind: TaskKind
    stage: int
    microbatch: int
    operators: str
    start: float
    end: float
    bytes: float = 0.0

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class SpanColumns:
    """Spans as columns.

    Parameters
    ----------
    stream, kind, operators
        Indices into `STREAM_KINDS`, `TASK_KINDS` and ``names``.
    start, end
        Times in units of 1 / ``per_second`` seconds.
    """

    rank_class: IntArray
    stream: IntArray
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    operators: IntArray
    start: Times
    end: Times
    bytes: NDArray[np.float64]
    names: tuple[str, ...]
    per_second: int = 1

    __repr__ = brief_repr("rank_class", "names")

    def to_table(self) -> dict[str, NDArray[Any]]:
        """Return the fields of `Span`, each as a column: kinds and names as objects, times in seconds."""
        values = {"stream": STREAM_KINDS, "kind": TASK_KINDS, "operators": self.names}
        table = {name: getattr(self, name) for name in Span._fields}
        table |= {name: np.array(objects, object)[table[name]] for name, objects in values.items()}
        return table | {name: table[name] / self.per_second for name in ("start", "end")}

    def to_spans(self) -> tuple[Span, ...]:
        """Return the spans as objects."""
        columns = (column.tolist() for column in self.to_table().values())
        return tuple(map(Span._make, zip(*columns, strict=True)))

    def select(self, rows: IntArray) -> "SpanColumns":
        """Return some of the spans."""
        return replace(self, **{name: getattr(self, name)[rows] for name in Span._fields})


class Spans(Deferred[Span]):
    """Spans that are computed at their first use: as columns, and from those as objects."""

    def __init__(self, columns: Callable[[], SpanColumns]) -> None:
        super().__init__(self._to_objects)
        self._make_columns = columns

    def _to_objects(self) -> tuple[Span, ...]:
        return self.columns.to_spans()

    @cached_property
    def columns(self) -> SpanColumns:
        """The spans as columns."""
        return self._make_columns()

    def __len__(self) -> int:
        return len(self.columns.start)

    def __repr__(self) -> str:
        return f"<{len(self):,} spans>"


def to_columns(spans: Sequence[Span]) -> SpanColumns:
    """Return spans as columns, in seconds."""
    if isinstance(spans, Spans):
        return spans.columns
    names = {name: index for index, name in enumerate(dict.fromkeys(span.operators for span in spans))}
    codes = [
        (s.rank_class, _stream_code(s.stream), TASK_KINDS.index(s.kind), s.stage, s.microbatch, names[s.operators])
        for s in spans
    ]
    times = np.array([(span.start, span.end, span.bytes) for span in spans], np.float64)
    columns = (*np.array(codes, np.int64).reshape(-1, 6).T, *times.reshape(-1, 3).T)
    fields: dict[str, Any] = dict(zip(Span._fields, columns, strict=True))
    return SpanColumns(**fields, names=tuple(names))


def cut_columns(columns: SpanColumns, begin: int, end: int) -> SpanColumns:
    """Return the spans between two times, which are cut at both and count from ``begin``."""
    part = columns.select(np.flatnonzero((columns.end > begin) & (columns.start < end)))
    return replace(part, **{name: np.clip(getattr(part, name), begin, end) - begin for name in ("start", "end")})


def program_columns(program: Program, starts: IntArray, ends: IntArray) -> SpanColumns:
    """Return the spans of all pieces on their streams, in order of start, end and rank class.

    A piece that names a stream is shown on it, on every rank class of its task, whether the task occupies it or not.
    """
    pieces = [(piece, item) for item in program.work for piece in item.pieces]
    names = {name: index for index, name in enumerate(dict.fromkeys(piece.operators for piece, _ in pieces))}
    table = [(_stream_code(p.stream), TASK_KINDS.index(p.kind), w.stage, names[p.operators]) for p, w in pieces]
    stream_of_piece, kind, stage, operators = np.array(table, np.int64).reshape(-1, 4).T
    sizes = np.array([piece.bytes for piece, _ in pieces], np.float64)
    times = piece_times(program, starts, ends, np.arange(program.num_tasks))
    place, index = expand_rows(program.stream_start, times.task)
    stream_table = np.array([(s.rank_class, _stream_code(s.kind)) for s in program.streams], np.int64).reshape(-1, 2)
    class_of, stream_of = stream_table[program.stream_of].T
    holder = np.repeat(np.arange(program.num_tasks), np.diff(program.stream_start))
    # A piece that names its stream would else appear once for each stream of its task.
    is_first = np.zeros(len(holder), bool)
    is_first[np.unique(holder * max(len(program.rank_classes), 1) + class_of, return_index=True)[1]] = True
    piece_stream = stream_of_piece[times.piece[place]]
    visible_rows = np.flatnonzero((piece_stream < 0) | is_first[index])
    place, index, piece_stream = place[visible_rows], index[visible_rows], piece_stream[visible_rows]
    rank_class, stream = class_of[index], np.where(piece_stream < 0, stream_of[index], piece_stream)
    start, end = times.start[place], times.end[place]
    order = np.lexsort((rank_class, end, start))
    place = place[order]
    task, piece = times.task[place], times.piece[place]
    return SpanColumns(
        rank_class[order],
        stream[order],
        kind[piece],
        stage[piece],
        program.microbatch_of[task],
        operators[piece],
        start[order],
        end[order],
        sizes[piece],
        tuple(names),
        TICKS_PER_SECOND,
    )


def _stream_code(kind: StreamKind | None) -> int:
    return -1 if kind is None else STREAM_KINDS.index(kind)


class Occupancy:
    """Time in which each rank class runs at least one of some spans, by a sweep over all starts and ends."""

    # The sort is done once; every question about kinds of tasks is then one cumulative sum.
    def __init__(self, columns: SpanColumns, num_classes: int) -> None:
        count = len(columns.start)
        rank_class, times = np.tile(columns.rank_class, 2), np.concatenate([columns.start, columns.end])
        order = np.lexsort((times, rank_class))
        # The first half of the rows are starts, the second half ends.
        self._row, self._change = order % max(count, 1), np.where(order < count, 1, -1)
        self._class, self._num_classes = rank_class[order], num_classes
        self._gap = np.append(np.diff(times[order]), 0)
        self._per_second = columns.per_second

    def seconds(self, is_counted: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return for every rank class the seconds in which at least one of the spans of ``is_counted`` runs."""
        open_spans = np.cumsum(np.where(is_counted[self._row], self._change, 0))
        total = np.zeros(self._num_classes, self._gap.dtype)
        is_busy = open_spans > 0
        np.add.at(total, self._class[is_busy], self._gap[is_busy])
        return total / self._per_second
