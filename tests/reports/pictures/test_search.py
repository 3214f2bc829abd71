"""Pictures and tables of one search, and of many."""

from pathlib import Path

import pytest

from meshwise.reports.pictures.search import (
    MAX_ALGORITHMS,
    _gap_quartiles,
    _read_gaps,
    _solved_shares,
    draw_cases,
    draw_gaps,
    draw_search,
    draw_solved,
    trials_table,
)
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute

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
    plan = Plan(
        mesh=mesh,
        stages=(Stage(("a",)), Stage(("b",))),
        shardings=(),
        num_microbatches=16,
        zero=1,
        sequence_parallel=True,
        recompute=Recompute.FULL,
        attention=None,
    )
    table = trials_table([Trial(plan, Evaluation(1.5, 2.0**30, True), 0.25)] * 3)
    assert len(table) == 3
    row = table.iloc[0]
    assert (row["data"], row["tensor"], row["pipeline"], row["recompute"]) == (4, 8, 2, "full")
    assert (row["step_time"], row["peak_memory"], bool(row["fits"]), row["elapsed"]) == (1.5, 2.0**30, True, 0.25)
    assert list(trials_table([]).columns) == list(table.columns)


NEAR = [(1.0, 0.5), (10.0, 0.02), (50.0, 0.0)]
FAR = [(2.0, 3.0), (20.0, 1.0)]
COURSES = {"best_first": [[(1.0, 0.0)], [(2.0, 0.0)]], "</svg>$[bold]\x00": [NEAR, FAR, []], "hopeless": [[], []]}
WORDS = {"title": "Searches", "facts": "two problems"}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_courses_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in "ab":
        draw_gaps(COURSES, tmp_path / f"gaps-{name}{suffix}", axis_label="evaluations", **WORDS)
        draw_solved(COURSES, COURSES, tmp_path / f"solved-{name}{suffix}", **WORDS)
        gaps = {"small": {"beam": 0.0, "mcmc": INFINITE}, "large": {"mcmc": -0.2}}
        draw_cases(gaps, tmp_path / f"cases-{name}{suffix}", **WORDS)
    for kind in ("gaps", "solved", "cases"):
        first, second = ((tmp_path / f"{kind}-{name}{suffix}").read_bytes() for name in "ab")
        assert first == second
        assert len(first) > 5000


def test_a_gap_holds_from_its_point_on_and_is_infinite_before_the_first() -> None:
    assert _read_gaps(NEAR, [0.5, 1.0, 9.9, 10.0, 49.0, 50.0, 99.0]) == [INFINITE, 0.5, 0.5, 0.02, 0.02, 0.0, 0.0]
    assert _read_gaps([], [1.0, 2.0]) == [INFINITE, INFINITE]


def test_quartiles_of_four_runs_are_the_second_third_and_fourth() -> None:
    low, middle, high = _gap_quartiles([[(1.0, gap)] for gap in (0.4, 0.1, 0.3, 0.2)], [1.0])
    assert (low, middle, high) == ([0.2], [0.3], [0.4])


def test_the_share_at_the_optimum_rises_when_runs_get_there() -> None:
    assert _solved_shares([NEAR, FAR, [(3.0, 0.01)], []]) == [(0.0, 0.0), (3.0, 0.25), (50.0, 0.5)]


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found a plan"):
        draw_gaps({"hopeless": [[]]}, tmp_path / "x.png", axis_label="evaluations", **WORDS)
    with pytest.raises(ValueError, match="at most"):
        draw_gaps(
            {str(number): [NEAR] for number in range(MAX_ALGORITHMS + 1)}, tmp_path / "x.png", axis_label="", **WORDS
        )
    with pytest.raises(ValueError, match="needs a problem"):
        draw_cases({}, tmp_path / "x.png", **WORDS)
