"""Lanes of a timeline, one per rank class; bars, which are spans merged into passes; hosts whose memory a step uses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.reports.document import plain
from meshwise.simulator.brief import brief
from meshwise.simulator.memory import MemoryProfile
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

FloatArray = npt.NDArray[np.float64]


class Row(IntEnum):
    """Rows of a lane from top to bottom: compute is the tall row, the others are strips."""

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
        Start of its first span and end of its last, in s.
    busy
        Total duration of its spans, in s.
    recompute
        Part of ``busy`` that is recomputation, in a backward bar that absorbed it.
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
    """Spans that are being merged: their common fields, and ``sums`` as [start, end, busy, recompute]."""

    kind: TaskKind
    stage: int
    microbatch: int
    sums: list[float]


def bars(spans: Iterable[Span], *, gap: float = 0.0, absorb: bool = False) -> tuple[Bar, ...]:
    """Return ``spans`` merged into bars, in order of rank class, row, stream and start.

    Spans of one pass (forward or backward of a microbatch) are merged whatever the gap between them, other spans
    only across gaps of at most ``gap`` seconds.

    Parameters
    ----------
    spans
        In order of start on every stream.
    absorb
        Whether recomputation becomes part of the backward bar around it.
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
    # the covered time up to any moment is piecewise linear, so that one interpolation serves all cells
    moments = np.stack([starts, ends], axis=1).ravel()
    covered = np.concatenate([[0.0], np.repeat(np.cumsum(ends - starts), 2)[:-1]])
    return np.asarray(np.diff(np.interp(edges, moments, covered)) / np.diff(edges))


def _disjoint(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return starts and ends of the union of intervals that are sorted by start."""
    # an interval starts a new piece of the union where it begins after all earlier ones have ended
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return rows[first, 0], reach[last]


_STRIP, _STRIPS = 0.14, 0.5  # of a lane: one strip, and all with the gaps between them
_MOST_STRIP, _LEAST_STRIP = 14, 3  # pixels
_LEAST_GROUP = 14  # pixels of a lane in which shares of time can be told apart


@dataclass(frozen=True, slots=True)
class Lanes:
    """Geometry of the lanes: lane i reaches from y = i down to y = i + 1.

    Parameters
    ----------
    labels
        Names of the lanes, from the top.
    rows
        Rows that are drawn, compute first.
    pixels
        Height of a lane in pixels.
    group
        Number of rank classes that share a lane.
    """

    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    pixels: int
    group: int = 1

    __repr__ = brief()

    def extent(self, rank_class: int, row: Row) -> tuple[float, float]:
        """Return top and bottom of a row of the lane of ``rank_class``."""
        lane = rank_class // self.group
        compute = self.compute_pixels
        if row is Row.COMPUTE:
            return lane, lane + compute / self.pixels
        strip = _strip(self.pixels, len(self.rows) - 1)
        top = compute + 1 + (self.rows.index(row) - 1) * (strip + 1)
        return lane + top / self.pixels, lane + (top + strip) / self.pixels

    @property
    def compute_pixels(self) -> int:
        """Height of a compute row, in pixels."""
        margin = 0 if self.pixels < 4 else max(1, self.pixels // 8)
        strips = len(self.rows) - 1
        return self.pixels - margin - strips * (_strip(self.pixels, strips) + 1)


def lanes(classes: Sequence[RankClass], rows: Sequence[Row], height: int, *, grouped: bool = False) -> Lanes:
    """Return the lanes of ``classes`` on at most ``height`` pixels.

    Strips are dropped from the bottom until the remaining ones are visible; with ``grouped``, lanes that would be too
    low are combined.
    """
    pixels = max(1, height // len(classes))
    group = -(-_LEAST_GROUP // pixels) if grouped and pixels < _LEAST_GROUP // 2 else 1
    count = -(-len(classes) // group)
    pixels = max(1, height // count)
    strips = sorted(set(rows) - {Row.COMPUTE})
    while strips and _strip(pixels, len(strips)) < _LEAST_STRIP:
        strips.pop()
    names = labels(classes) if group == 1 else _group_labels(classes, group)
    return Lanes(names, (Row.COMPUTE, *strips), pixels, group)


def _strip(pixels: int, strips: int) -> int:
    """Return the height of each of ``strips`` strips of a lane, in pixels."""
    return min(_MOST_STRIP, int(_STRIP * pixels), int(_STRIPS * pixels / max(strips, 1)) - 1)


def labels(classes: Sequence[RankClass]) -> tuple[str, ...]:
    """Return the labels of lanes: stages and number of ranks, or the ranks themselves where that is ambiguous.

    >>> labels((RankClass("a", (0, 8), tuple(range(192))), RankClass("b", (1, 9), (192,))))
    ('stages 0, 8 (192 ranks)', 'stages 1, 9 (rank 192)')
    >>> labels((RankClass("a", (0,), (0, 1)), RankClass("b", (0,), (2, 3)), RankClass("c", (0,), (4, 6))))
    ('stage 0 (ranks 0 to 1)', 'stage 0 (ranks 2 to 3)', 'stage 0 (2 ranks from 4)')
    """
    counted = [_label(c, _number(c)) for c in classes]
    alike = Counter(counted)
    return tuple(_label(c, _which(c)) if alike[name] > 1 else name for c, name in zip(classes, counted, strict=True))


def _label(rank_class: RankClass, who: str) -> str:
    stages = rank_class.stages
    numbers = ", ".join(map(str, stages if len(stages) <= 3 else (stages[0], "…", stages[-1])))
    return f"{'stage' if len(stages) == 1 else 'stages'} {numbers} ({who})" if stages else who


def _number(rank_class: RankClass) -> str:
    ranks = rank_class.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks):,} ranks"


def _which(rank_class: RankClass) -> str:
    """Return the ranks of a class as text: a range where they are consecutive, else their number and the first."""
    ranks = rank_class.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks):,} ranks from {ranks[0]}"


def _group_labels(classes: Sequence[RankClass], group: int) -> tuple[str, ...]:
    """Return the labels of lanes of ``group`` rank classes each."""
    parts = (classes[i : i + group] for i in range(0, len(classes), group))
    return tuple(
        f"stages {p[0].stages[0]} to {p[-1].stages[0]}" if p[0].stages else plain(p[0].name, 20) for p in parts
    )


def used_hosts(timeline: Timeline) -> dict[str, MemoryProfile]:
    """Return the memory profile of every host whose memory is used, by label."""
    if not timeline.hosts:
        return {}
    return {_name(timeline, profile.rank_class): profile for profile in timeline.host_memory if profile.peak > 0}


def _name(timeline: Timeline, host: int) -> str:
    """Return the label of a host: its name and its number of ranks.

    >>> from meshwise.simulator.program import HostClass
    >>> _name(Timeline("simulated", (), (), (), 0.0, "x", hosts=(HostClass("host 0", 1e12, ((0, 1), (1, 7))),)), 0)
    'host 0 (8 ranks)'
    """
    ranks = sum(number for _, number in timeline.hosts[host].members)
    return f"{timeline.hosts[host].name} ({ranks} {'rank' if ranks == 1 else 'ranks'})"
