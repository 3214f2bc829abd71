"""Searches side by side: what is compared, how it is measured, and that no run is made twice."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS, NEEDED_PACKAGES

from . import search_runs
from .search_comparison import Comparison, compare, main, write_page
from .search_runs import (
    Case,
    SearchRun,
    read_runs,
)

SMALL = Case("two processes", "dense", "local/dp2")
TWO = (SMALL, Case("four processes", "dense", "local/dp2-pp2"))


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: Any) -> None:
    monkeypatch.setattr(search_runs, "BUDGET", 6)


def made(case: str, algorithm: str, *history: tuple[int, float, float], **more: Any) -> SearchRun:
    values: dict[str, Any] = {"seed": None, "evaluations": 9, "considered": 9, "seconds": 1.0, "lower_bound": None}
    return SearchRun(case, algorithm, history=history, **values | more)


RUNS = [
    made(SMALL.name, "best_first", (1, 0.5, 2.0), lower_bound=2.0),
    made(SMALL.name, "random", (1, 0.1, 4.0), (150, 3.0, 2.0), seed=0),
    made(SMALL.name, "random", (1, 0.1, 3.0), seed=1),
    made(SMALL.name, "random", seed=2),
    made(SMALL.name, "beam", (3, 0.2, 1.9)),
    made(SMALL.name, "expert", refused="it takes no such network"),
    made("four processes", "best_first", (1, 0.5, 2.0), lower_bound=1.9),
]


def test_gaps_shares_and_wins_are_those_of_hand() -> None:
    found = Comparison(RUNS, TWO)
    assert found.cases == [SMALL.name]  # the other optimum is not proven
    assert found.names == ["best_first", "beam", "random"]
    assert found.gaps("random", 100) == {SMALL.name: 1.0}  # the median of 100 %, 50 % and no plan
    assert found.gaps("random") == {SMALL.name: 0.5}
    assert found.gaps("beam")[SMALL.name] == pytest.approx(-0.05)
    assert (found.solved_share("random", 100), found.solved_share("random", 200)) == (0, 1 / 3)
    assert (found.solved_share("random", 2.9, 1), found.solved_share("random", 3.0, 1)) == (0, 1 / 3)
    assert found.wins(2) == {"best_first": 1}
    assert found.wins(3) == {"beam": 1}
    assert [run.algorithm for run in found.refused] == ["expert"]


def test_a_comparison_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    told: list[str] = []

    def stop(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, 1, stop, (SMALL,))
    kept = read_runs(tmp_path / "runs.jsonl")
    assert len(kept) == 3
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"version": "other"}\n[]\nnull\n{"torn')
    found = compare(tmp_path, 1, told.append, (SMALL,))[SMALL.name]
    assert found[:3] == kept
    assert read_runs(tmp_path / "runs.jsonl") == found
    assert len(told) == len(found) == len(LAYOUT_ALGORITHMS)


def test_the_page_names_every_algorithm_and_problem(tmp_path: Path, monkeypatch: Any) -> None:
    for package in NEEDED_PACKAGES.values():
        pytest.importorskip(package, reason="one algorithm needs it")
    place = tmp_path / "search"
    assert write_page(str(place), 2, lambda text: None, TWO) == ()
    names = {path.name for path in place.iterdir()}
    pictures = {"gap-evaluations.png", "gap-seconds.png", "problems.png", "solved.png"}
    assert names == {"README.md", "results.csv", "runs.jsonl"} | pictures
    text = (place / "README.md").read_text().replace("\\", "")
    assert all(name in text for name in (*LAYOUT_ALGORITHMS, *pictures, SMALL.name))
    rows = list(csv.DictReader((place / "results.csv").open()))
    assert len(rows) == len((place / "runs.jsonl").read_text().splitlines())
    assert {row["gap"] for row in rows if row["algorithm"] == "best_first"} == {"0"}


@pytest.mark.parametrize("arguments", [[], ["0", "x"], ["many", "x"], ["1", "x", "y"], ["1001", "x"]])
def test_wrong_use_is_one_line_with_code_2(arguments: Sequence[str], capsys: Any) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
