from pathlib import Path

import pytest

from meshwise.reports.pictures.search import draw_search, trials_table
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.plan import Plan, Recompute, Stage

INFINITE = float("inf")
HISTORIES = {
    "best_first": [(1, 0.1, INFINITE), (2, 0.2, 0.9), (40, 3.0, 0.5)],
    "</svg>$[bold]\x00": [(1, 0.1, 2.0), (500, 60.0, 0.6)],
    "hopeless": [(1, 0.1, INFINITE)],
}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_histories_are_drawn_and_the_same_ones_give_the_same_bytes(tmp_path: Path, suffix: str):
    for name in "ab":
        draw_search(HISTORIES, tmp_path / f"{name}{suffix}", lower_bound=0.45)
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second
    assert len(first) > 5000


def test_it_draws_where_nothing_fits(tmp_path: Path):
    draw_search({"hopeless": [(1, 0.1, INFINITE)], "idle": []}, tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 3000


def test_no_history_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one algorithm"):
        draw_search({}, tmp_path / "x.png")


def test_a_table_of_trials_has_a_row_a_trial():
    mesh = Mesh((Axis("pipeline", 2), Axis("data", 4), Axis("tensor", 8)))
    plan = Plan(mesh, (Stage(("a",)), Stage(("b",))), (), "1f1b", 1, 1, 16, 1, True, Recompute.FULL, True)
    table = trials_table([Trial(plan, Evaluation(1.5, 2.0**30, True), 0.25)] * 3)
    assert len(table) == 3
    row = table.iloc[0]
    assert (row["data"], row["tensor"], row["pipeline"], row["recompute"]) == (4, 8, 2, "full")
    assert (row["step_time"], row["peak_memory"], bool(row["fits"]), row["elapsed"]) == (1.5, 2.0**30, True, 0.25)
    assert list(trials_table([]).columns) == list(table.columns)
