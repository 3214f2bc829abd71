"""Measured curves of collectives: straight between points, the first time below them, the last rate above."""

import pytest

from meshwise.simulator.collective import Collective, CollectiveCurve

CURVE = CollectiveCurve(Collective.ALL_REDUCE, 4, ((100.0, 2.0), (200.0, 3.0), (400.0, 9.0)))


@pytest.mark.parametrize(
    ("size", "seconds"),
    # 150 is half way from 2 to 3, 300 from 3 to 9; above 400 bytes the rate is (9 - 3) / 200 s a byte
    [(1.0, 2.0), (100.0, 2.0), (150.0, 2.5), (200.0, 3.0), (300.0, 6.0), (400.0, 9.0), (500.0, 12.0)],
)
def test_a_curve_is_straight_between_its_points(size: float, seconds: float) -> None:
    assert CURVE.time(size) == pytest.approx(seconds)


def test_one_point_says_a_rate_and_a_falling_end_no_negative_one() -> None:
    assert CollectiveCurve(Collective.SEND, 2, ((100.0, 2.0),)).time(300.0) == pytest.approx(6.0)
    assert CollectiveCurve(Collective.SEND, 2, ((100.0, 2.0), (200.0, 1.0))).time(300.0) == 1.0


@pytest.mark.parametrize(
    "points", [(), ((1.0, 1.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),), ((0.0, 1.0),)]
)
def test_points_out_of_order_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="all_reduce over 4 ranks: sizes rise and times are positive"):
        CollectiveCurve(Collective.ALL_REDUCE, 4, points)
