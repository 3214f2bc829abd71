"""The bars of a waterfall lead from the predicted step to the measured one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reports.difference import difference
from reports.timeline import draw_comparison
from reports.waterfall import MOST, bars
from simulator.timeline import Timeline


def test_bars_add_up_to_the_error_and_the_small_ones_share_one(step: Callable[..., Timeline]) -> None:
    found = difference(step(), step(forward=0.012, backward=0.021, optimizer=0.02, source="measured"))
    shown = bars(found)
    assert found.error > 0
    assert sum(cost for *_, cost in shown) == pytest.approx(found.error)
    assert len(shown) <= MOST + 1
    rest = len([row for row in found.operations() if row.cost]) - MOST
    assert (shown[-1][1] == f"{rest} others") is (rest > 0)


def test_equal_steps_have_no_bars_and_are_drawn(step: Callable[..., Timeline], tmp_path: Path) -> None:
    assert bars(difference(step(), step())) == []
    draw_comparison(step(), step(source="measured"), tmp_path / "same.png")
    assert (tmp_path / "same.png").stat().st_size > 5000
