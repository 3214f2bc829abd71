"""Lanes of a timeline, one per rank class; bars, which are spans merged into passes; hosts whose memory a step uses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.reports.document import clean_text
from meshwise.simulator.brief import brief_repr
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


def lane_row(kind: TaskKind) -> Row:
    """Return the row of a lane on which spans of ``kind`` are drawn."""
    return _ROW.get(kind, Row.COMPUTE)


class _MergedSpans(NamedTuple):
    """Spans that are being merged: their common fields, and ``sums`` as [start, end, busy, recompute]."""

    kind: TaskKind
    stage: int
    microbatch: int
    sums: list[float]


def merge_bars(spans: Iterable[Span], *, gap: float = 0.0, absorb: bool = False) -> tuple[Bar, ...]:
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
    streams: dict[tuple[int, StreamKind, bool], list[_MergedSpans]] = {}
    for rank_class, stream, kind, stage, microbatch, _, start, end, _ in spans:
        stream_spans = streams.setdefault((rank_class, stream, kind in _ROW), [])
        recompute = 0.0
        if absorb and kind is TaskKind.RECOMPUTE:
            kind, recompute = TaskKind.BACKWARD, end - start
        previous = stream_spans[-1] if stream_spans else None
        if (
            previous
            and previous[:3] == (kind, stage, microbatch)
            and (_is_pass(previous) or start - previous.sums[1] <= gap)
        ):
            sums = previous.sums
            sums[1] = max(sums[1], end)
            sums[2] += end - start
            sums[3] += recompute
        else:
            stream_spans.append(_MergedSpans(kind, stage, microbatch, [start, end, end - start, recompute]))
    stream_keys = sorted(streams, key=lambda key: (key[0], key[2], key[1]))
    merged_bars = (
        Bar(key[0], lane_row(merged.kind), *merged[:3], *merged.sums) for key in stream_keys for merged in streams[key]
    )
    return tuple(sorted(merged_bars, key=itemgetter(0, 1)))


def _is_pass(merged: _MergedSpans) -> bool:
    return merged.kind in _PASSES and merged.microbatch >= 0


def cover_shares(intervals: Sequence[tuple[float, float]], edges: FloatArray) -> FloatArray:
    """Return the fraction of each cell between two ``edges`` that ``intervals`` cover.

    >>> cover_shares([(0.0, 1.0), (3.0, 4.0)], np.array([0.0, 2.0, 4.0])).tolist()
    [0.5, 0.5]
    """
    if not intervals:
        return np.zeros(len(edges) - 1)
    starts, ends = _merge_intervals(np.array(sorted(intervals)))
    # the covered time up to any moment is piecewise linear, so that one interpolation serves all cells
    moments = np.stack([starts, ends], axis=1).ravel()
    covered = np.concatenate([[0.0], np.repeat(np.cumsum(ends - starts), 2)[:-1]])
    return np.asarray(np.diff(np.interp(edges, moments, covered)) / np.diff(edges))


def _merge_intervals(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return starts and ends of the union of intervals that are sorted by start."""
    # an interval starts a new piece of the union where it begins after all earlier ones have ended
    reach = np.maximum.accumulate(rows[:, 1])
    is_first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    return rows[is_first, 0], reach[is_last]


