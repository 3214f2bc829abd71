from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.choices import list_offloadings
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import CORE, Space, layouts

from ....examples import LONG
from ..scenarios import small_scenario, usual_scenario, wide_scenario
from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem(nodes=1, devices_per_node=4)
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM, CORE))

COSTS = st.builds(
    FakeCost,
    seed=st.integers(0, 10**6),
    levels=st.sampled_from((1, 3, 1000)),
    tight=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    capacity=st.sampled_from((0.02, 0.3, 1.0)),
)


def optimum(costs: FakeCost) -> float:
    return min((costs.step_time(plan) for plan in PLANS if costs.fits(plan)), default=float("inf"))


@settings(max_examples=40, deadline=None)
@given(costs=COSTS)
def test_the_answer_is_that_of_brute_force_with_a_proof(costs: FakeCost) -> None:
    result = search(BestFirst(starts=False), PROBLEM, CORE, costs=costs)
    if result.best is None:  # then known plans were looked at too, for the one that needs the least memory
        assert result.considered >= len(PLANS)
        assert not any(costs.fits(plan) for plan in PLANS)
        assert (result.lower_bound, result.gap, result.evaluations) == (None, None, 0)
    else:
        assert result.considered == len(PLANS)
        assert result.best.evaluation.step_time == result.lower_bound == optimum(costs)
        assert result.gap == 0.0


@settings(max_examples=40, deadline=None)
@given(costs=COSTS)
def test_no_plan_is_evaluated_that_its_bound_or_its_memory_excludes(costs: FakeCost) -> None:
    result = search(BestFirst(starts=False), PROBLEM, CORE, costs=costs)
    best = optimum(costs)
    for trial in result.trials:
        assert costs.longest_paths([trial.plan])[0] <= best
        assert trial.evaluation.fits
    # a bound as high as the best so far cannot win: with exact bounds the first plan is the last
    if costs.tight == 1.0 and result.best is not None:
        assert result.evaluations == 1


def test_without_bounds_it_evaluates_all_that_fits() -> None:
    class Boundless(FakeCost):
        def plan_bound(self, plan: object) -> float:
            return 0.0

        def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
            return [0.0] * len(plans)

    costs = Boundless(capacity=0.5)
    result = search(BestFirst(starts=False), PROBLEM, CORE, costs=costs)
    assert {trial.plan for trial in result.trials} == {plan for plan in PLANS if costs.fits(plan)}


@settings(max_examples=40, deadline=None)
@given(costs=COSTS, budget=st.integers(1, 6))
def test_a_budget_that_ends_it_early_leaves_a_valid_gap(costs: FakeCost, budget: int) -> None:
    result = search(BestFirst(starts=False), PROBLEM, CORE, costs=costs, budget=budget)
    if result.best is None:
        return
    best, evaluated = result.best.evaluation.step_time, {trial.plan for trial in result.trials}
    waiting = [plan for plan in PLANS if costs.fits(plan) and plan not in evaluated]
    assert result.lower_bound is not None
    assert min([best, *map(costs.plan_bound, waiting)]) <= result.lower_bound  # no worse than the bounds alone
    assert result.lower_bound <= min([best, *costs.longest_paths(waiting)])  # no better than all longest paths
    assert result.gap == (best - result.lower_bound) / result.lower_bound


def test_time_that_ends_among_the_bounds_leaves_a_plan_and_no_proof() -> None:
    bounds: dict[Plan, float] = {}

    class Recording(FakeCost):
        def plan_bound(self, plan: Plan) -> float:
            return bounds.setdefault(plan, super().plan_bound(plan))

    seconds = iter(range(10**6))
    result = search(
        BestFirst(starts=False), PROBLEM, CORE, costs=Recording(), seconds=150, clock=lambda: float(next(seconds))
    )
    assert 10 < len(bounds) < len(PLANS)
    assert [trial.plan for trial in result.trials] == [min(bounds, key=bounds.__getitem__)]
    assert (result.lower_bound, result.gap) == (None, None)


def has_the_answer_of_simulating_every_plan(problem: Problem, space: Space) -> None:
    costs = SimulatedCost(problem)

    def simulated(among: Space) -> list[Evaluation]:
        return [costs.evaluate(complete(problem, layout)) for layout in layouts(problem, among)]

    every = simulated(space)
    if not any(evaluation.fits for evaluation in every) and space.offload is None and not (space.core or space.wide):
        space = replace(space, offload=list_offloadings())  # what an engineer turns to then
        every = simulated(space)
    result = search(BestFirst(starts=False), problem, space)
    assert result.scope is not None and result.scope.plans == len(every) <= result.considered
    if result.best is None:  # then known plans were looked at too, for the one that needs the least memory
        assert not any(evaluation.fits for evaluation in every)
    else:
        assert result.considered == len(every)
        least = min(evaluation.step_time for evaluation in every)
        assert result.best.evaluation.step_time == result.lower_bound == least
        assert result.best.evaluation == SimulatedCost(problem).evaluate(result.best.plan)
        assert result.gap == 0.0


@pytest.mark.parametrize("seed", range(200 if LONG else 24))
def test_the_answer_is_that_of_simulating_every_plan(seed: int) -> None:
    has_the_answer_of_simulating_every_plan(*small_scenario(seed))


@pytest.mark.parametrize("seed", range(60 if LONG else 16))
def test_the_answer_of_the_usual_space_is_that_of_simulating_every_plan(seed: int) -> None:
    has_the_answer_of_simulating_every_plan(*usual_scenario(seed, range(1_000, 20_001) if LONG else range(2, 400)))


@pytest.mark.parametrize("seed", range(60 if LONG else 16))
def test_the_answer_of_a_wide_space_is_that_of_simulating_every_plan(seed: int) -> None:
    has_the_answer_of_simulating_every_plan(*wide_scenario(seed, range(1_000, 20_001) if LONG else range(2, 400)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_the_answer_of_thousands_of_plans_is_that_of_simulating_each(seed: int) -> None:
    # 6 problems of at least 3,400 plans: 20,400 and more
    has_the_answer_of_simulating_every_plan(*usual_scenario(seed, range(3_400, 6_000)))


def test_an_interruption_while_plans_are_only_looked_at_keeps_the_best_bounded_one() -> None:
    class Impatient(FakeCost):
        looked = 0

        def plan_bound(self, plan: Plan) -> float:
            self.looked += 1
            if self.looked > 3:
                raise KeyboardInterrupt
            return super().plan_bound(plan)

    result = search(BestFirst(starts=False), PROBLEM, CORE, costs=Impatient())
    assert result.interrupted and result.evaluations == 1 and result.gap is None
    assert result.best is not None
