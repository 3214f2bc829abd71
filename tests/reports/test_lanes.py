"""The lanes of a picture, and the bars in them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.lanes import Row, arrange_lanes, cover_shares, lane_labels, merge_bars
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span

CLASSES = tuple(RankClass(f"p{i}", (i, i + 8), tuple(range(4 * i, 4 * i + 4))) for i in range(8))


@given(st.integers(1, 700), st.sets(st.sampled_from(Row)), st.booleans())
def test_rows_lie_in_their_lane_and_do_not_overlap(height: int, rows: set[Row], grouped: bool):
    found = arrange_lanes(CLASSES, tuple(rows), height, grouped=grouped)
    assert found.rows[0] is Row.COMPUTE
    assert found.compute_pixels >= 0.3 * found.pixels
    for rank_class in range(8):
        lane = rank_class // found.group
        edges = [edge for row in found.rows for edge in found.extent(rank_class, row)]
        assert edges == sorted(edges)
        assert lane <= edges[0] < edges[-1] <= lane + 1


def test_strips_are_left_out_where_they_cannot_be_seen():
    rows = (Row.COMPUTE, Row.TENSOR)
    assert arrange_lanes(CLASSES, rows, 8 * 60).rows == rows
    assert arrange_lanes(CLASSES, rows, 8 * 6).rows == (Row.COMPUTE,)


@given(st.integers(1, 700), st.integers(1, 100))
def test_the_first_strips_are_drawn_and_higher_lanes_have_no_fewer(height: int, more: int):
    low, high = (arrange_lanes(CLASSES, tuple(Row), h).rows for h in (height, height + more))
    assert low == tuple(Row)[: len(low)]
    assert high[: len(low)] == low


def test_low_lanes_are_put_together_where_shares_are_drawn():
    found = arrange_lanes(CLASSES, (), 32, grouped=True)
    assert found.group == 4
    assert found.labels == ("stages 0 to 3", "stages 4 to 7")


@pytest.mark.parametrize(
    ("rank_class", "expected"),
    [
        (RankClass("a", (3,), (7,)), "stage 3 (rank 7)"),
        (RankClass("a", (0, 8), tuple(range(192))), "stages 0, 8 (192 ranks)"),
        (RankClass("a", (0, 2, 4, 6), (0, 1)), "stages 0, …, 6 (2 ranks)"),
        (RankClass("a", (), (5,)), "rank 5"),
    ],
)
def test_a_lane_is_called_by_its_stages_and_ranks(rank_class: RankClass, expected: str):
    assert lane_labels((rank_class,)) == (expected,)


def test_classes_of_the_same_stage_and_size_are_told_apart_by_their_ranks():
    classes = tuple(RankClass("x\x00", (0,), ranks) for ranks in ((0, 1), (2, 3), (4, 6)))
    assert lane_labels(classes) == ("stage 0 (ranks 0 to 1)", "stage 0 (ranks 2 to 3)", "stage 0 (2 ranks from 4)")


def span(kind: TaskKind, microbatch: int, start: float, end: float, stream=StreamKind.COMPUTE, rank_class=0, stage=0):
    return Span(rank_class, stream, kind, stage, microbatch, "x", start, end)


KINDS = st.sampled_from([TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE, TaskKind.TENSOR_COMMUNICATION])


@st.composite
def span_lists(draw) -> list[Span]:
    """In-order spans on one stream of two rank classes, whole numbers of seconds."""
    clocks, result = [0, 0], []
    for _ in range(draw(st.integers(0, 30))):
        who, gap, length = draw(st.integers(0, 1)), draw(st.integers(0, 3)), draw(st.integers(1, 4))
        start = clocks[who] + gap
        clocks[who] = start + length
        result.append(span(draw(KINDS), draw(st.integers(0, 2)), start, clocks[who], rank_class=who))
    return sorted(result, key=lambda s: s.start)


def test_operators_of_a_pass_become_one_bar_over_its_extent_with_the_busy_time_of_its_spans():
    spans = [
        span(TaskKind.FORWARD, 3, 0.0, 1.0),
        span(TaskKind.FORWARD, 3, 1.5, 2.5),
        span(TaskKind.FORWARD, 4, 2.5, 3.0),
    ]
    first, second = merge_bars(spans)
    assert (first.start, first.end, first.busy, first.microbatch) == (0.0, 2.5, 2.0, 3)
    assert (second.start, second.end, second.busy, second.microbatch) == (2.5, 3.0, 0.5, 4)


def test_tensor_communication_on_a_compute_stream_goes_to_its_strip_and_does_not_cut_the_pass():
    spans = [
        span(TaskKind.FORWARD, 0, 0.0, 1.0),
        span(TaskKind.TENSOR_COMMUNICATION, 0, 1.0, 2.0),
        span(TaskKind.FORWARD, 0, 2.0, 3.0),
    ]
    compute, tensor = merge_bars(spans)
    assert (compute.row, compute.start, compute.end, compute.busy) == (Row.COMPUTE, 0.0, 3.0, 2.0)
    assert (tensor.row, tensor.start, tensor.end) == (Row.TENSOR, 1.0, 2.0)


@pytest.mark.parametrize(("kind", "row"), [(TaskKind.HOST_COPY, Row.HOST), (TaskKind.LAUNCH, Row.LAUNCH)])
def test_what_the_host_does_goes_to_a_strip_and_does_not_cut_the_pass(kind: TaskKind, row: Row):
    spans = [span(TaskKind.FORWARD, 0, 0.0, 1.0), span(kind, 0, 1.0, 2.0), span(TaskKind.FORWARD, 0, 2.0, 3.0)]
    compute, host = merge_bars(spans)
    assert (compute.row, compute.start, compute.end) == (Row.COMPUTE, 0.0, 3.0)
    assert (host.row, host.start, host.end) == (row, 1.0, 2.0)


def test_recomputation_cuts_a_backward_bar_or_is_absorbed_into_it():
    kinds = [TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD]
    spans = [span(kind, 0, i, i + 1) for i, kind in enumerate(kinds)]
    assert [bar.kind for bar in merge_bars(spans)] == kinds
    (whole,) = merge_bars(spans, absorb=True)
    assert (whole.kind, whole.start, whole.end, whole.busy, whole.recompute) == (TaskKind.BACKWARD, 0, 4, 4, 2)


@pytest.mark.parametrize(("gap", "count"), [(0.0, 2), (0.5, 1)])
def test_what_belongs_to_no_microbatch_is_merged_only_over_small_gaps(gap: float, count: int):
    spans = [span(TaskKind.DATA_COMMUNICATION, -1, s, s + 1, StreamKind.DATA) for s in (0.0, 1.5)]
    assert len(merge_bars(spans, gap=gap)) == count


@given(span_lists(), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_merged_bars_keep_the_busy_time_of_every_rank_class_and_row(spans: list[Span], absorb: bool, gap: float):
    found = merge_bars(spans, absorb=absorb, gap=gap)
    for who in (0, 1):
        for communicates in (False, True):
            expected = sum(s.duration for s in spans if s.rank_class == who and s.kind.communicates is communicates)
            assert expected == sum(
                b.busy for b in found if b.rank_class == who and (b.row is not Row.COMPUTE) is communicates
            )


@given(span_lists(), st.booleans())
def test_bars_cover_every_span_and_begin_and_end_with_one(spans: list[Span], absorb: bool):
    found = merge_bars(spans, absorb=absorb)
    for s in spans:
        assert any(
            b.start <= s.start and s.end <= b.end and b.microbatch == s.microbatch
            for b in found
            if b.rank_class == s.rank_class
        )
    assert {b.start for b in found} <= {s.start for s in spans}
    assert {b.end for b in found} <= {s.end for s in spans}


@given(span_lists())
def test_compute_bars_of_one_rank_class_do_not_overlap(spans: list[Span]):
    found = merge_bars(spans, absorb=True)
    for who in (0, 1):
        row = [b for b in found if b.rank_class == who and b.row is Row.COMPUTE]
        assert all(a.end <= b.start for a, b in pairwise(row))


def test_a_real_schedule_gives_one_bar_a_pass(step):
    timeline = step("interleaved", 4, 8, 2, recompute=0.004, layers=3, tensor=True)
    compute = [b for b in merge_bars(timeline.spans, absorb=True) if b.row is Row.COMPUTE]
    assert len(compute) == 4 * (8 * 2 * 2 + 1)  # forwards and backwards of two chunks, and the optimizer


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12), st.integers(1, 9))
def test_shares_add_to_the_length_of_the_union(rows: list[tuple[int, int]], cells: int):
    edges = np.linspace(0.0, 50.0, cells + 1)
    covered = {second for start, length in rows for second in range(start, start + length)}
    assert (cover_shares([(s, s + n) for s, n in rows], edges) * np.diff(edges)).sum() == pytest.approx(len(covered))
