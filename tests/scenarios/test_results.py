"""Results show themselves: as a table of a notebook, a data frame, a picture, a page or a file."""

import json
from pathlib import Path

import pytest

import meshwise as mw

RESULT = mw.load("local/dp2").simulate()


def test_spans_are_rows() -> None:
    frame = RESULT.to_pandas()
    assert len(frame) == len(RESULT.timeline.spans) and frame["end"].max() == pytest.approx(RESULT.step_time)


@pytest.mark.parametrize(("name", "begins"), [("x.html", "<!"), ("x.svg", "<?xml"), ("x.json", "{")])
def test_a_result_is_saved_by_its_ending(name: str, begins: str, tmp_path: Path) -> None:
    RESULT.save(tmp_path / name)
    text = (tmp_path / name).read_text("utf-8")
    assert text.lower().startswith(begins)
    if name.endswith("json"):
        assert json.loads(text)["step_time"] == RESULT.step_time


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    RESULT.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a name ends in .html, .png, .svg, .json, met '.pdf'"):
        RESULT.save(tmp_path / "x.pdf")


def test_trials_are_rows() -> None:
    found = mw.load("local/dp2").search(budget=3)
    frame = found.to_pandas()
    assert len(frame) == found.evaluations and found.best is not None
    assert frame.loc[frame["fits"], "step_time"].min() == found.best.evaluation.step_time
