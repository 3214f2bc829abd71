from pathlib import Path

import pytest

from .interval_picture import IntervalRow, draw_intervals

ROWS = [IntervalRow(0.5, 1.2), IntervalRow(1.0, 1.2), IntervalRow(1.19, 1.2), IntervalRow(2.0, 1.9)]


def test_an_interval_is_as_wide_to_both_sides_in_logarithms() -> None:
    assert [row.inside for row in ROWS] == [False, True, True, False]
    assert IntervalRow(1 / 1.2, 1.2).inside and not IntervalRow(0.8, 1.2).inside  # 1 / 1.2 = 0.833


def test_classes_with_runs_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    classes = {"a": ROWS, "b $^{</x>": ROWS[:1], "empty": []}
    for name in ("x", "y"):
        draw_intervals(classes, tmp_path / f"{name}.svg", title="Intervals", facts="$\\frac")
    drawn = (tmp_path / "x.svg").read_bytes()
    assert drawn == (tmp_path / "y.svg").read_bytes()
    draw_intervals({"a": ROWS[1:]}, tmp_path / "z.svg", title="Intervals", facts="")
    assert drawn != (tmp_path / "z.svg").read_bytes()


def test_no_runs_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a class with a run, met 1 classes"):
        draw_intervals({"a": [IntervalRow(float("nan"), 1.2)]}, tmp_path / "x.png", title="", facts="")
