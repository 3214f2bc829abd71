"""Pictures of many searches."""

from pathlib import Path

import pytest

from .search_pictures import (
    MAX_ALGORITHMS,
    _gap_quartiles,
    _read_gaps,
    _solved_shares,
    draw_cases,
    draw_gaps,
    draw_solved,
)

INFINITE = float("inf")
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
