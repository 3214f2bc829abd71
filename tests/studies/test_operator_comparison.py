"""The page of the searches for operators: what it counts, and that it goes on where it ended."""

from pathlib import Path

import pytest

from .operator_comparison import NAMES, build_page, main, read_runs
from .search_runs import SearchRun


def build_run(case: str, name: str, *history: tuple[int, float, float], bound: float | None = None) -> SearchRun:
    """Return a run with its points: evaluations, CPU seconds and step time."""
    return SearchRun(case, name, None, 60, 60, 20.0, bound, history)


def find_row(page: str, first: str) -> list[str]:
    """Return the cells of the row that begins with a word."""
    rows = (line.replace("\\", "").strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| "))
    return next(row for row in rows if row[0] == first)


def test_how_often_a_search_is_near_the_best_by_hand() -> None:
    # a: frontier has 1.0 s at its 40th evaluation, after 3 s; auto 1.2 s at once. b: auto has 2.0 s and proves it
    runs = {
        "a": {
            "frontier": build_run("a", "frontier", (1, 1.0, 1.5), (40, 3.0, 1.0)),
            "auto": build_run("a", "auto", (1, 0.5, 1.2)),
        },
        "b": {"frontier": build_run("b", "frontier"), "auto": build_run("b", "auto", (1, 0.5, 2.0), bound=2.0)},
    }
    page = build_page(runs, 20.0)
    # near at 5 and 50 evaluations, at 2 and 20 s; best in; median of gaps 0 and infinity; without a plan; proven
    assert find_row(page, "frontier")[1:] == ["0 of 2", "1 of 2", "0 of 2", "1 of 2", "1", "no plan", "1", "0"]
    # its gaps are 20 % and 0: a median of 10 %
    assert find_row(page, "auto")[1:] == ["1 of 2", "1 of 2", "1 of 2", "1 of 2", "1", "10.0 %", "0", "1"]
    assert find_row(page, "a")[1:] == ["1 s, 0.0 %", "1.2 s, 20.0 %"]
    assert find_row(page, "b")[1:] == ["none", "2 s, 0.0 %"]


def test_a_search_that_refuses_a_network_says_so() -> None:
    refusal = SearchRun("a", "joint", None, 0, 0, 0.0, None, (), refused="no operators")
    page = build_page({"a": {"joint": refusal, "auto": build_run("a", "auto", (1, 0.5, 1.0))}}, 20.0)
    assert find_row(page, "a")[1:] == ["refused", "1 s, 0.0 %"]


def test_it_goes_on_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path), "--seconds", "0.5", "--only", "recommender"]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(NAMES)
    page, runs = (tmp_path / "operators.md").read_text("utf-8"), read_runs(tmp_path / "operators.jsonl")
    assert list(runs["recommender"]) == list(NAMES)
    assert main(arguments) == 0
    assert not capsys.readouterr().out
    assert (tmp_path / "operators.md").read_text("utf-8") == page
