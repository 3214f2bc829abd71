from pathlib import Path
from typing import Any

import pytest

from meshwise.reports.palette import lightness

from .plan_matrix_picture import cell_colour, draw_plan_matrix, read_rows

HEAD = {"steps": 3, "precision": "fp64", "torch": "2", "date": "2026-11-21"}
ROWS: list[dict[str, Any]] = [
    {"techniques": ["data"], "state": "equal", "gradient": 1e-16},
    {"techniques": ["tensor"], "state": "equal", "gradient": 2e-16},
    {"techniques": ["lion"], "state": "refused", "reason": "no"},
    {"techniques": ["data", "tensor"], "state": "equal", "gradient": 3e-15},
    {"techniques": ["data", "lion"], "state": "refused", "reason": "no"},
    {"techniques": ["tensor", "lion"], "state": "left out", "reason": "16 ranks"},
    {"techniques": ["data", "tensor", "lion"], "state": "refused", "reason": "no"},
]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_rows_are_the_same_picture(suffix: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw_plan_matrix(HEAD, ROWS, tmp_path / f"{name}.{suffix}")
    pictures = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two")]
    assert pictures[0] == pictures[1]
    worse = [*ROWS[:3], ROWS[3] | {"state": "different"}, *ROWS[4:]]
    draw_plan_matrix(HEAD, worse, tmp_path / f"other.{suffix}")
    assert (tmp_path / f"other.{suffix}").read_bytes() != pictures[0]


def test_a_larger_error_is_darker_and_no_other_state_looks_like_one() -> None:
    errors = [0.0, 1e-16, 1e-15, 1e-14, 1e-12]
    shades = [lightness(str(cell_colour({"state": "equal", "gradient": error}))) for error in errors]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == len(shades)
    others = {cell_colour({"state": state}) for state in ("different", "failed", "refused", "left out")}
    equal = {cell_colour({"state": "equal", "gradient": error}) for error in errors}
    assert not others & equal
    assert cell_colour({"state": "left out"}) is None and cell_colour({}) is None


def test_no_technique_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="techniques that are alone, met none"):
        draw_plan_matrix(HEAD, ROWS[3:], tmp_path / "matrix.png")


def test_rows_come_after_their_head(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"date": "today"}\n{"techniques": ["data"]}\n')
    assert read_rows(tmp_path / "rows.jsonl") == ({"date": "today"}, [{"techniques": ["data"]}])
