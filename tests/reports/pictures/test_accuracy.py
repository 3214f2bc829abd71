"""Pictures of accuracy: every run, and classes of runs."""

from pathlib import Path

import pytest
from matplotlib.testing.compare import compare_images

from meshwise.reports.pictures.accuracy import (
    AccuracyRow,
    choose_style,
    draw_accuracy,
    draw_errors_by_class,
    summarize_errors,
)

ROWS = [
    AccuracyRow("a-1", "paper a", "GPT-175B", 10.9, 10.0),
    AccuracyRow("a-2", "paper a", "GPT-1T", 80.0, 100.0),
    AccuracyRow("b-1", "b $^{</x>", "$\\frac", 1.0, 1.0),
]


def test_the_facts_are_those_of_a_hand_calculation():
    expected = (
        "3 rows: mean absolute error 9.7%, median 9.0%, largest 20.0%, bias -3.7%; within 10 %: 67%, within 30 %: 100%"
    )
    assert summarize_errors(ROWS) == expected


@pytest.mark.parametrize("rows", [ROWS, ROWS * 40, ROWS[2:]])
def test_rows_are_drawn_few_or_many(tmp_path: Path, rows: list[AccuracyRow]):
    draw_accuracy(rows, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_the_same_rows_give_the_same_svg(tmp_path: Path):
    for name in "ab":
        draw_accuracy(ROWS, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_rows_without_a_prediction_are_left_out_and_none_at_all_is_refused(tmp_path: Path):
    missing = AccuracyRow("c", "c", "m", float("nan"), 1.0)
    draw_accuracy([*ROWS, missing], tmp_path / "x.png")
    with pytest.raises(ValueError, match="at least one row, met 1 rows"):
        draw_accuracy([missing], tmp_path / "y.png")


def test_sources_have_marks_of_their_own():
    sources = [f"s{i}" for i in range(64)]
    assert len({choose_style(source, sources) for source in sources}) == 64


CLASSES = {"8-63 devices": [0.1, -0.2, 3.0], "b $^{</x>": [0.0], "empty": [], "not a number": [float("nan")]}


def test_classes_with_errors_are_drawn(tmp_path: Path) -> None:
    draw_errors_by_class(CLASSES, tmp_path / "classes.png", title="Error by size")
    assert (tmp_path / "classes.png").stat().st_size > 10_000


def test_the_same_errors_give_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    for name, errors in (("a", [0.1, 0.2]), ("b", [0.1, 0.2]), ("c", [0.1, 0.3])):
        draw_errors_by_class({"tp": errors}, tmp_path / f"{name}.png", title="Error")
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c
    assert compare_images(str(tmp_path / "a.png"), str(tmp_path / "b.png"), tol=0) is None


def test_no_errors_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a class with one, met 1 classes"):
        draw_errors_by_class({"tp": []}, tmp_path / "x.png", title="Error")
