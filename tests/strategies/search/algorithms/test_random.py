from collections import Counter

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
SPACE = Space(recompute=("none",), zero=(0,), sequence_parallel=(False,))  # type: ignore[arg-type]
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE))


def test_without_a_budget_it_evaluates_every_plan_that_fits_once() -> None:
    costs = FakeCost(capacity=0.5)
    result = search(RandomSearch(seed=3), PROBLEM, SPACE, costs=costs)
    assert Counter(trial.plan for trial in result.trials) == Counter(plan for plan in PLANS if costs.fits(plan))
    assert result.gap is None  # it tried them all, and claims nothing


def test_the_first_draw_is_uniform_and_another_seed_gives_another_one() -> None:
    costs, draws = FakeCost(), 600
    firsts = Counter(
        search(RandomSearch(seed), PROBLEM, SPACE, costs=costs, budget=1).trials[0].plan for seed in range(draws)
    )
    expected = draws / len(PLANS)
    distance = sum((firsts[plan] - expected) ** 2 / expected for plan in PLANS)
    freedom = len(PLANS) - 1
    # chi-squared has mean `freedom` and variance twice that: five deviations, for seeds that never change
    assert distance == pytest.approx(freedom, abs=5 * (2 * freedom) ** 0.5)
