"""Bars of a timeline picture: spans merged into passes, and shares of time where bars get too thin."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.program import StreamKind, TaskKind
from simulator.timeline import Span

FloatArray = npt.NDArray[np.float64]


class Row(IntEnum):
    """Rows of a lane from top to bottom: compute is the tall one, the others are strips."""

    COMPUTE = 0
    TENSOR = 1
    EXPERT = 2
    CONTEXT = 3
    PIPELINE = 4
    DATA = 5
    HOST = 6
    LAUNCH = 7


_ROW = {
    TaskKind.TENSOR_COMMUNICATION: Row.TENSOR,
    TaskKind.EXPERT_COMMUNICATION: Row.EXPERT,
    TaskKind.CONTEXT_COMMUNICATION: Row.CONTEXT,
    TaskKind.PIPELINE_COMMUNICATION: Row.PIPELINE,
    TaskKind.DATA_COMMUNICATION: Row.DATA,
    TaskKind.HOST_COPY: Row.HOST,
    TaskKind.LAUNCH: Row.LAUNCH,
}
_PASSES = frozenset({TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.RECOMPUTE})


class Bar(NamedTuple):
    """Consecutive spans of one kind, stage and microbatch on one stream, as one bar.

    Parameters
    ----------
    start, end
        Seconds: where the first of its spans starts and the last one ends.
    busy
        Seconds that its spans take in all.
    recompute
        Those of them that are recomputation, in a backward bar that has taken it in.
    """

    rank_class: int
    row: Row
    kind: TaskKind
    stage: int
    microbatch: int
    start: float
    end: float
    busy: float
    recompute: float = 0.0


def row_of(kind: TaskKind) -> Row:
    """Return the row of a lane on which spans of ``kind`` are drawn."""
    return _ROW.get(kind, Row.COMPUTE)


class _Run(NamedTuple):
    """Spans that are being merged: what they share, and their sums as [start, end, busy, recompute]."""

    kind: TaskKind
    stage: int
    microbatch: int
    sums: list[float]


def bars(spans: Iterable[Span], *, gap: float = 0.0, absorb: bool = False) -> tuple[Bar, ...]:
    """Return ``spans`` merged into bars, in order of rank class, row, stream and start.

    Spans of one pass (forward or backward of a microbatch) are merged whatever lies between
    them, all others where no more than ``gap`` seconds do.

    Parameters
    ----------
    spans
        In order of start on every stream.
    absorb
        Whether recomputation becomes a part of the backward bar around it.
    """
    streams: dict[tuple[int, StreamKind, bool], list[_Run]] = {}
    for rank_class, stream, kind, stage, microbatch, _, start, end, _ in spans:
        runs = streams.setdefault((rank_class, stream, kind in _ROW), [])
        recompute = 0.0
        if absorb and kind is TaskKind.RECOMPUTE:
            kind, recompute = TaskKind.BACKWARD, end - start
        last = runs[-1] if runs else None
        if last and last[:3] == (kind, stage, microbatch) and (_is_pass(last) or start - last.sums[1] <= gap):
            sums = last.sums
            sums[1] = max(sums[1], end)
            sums[2] += end - start
            sums[3] += recompute
        else:
            runs.append(_Run(kind, stage, microbatch, [start, end, end - start, recompute]))
    order = sorted(streams, key=lambda key: (key[0], key[2], key[1]))
    found = (Bar(key[0], row_of(run.kind), *run[:3], *run.sums) for key in order for run in streams[key])
    return tuple(sorted(found, key=itemgetter(0, 1)))


def _is_pass(run: _Run) -> bool:
    return run.kind in _PASSES and run.microbatch >= 0


def shares(intervals: Sequence[tuple[float, float]], edges: FloatArray) -> FloatArray:
    """Return the fraction of each cell between two ``edges`` that ``intervals`` cover.

    >>> shares([(0.0, 1.0), (3.0, 4.0)], np.array([0.0, 2.0, 4.0])).tolist()
    [0.5, 0.5]
    """
    if not intervals:
        return np.zeros(len(edges) - 1)
    starts, ends = _disjoint(np.array(sorted(intervals)))
    moments = np.stack([starts, ends], axis=1).ravel()
    covered = np.concatenate([[0.0], np.repeat(np.cumsum(ends - starts), 2)[:-1]])
    return np.asarray(np.diff(np.interp(edges, moments, covered)) / np.diff(edges))


def _disjoint(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return starts and ends of the union of intervals that are sorted by start."""
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return rows[first, 0], reach[last]
