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


def test_a_notebook_shows_what_a_search_found() -> None:
    found = mw.load("local/dp2").search(budget=3)
    text = found._repr_html_()
    assert found.best is not None and found.best.plan.describe() in text and found.end in text


def test_a_notebook_shows_what_a_run_did() -> None:
    run = mw.Run(2, (5.5, 5.4), (0.2, 0.1), 0.1, 2.0**30, RESULT.timeline, None)
    assert all(words in run._repr_html_() for words in ("100 ms", "1 GiB", "5.4", "not asked"))
    assert len(run.to_pandas()) == len(RESULT.timeline.spans)
