"""The table of gaps: what it measures, of problems that can be named, and wrong use."""

from math import inf

import pytest

from .search_gaps import PROBLEMS, find_gaps, format_gaps, main
from .search_runs import CASES, Case

SMALL = Case("two processes", "dense", "local/dp2")


def test_its_problems_are_some_of_the_comparison() -> None:
    assert len(PROBLEMS) == len(set(PROBLEMS)) >= 8
    assert set(PROBLEMS) <= {case.name for case in CASES}


def test_gaps_are_to_the_optimum_and_fall_with_the_budget() -> None:
    few, many = (
        list(find_gaps(SMALL, ("best_first", "random", "genetic"), seeds=2, budget=budget)) for budget in (2, 500)
    )
    assert [name for name, _ in few] == ["best_first", "random", "random", "genetic", "genetic"]
    assert few[0][1] == 0.0
    assert all(0 <= later <= earlier < inf for (_, earlier), (_, later) in zip(few, many, strict=True))
    assert any(gap > 0 for _, gap in few)
    assert all(gap == 0 for _, gap in many)  # both have then seen the whole space


def test_a_run_without_a_plan_has_no_finite_mean() -> None:
    assert format_gaps({"random": (inf, 0.0, 0.005)}).splitlines()[-1] == "| `random` | inf % | 0.5 % | 67 % |"


@pytest.mark.parametrize("arguments", [["--seeds", "0", "random"], ["--budget", "0", "random"]])
def test_wrong_use_is_one_line_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "at least 1, met" in capsys.readouterr().err
