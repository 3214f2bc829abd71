"""The floor: what others published, and what an engineer types first, is never better than what the search finds."""

import pytest

from meshwise.scenarios.recipes import list_recipe_layouts
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.search.starts import engineer_layouts

from .recipe_comparison import SLACK, evaluate_plan, find_fastest, list_cases

PROBLEMS = (
    "Llama 3.1 8B on 8 H100, FSDP",
    "MPT-7B, 2,048 tokens, on 128 H100, FSDP",
    "Qwen3 30B-A3B on 16 H100, EP 16",
    "Llama 2 70B on 8 MI300X, FSDP",
    "SmolLM 135M on 64 H100, DDP",
)
BUDGET = 12
"""Evaluations of the search: the law holds however little it looks at, for it begins with what is known."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_default_search_is_slower_than_a_recipe_or_an_engineers_plan(name: str) -> None:
    """All plans are simulated alike and keep one rule of fitting."""
    scenario = next(case for case in list_cases() if case.name == name).scenario()
    problem = scenario.problem
    found = scenario.search(budget=BUDGET).best
    assert found is not None and scenario.plan is not None
    costs = SimulatedCost(problem)
    own = evaluate_plan("its own plan", scenario.plan, costs)
    others = (
        own,
        find_fastest(problem, engineer_layouts(problem), costs),
        find_fastest(problem, list_recipe_layouts(problem), costs),
    )
    for other in others:
        if other is not None and other.step_time is not None:
            assert found.evaluation.step_time <= other.step_time * (1 + SLACK), other.name
