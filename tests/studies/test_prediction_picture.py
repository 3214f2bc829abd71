"""Predictions beside measurements are drawn and written as the rows say."""

import json
from pathlib import Path
from typing import Any

import pytest

from .prediction_picture import (
    classify_plan,
    draw_predictions,
    read_files,
    summarize_errors,
    write_page,
)

HEAD = {"ranks": 2, "machine": "Linux, 2 cores", "torch": "2", "python": "3", "date": "2026-11-21", "steps": 20}


def row(plan: str, predicted: float, measured: float) -> dict[str, Any]:
    times = {"predicted_step_time": predicted, "measured_step_time": measured, "time_error": predicted / measured - 1}
    return {"plan": plan, **times, "memory_error": 0.01, "tracked_memory_error": 0.0, "before": 1.0, "after": 1.1}


ROWS = [
    row("data 2 x tensor 1 x pipeline 1, 1 microbatch of 8", 0.09, 0.1),
    row("data 1 x tensor 2 x pipeline 1, 1 microbatch of 16", 0.2, 0.2),
    row("data 1 x tensor 1 x pipeline 2, gpipe, 4 microbatches of 4", 0.27, 0.18),
]


def test_a_summary_is_of_absolute_errors_and_the_order() -> None:
    # errors -10 %, 0 and +50 %; of three pairs two are in order
    assert summarize_errors(ROWS) == "3 plans: median 10.0%, worst 50.0%, tau 0.33"


def test_a_plan_is_of_the_axis_that_it_uses_alone() -> None:
    assert [classify_plan(each["plan"]) for each in ROWS] == ["data parallel", "tensor parallel", "pipeline parallel"]
    assert classify_plan("data 2 x tensor 1 x pipeline 2, 1f1b") == "several of them"


def test_the_same_rows_are_the_same_picture_and_others_another(tmp_path: Path) -> None:
    files = [(HEAD, ROWS), ({**HEAD, "ranks": 4}, ROWS)]
    for name in ("one", "two"):
        draw_predictions(files, tmp_path / f"{name}.svg")
    draw_predictions([(HEAD, ROWS[:2])], tmp_path / "other.svg")
    one, two, other = ((tmp_path / f"{name}.svg").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other


def test_no_rows_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs rows, met none"):
        draw_predictions([(HEAD, [])], tmp_path / "none.png")


def test_files_are_read_by_their_ranks_and_every_row_is_on_the_page(tmp_path: Path) -> None:
    for ranks in (8, 2):
        lines = [{**HEAD, "ranks": ranks}, *ROWS]
        (tmp_path / f"predictions-{ranks}-ranks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    files = read_files(tmp_path)
    assert [head["ranks"] for head, _ in files] == [2, 8]
    text = write_page(files)
    assert text.count("| data 2 x tensor 1 x pipeline 1, 1 microbatch of 8 | 90.0 ms | 100.0 ms | -10.0% |") == 2
