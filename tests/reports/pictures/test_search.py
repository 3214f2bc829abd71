"""Pictures of searches on one problem."""

from pathlib import Path

import pytest

from meshwise.reports.pictures.search import draw_search

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


def test_of_equal_plans_the_first_to_be_found_is_named(tmp_path: Path):
    histories = {"late": [(1, 0.1, 2.0), (30, 3.0, 1.0)], "soon": [(4, 0.9, 1.0)], "never": [(1, 0.1, 3.0)]}
    draw_search(histories, tmp_path / "ties.svg", lower_bound=1.0)
    words = "best: 1 s, first by soon after 4 evaluations, found by 2 of 3 algorithms; lower bound 1 s, gap 0.0%"
    assert words in (tmp_path / "ties.svg").read_text()
