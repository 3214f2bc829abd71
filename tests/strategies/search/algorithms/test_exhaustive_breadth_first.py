from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.search.algorithms.exhaustive import BreadthFirst
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts, neighbours

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
SPACE = Space(core=True, zero=(0,))
LAYOUTS = {complete(PROBLEM, layout): layout for layout in layouts(PROBLEM, SPACE)}


def rewrites_from(start: Layout, costs: FakeCost) -> dict[Layout, int]:
    """Return how many rewrites each layout that fits is away, over layouts that fit, by relaxation of every edge."""
    fits = {layout for plan, layout in LAYOUTS.items() if costs.fits(plan)}
    near = {layout: fits.intersection(neighbours(PROBLEM, SPACE, layout)) for layout in fits}
    away, before = {start: 0}, dict[Layout, int]()
    while away != before:
        before = dict(away)
        for layout, rewrites in before.items():
            for after in near[layout]:
                away[after] = min(away.get(after, len(fits)), rewrites + 1)
    return away


def test_plans_come_by_rising_number_of_rewrites_from_the_first() -> None:
    costs = FakeCost(capacity=0.3)
    result = search(BreadthFirst(), PROBLEM, SPACE, costs=costs)
    trials = [LAYOUTS[trial.plan] for trial in result.trials]
    away = rewrites_from(trials[0], costs)
    distances = [away[layout] for layout in trials[: len(away)]]
    assert distances == sorted(distances)
    assert distances[-1] > 1


def test_at_its_end_it_has_evaluated_all_that_fits_and_knows_the_best() -> None:
    costs = FakeCost(capacity=0.1)  # what fits lies apart: rewrites of the first plan do not reach all
    result = search(BreadthFirst(), PROBLEM, SPACE, costs=costs)
    fitting = {plan for plan in LAYOUTS if costs.fits(plan)}
    assert {trial.plan for trial in result.trials} == fitting
    assert len(rewrites_from(LAYOUTS[result.trials[0].plan], costs)) < len(fitting)
    assert result.lower_bound == min(map(costs.step_time, fitting))
    assert result.gap == 0.0
