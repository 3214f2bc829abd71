import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.lanes import Row, labels, lanes
from meshwise.simulator.program import RankClass

CLASSES = tuple(RankClass(f"p{i}", (i, i + 8), tuple(range(4 * i, 4 * i + 4))) for i in range(8))


@given(st.integers(1, 700), st.sets(st.sampled_from(Row)), st.booleans())
def test_rows_lie_in_their_lane_and_do_not_overlap(height: int, rows: set[Row], grouped: bool):
    found = lanes(CLASSES, tuple(rows), height, grouped=grouped)
    assert found.rows[0] is Row.COMPUTE
    assert found.compute_pixels >= 0.3 * found.pixels
    for rank_class in range(8):
        lane = rank_class // found.group
        edges = [edge for row in found.rows for edge in found.extent(rank_class, row)]
        assert edges == sorted(edges)
        assert lane <= edges[0] < edges[-1] <= lane + 1


def test_strips_are_left_out_where_they_cannot_be_seen():
    rows = (Row.COMPUTE, Row.TENSOR)
    assert lanes(CLASSES, rows, 8 * 60).rows == rows
    assert lanes(CLASSES, rows, 8 * 6).rows == (Row.COMPUTE,)


@given(st.integers(1, 700), st.integers(1, 100))
def test_the_first_strips_are_drawn_and_higher_lanes_have_no_fewer(height: int, more: int):
    low, high = (lanes(CLASSES, tuple(Row), h).rows for h in (height, height + more))
    assert low == tuple(Row)[: len(low)]
    assert high[: len(low)] == low


def test_low_lanes_are_put_together_where_shares_are_drawn():
    found = lanes(CLASSES, (), 32, grouped=True)
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
    assert labels((rank_class,)) == (expected,)


def test_classes_of_the_same_stage_and_size_are_told_apart_by_their_ranks():
    classes = tuple(RankClass("x\x00", (0,), ranks) for ranks in ((0, 1), (2, 3), (4, 6)))
    assert labels(classes) == ("stage 0 (ranks 0 to 1)", "stage 0 (ranks 2 to 3)", "stage 0 (2 ranks from 4)")
