from pathlib import Path

import pytest
from matplotlib.testing.compare import compare_images

from meshwise.reports.pictures.accuracy import draw_errors_by_class

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