_STRIP, _STRIPS = 0.14, 0.5  # of a lane: one strip, and all with the gaps between them
_MAX_STRIP, _MIN_STRIP = 14, 3  # pixels
_MIN_GROUP_PIXELS = 14  # pixels of a lane in which shares of time can be told apart


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

    __repr__ = brief_repr()

    def extent(self, rank_class: int, row: Row) -> tuple[float, float]:
        """Return top and bottom of a row of the lane of ``rank_class``."""
        lane = rank_class // self.group
        compute = self.compute_pixels
        if row is Row.COMPUTE:
            return lane, lane + compute / self.pixels
        strip = _strip_height(self.pixels, len(self.rows) - 1)
        top = compute + 1 + (self.rows.index(row) - 1) * (strip + 1)
        return lane + top / self.pixels, lane + (top + strip) / self.pixels

    @property
    def compute_pixels(self) -> int:
        """Height of a compute row, in pixels."""
        margin = 0 if self.pixels < 4 else max(1, self.pixels // 8)
        strips = len(self.rows) - 1
        return self.pixels - margin - strips * (_strip_height(self.pixels, strips) + 1)


def arrange_lanes(classes: Sequence[RankClass], rows: Sequence[Row], height: int, *, grouped: bool = False) -> Lanes:
    """Return the lanes of ``classes`` on at most ``height`` pixels.

    Strips are dropped from the bottom until the remaining ones are visible; with ``grouped``, lanes that would be too
    low are combined.
    """
    pixels = max(1, height // len(classes))
    group = -(-_MIN_GROUP_PIXELS // pixels) if grouped and pixels < _MIN_GROUP_PIXELS // 2 else 1
    count = -(-len(classes) // group)
    pixels = max(1, height // count)
    strips = sorted(set(rows) - {Row.COMPUTE})
    while strips and _strip_height(pixels, len(strips)) < _MIN_STRIP:
        strips.pop()
    names = lane_labels(classes) if group == 1 else _group_labels(classes, group)
    return Lanes(names, (Row.COMPUTE, *strips), pixels, group)


def _strip_height(pixels: int, strips: int) -> int:
    """Return the height of each of ``strips`` strips of a lane, in pixels."""
    return min(_MAX_STRIP, int(_STRIP * pixels), int(_STRIPS * pixels / max(strips, 1)) - 1)


def lane_labels(classes: Sequence[RankClass]) -> tuple[str, ...]:
    """Return the labels of lanes: stages and number of ranks, or the ranks themselves where that is ambiguous.

    >>> lane_labels((RankClass("a", (0, 8), tuple(range(192))), RankClass("b", (1, 9), (192,))))
    ('stages 0, 8 (192 ranks)', 'stages 1, 9 (rank 192)')
    >>> lane_labels((RankClass("a", (0,), (0, 1)), RankClass("b", (0,), (2, 3)), RankClass("c", (0,), (4, 6))))
    ('stage 0 (ranks 0 to 1)', 'stage 0 (ranks 2 to 3)', 'stage 0 (2 ranks from 4)')
    """
    count_labels = [_format_label(rank_class, _rank_count_text(rank_class)) for rank_class in classes]
    label_counts = Counter(count_labels)
    return tuple(
        _format_label(rank_class, _rank_range_text(rank_class)) if label_counts[name] > 1 else name
        for rank_class, name in zip(classes, count_labels, strict=True)
    )


def _format_label(rank_class: RankClass, ranks_text: str) -> str:
    stages = rank_class.stages
    numbers = ", ".join(map(str, stages if len(stages) <= 3 else (stages[0], "…", stages[-1])))
    return f"{'stage' if len(stages) == 1 else 'stages'} {numbers} ({ranks_text})" if stages else ranks_text


def _rank_count_text(rank_class: RankClass) -> str:
    ranks = rank_class.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks):,} ranks"


def _rank_range_text(rank_class: RankClass) -> str:
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
        f"stages {part[0].stages[0]} to {part[-1].stages[0]}" if part[0].stages else clean_text(part[0].name, 20)
        for part in parts
    )


def used_hosts(timeline: Timeline) -> dict[str, MemoryProfile]:
    """Return the memory profile of every host whose memory is used, by label."""
    if not timeline.hosts:
        return {}
    return {_host_label(timeline, profile.rank_class): profile for profile in timeline.host_memory if profile.peak > 0}


def _host_label(timeline: Timeline, host: int) -> str:
    """Return the label of a host: its name and its number of ranks.

    >>> from meshwise.simulator.program import HostClass
    >>> host = HostClass("host 0", 1e12, ((0, 1), (1, 7)))
    >>> _host_label(Timeline("simulated", (), (), (), 0.0, "x", hosts=(host,)), 0)
    'host 0 (8 ranks)'
    """
    ranks = sum(num_ranks for _, num_ranks in timeline.hosts[host].members)
    return f"{timeline.hosts[host].name} ({ranks} {'rank' if ranks == 1 else 'ranks'})"
