"""Searches side by side: what is compared, how it is measured, and that no run is made twice."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwise.scenarios.studies.search_runs
from meshwise.scenarios.studies.search_comparison import Comparison, compare, main, page, write_page
from meshwise.scenarios.studies.search_runs import (
    CASES,
    WIDE_CASES,
    Case,
    SearchRun,
    SharedCosts,
    read_runs,
    run_case,
    to_line,
)
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search import LAYOUT_ALGORITHMS, Space, layouts, search
from meshwise.strategies.search.space import count

SMALL = Case("two processes", "dense", "local/dp2")
TWO = (SMALL, Case("four processes", "dense", "local/dp2-pp2"))


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: Any) -> None:
    monkeypatch.setattr(meshwise.scenarios.studies.search_runs, "BUDGET", 6)


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
    assert (found.share("random", 100), found.share("random", 200)) == (0, 1 / 3)
    assert (found.share("random", 2.9, 1), found.share("random", 3.0, 1)) == (0, 1 / 3)
    assert found.wins(2) == {"best_first": 1}
    assert found.wins(3) == {"beam": 1}
    assert [run.algorithm for run in found.refused] == ["expert"]


def test_there_are_enough_problems_of_every_kind() -> None:
    assert len(CASES) == len({case.name for case in CASES}) >= 24
    kinds = {case.kind for case in CASES}
    assert kinds >= {
        "dense", "experts", "encoder", "vision", "recommender", "tight memory", "slow network", "mixed devices",
        "long context",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_problem_has_plans_of_at_most_1024_devices(case: Case) -> None:
    problem = case.problem()
    assert 8 <= problem.cluster.num_devices <= 1024
    assert next(layouts(problem), None) is not None


@pytest.mark.parametrize("case", WIDE_CASES, ids=lambda case: case.name)
def test_no_budget_exhausts_a_wide_space(case: Case) -> None:
    assert count(case.problem(), case.space) > meshwise.scenarios.studies.search_runs.BUDGET


def test_a_wide_problem_is_searched_in_its_wide_space(tmp_path: Path) -> None:
    wide = replace(SMALL, wide=True)
    proof = next(run_case(wide, 1))
    assert proof.considered == count(wide.problem(), Space(wide=True)) > count(SMALL.problem())
    assert "in wide spaces" in page(Comparison([proof], (wide,)))
    assert "in wide spaces" not in page(Comparison(RUNS, TWO))


def test_runs_are_those_of_the_search_and_are_made_once() -> None:
    runs = list(run_case(SMALL, 2))
    assert {run.algorithm for run in runs} == set(LAYOUT_ALGORITHMS)
    assert runs[0].algorithm == "best_first"
    assert runs[0].proven
    seeds = [run.seed for run in runs if run.algorithm == "random"]
    assert seeds == [0, 1]
    for run in runs:
        if run.algorithm in ("beam", "exhaustive"):
            alone = search(LAYOUT_ALGORITHMS[run.algorithm](), SMALL.problem(), SMALL.space, budget=6)
            assert [(n, time) for n, _, time in run.history] == [(n, time) for n, _, time in alone.history]
    assert list(run_case(SMALL, 2, runs)) == []
    again = list(run_case(SMALL, 2, [run for run in runs if run.seed != 1]))
    assert [(run.algorithm, run.seed) for run in again] == [(run.algorithm, 1) for run in runs if run.seed == 1]


def test_a_look_up_is_charged_what_the_simulation_took(monkeypatch: Any) -> None:
    time = [0.0]
    monkeypatch.setattr(meshwise.scenarios.studies.search_runs, "process_time", lambda: time[0])

    def evaluate(self: SimulatedCost, plan: Any) -> str:
        time[0] += 3.0
        return "evaluation"

    monkeypatch.setattr(SimulatedCost, "evaluate", evaluate)
    problem = SMALL.problem()
    costs = SharedCosts(problem)
    plan = complete(problem, next(layouts(problem)))
    assert [(costs.evaluate(plan), costs.clock()) for _ in range(3)] == [("evaluation", 3.0 * n) for n in (1, 2, 3)]
    assert time == [3.0]


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
    pytest.importorskip("torch", reason="one algorithm is reinforcement learning")
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


def test_a_line_gives_the_run_back(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("".join(map(to_line, RUNS)))
    assert read_runs(tmp_path / "runs.jsonl") == RUNS
    assert replace(RUNS[0], lower_bound=1.0).proven is False


@pytest.mark.parametrize("arguments", [[], ["0", "x"], ["many", "x"], ["1", "x", "y"], ["1001", "x"]])
def test_wrong_use_is_one_line_with_code_2(arguments: Sequence[str], capsys: Any) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
