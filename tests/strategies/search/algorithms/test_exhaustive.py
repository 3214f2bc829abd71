from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search.algorithms.exhaustive import Exhaustive
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import layouts

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem(nodes=1, devices_per_node=4)
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM))


def test_it_evaluates_all_that_fits_and_proves_the_best_of_them() -> None:
    costs = FakeCost(capacity=0.5, tight=1.0)  # bounds as good as they come leave nothing out
    result = search(Exhaustive(), PROBLEM, costs=costs)
    fitting = [plan for plan in PLANS if costs.fits(plan)]
    assert [trial.plan for trial in result.trials] == fitting
    assert result.best is not None
    assert result.best.evaluation.step_time == result.lower_bound == min(map(costs.step_time, fitting))
    assert result.considered == len(PLANS)


def test_before_its_end_nothing_is_proven() -> None:
    assert search(Exhaustive(), PROBLEM, costs=FakeCost(), budget=5).gap is None
