from math import log, prod, sqrt
from random import Random
from statistics import mean

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms.mcts import MCTS, Arm, _draw_softmin, _learn_reward
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.decisions import DecisionTree, PartialPlan
from meshwise.strategies.search.proposals import SearchAlgorithm
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
LARGER = small_problem(layers=8, global_batch=16)
SPACE = Space(recompute=("none",), zero=(0,))  # type: ignore[arg-type]


class Separable(FakeCost):
    """A factor of the step time for each decision, and bounds of nine tenths of it."""

    def step_time(self, plan: Plan) -> float:
        decided = plan.tensor, plan.pipeline, plan.microbatch, plan.schedule, plan.zero, plan.recompute
        return prod(1 + Random(f"{self.seed} {place} {value}").random() for place, value in enumerate(decided))

    def plan_bound(self, plan: Plan) -> float:
        return 0.9 * self.step_time(plan)


class Unbounded(FakeCost):
    """Costs whose bounds say nothing."""

    def plan_bound(self, plan: Plan) -> float:
        return 1e-9


def test_the_right_arm_of_a_tree_by_hand() -> None:
    # pipelines of 1, 2 and 4 of four devices, and with them data 4, 2 and 1: arms that were visited 1, 4 and 4 times,
    # with 0.4, 0.5 and 0.6 as the best reward; there were 9 choices between them, and ln 9 = 2.197
    small = small_problem(nodes=1)
    tree = DecisionTree(small, Space(tensor=(1,)))
    few, some, many = (branch.child for branch in tree.list_branches(tree.root))
    arms = {tree.root: Arm(9, 0.6), few: Arm(1, 0.4), some: Arm(4, 0.5), many: Arm(4, 0.6)}
    # exploration 0.1: 0.4 + 0.1 * sqrt(2.197 / 1) = 0.548; 0.5 + 0.1 * sqrt(2.197 / 4) = 0.574; 0.6 + 0.074 = 0.674
    assert MCTS(exploration=0.1, widening=0.0)._select_path(tree, arms)[1] is many
    # exploration 1: 0.4 + 1.482 = 1.882; 0.5 + 0.741 = 1.241; 0.6 + 0.741 = 1.341
    assert MCTS(exploration=1.0, widening=0.0)._select_path(tree, arms)[1] is few
    # widening, with two arms tried of three: (8 + 1)**0.3 = 1.93 are due, and (8 + 1)**0.5 = 3
    del arms[few]
    assert MCTS(exploration=0.1, widening=0.3)._select_path(tree, arms)[1] is many
    assert MCTS(exploration=0.1, widening=0.5)._select_path(tree, arms) == [tree.root]
    # what has nothing left is not entered, however good it was
    for layout in layouts(small, Space(tensor=(1,), pipeline=(4,))):
        tree.close_layout(layout)
    assert MCTS(exploration=0.1, widening=0.0)._select_path(tree, arms)[1] is some


def test_the_upper_confidence_bound_by_hand() -> None:
    assert Arm(4, 0.5).value(0.0, 16) == 0.5
    assert Arm(4, 0.5).value(1.0, 16) == pytest.approx(0.5 + sqrt(log(16) / 4))


def test_what_does_not_fit_tells_only_of_where_nothing_is_known() -> None:
    here = DecisionTree(PROBLEM, SPACE).root
    arms: dict[PartialPlan, Arm] = {}
    for reward, learnt in (
        (-0.5, (1, -0.5)),
        (-0.25, (1, -0.25)),
        (0.75, (2, 0.75)),
        (-0.1, (2, 0.75)),
        (0.5, (3, 0.75)),
    ):
        _learn_reward(arms, [here], reward)
        assert (arms[here].visits, arms[here].best_reward) == learnt


def test_draws_are_in_proportion_to_a_power_of_the_bound() -> None:
    one, other = list(layouts(PROBLEM))[:2]
    # 1**-2 to 2**-2 is 4 to 1
    drawn = [_draw_softmin([one, other], [1.0, 2.0], 0.5, rng) for rng in [Random(0)] for _ in range(5000)]
    assert drawn.count(one) / 5000 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_a_small_space_is_visited_in_full_and_then_it_ends(seed: int) -> None:
    costs = Unbounded(seed=seed, capacity=0.6)
    result = search(MCTS(seed), PROBLEM, SPACE, costs=costs)
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE)]
    assert {trial.plan for trial in result.trials} == set(filter(costs.fits, plans))
    assert result.considered == len(plans)
    assert result.gap == 0


@pytest.mark.parametrize("seed", range(3))
def test_exact_bounds_leave_out_all_that_is_not_faster(seed: int) -> None:
    result = search(MCTS(seed), PROBLEM, SPACE, costs=FakeCost(seed=seed, tight=1.0))
    times = [trial.evaluation.step_time for trial in result.trials]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)
    assert result.gap == 0


def needed(algorithm: SearchAlgorithm, seed: int) -> int:
    """Return the evaluations until the fastest plan is found, of costs that hang on single decisions."""
    costs = Separable(seed=seed)
    optimum = min(costs.step_time(complete(LARGER, layout)) for layout in layouts(LARGER))
    history = search(algorithm, LARGER, costs=costs, budget=400).history
    return next((count for count, _, time in history if time <= optimum), 400)


def test_it_needs_fewer_evaluations_than_random_draws() -> None:
    seeds = range(3)
    assert (
        mean(needed(MCTS(seed), seed) for seed in seeds) < mean(needed(RandomSearch(seed), seed) for seed in seeds) / 3
    )


@pytest.mark.parametrize("wrong", [{"exploration": -1.0}, {"widening": 1.5}, {"rollouts": 0}, {"temperature": 0.0}])
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"mcts: .* met"):
        MCTS(**wrong)  # type: ignore[arg-type]
