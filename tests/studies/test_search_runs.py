"""Runs of searches on the problems of a comparison: which problems, how it is measured, no run made twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, count_layouts, layouts

from . import search_runs
from .search_comparison import Comparison, format_page
from .search_runs import (
    CASES,
    WIDE_CASES,
    Case,
    SharedCosts,
    read_runs,
    run_case,
    to_line,
)
from .test_search_comparison import RUNS

SMALL = Case("two processes", "dense", "local/dp2")
TWO = (SMALL, Case("four processes", "dense", "local/dp2-pp2"))


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: Any) -> None:
    monkeypatch.setattr(search_runs, "BUDGET", 6)


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
    assert count_layouts(case.problem(), case.space) > search_runs.BUDGET


def test_a_wide_problem_is_searched_in_its_wide_space(tmp_path: Path) -> None:
    wide = replace(SMALL, wide=True)
    proof = next(run_case(wide, 1))
    assert proof.considered == count_layouts(wide.problem(), Space(wide=True)) > count_layouts(SMALL.problem())
    assert "in wide spaces" in format_page(Comparison([proof], (wide,)))
    assert "in wide spaces" not in format_page(Comparison(RUNS, TWO))


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
    monkeypatch.setattr(search_runs, "process_time", lambda: time[0])

    def evaluate(self: SimulatedCost, plan: Any) -> str:
        time[0] += 3.0
        return "evaluation"

    monkeypatch.setattr(SimulatedCost, "evaluate", evaluate)
    problem = SMALL.problem()
    costs = SharedCosts(problem)
    plan = complete(problem, next(layouts(problem)))
    assert [(costs.evaluate(plan), costs.clock()) for _ in range(3)] == [("evaluation", 3.0 * n) for n in (1, 2, 3)]
    assert time == [3.0]


def test_a_line_gives_the_run_back(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("".join(map(to_line, RUNS)))
    assert read_runs(tmp_path / "runs.jsonl") == RUNS
    assert replace(RUNS[0], lower_bound=1.0).proven is False
