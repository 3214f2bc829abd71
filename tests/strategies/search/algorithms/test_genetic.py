from itertools import islice
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.genetic import (
    FAMILY_NAMES,
    GENES,
    GROUP_NAMES,
    MEMBER_NAMES,
    Genetic,
    Repair,
    count_differences,
    cross_layouts,
)
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.proposals import SearchAlgorithm
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts, neighbours

from ..small_problems import PROBLEMS, SPACES, FakeCost, small_problem
from .test_mcts import LARGER, Separable

PROBLEM = small_problem()
SPACE = Space(recompute=("none",), zero=(0,))
LAYOUTS = list(layouts(PROBLEM))


def test_every_decision_is_in_one_gene_and_repaired_at_one_level() -> None:
    assert sorted(name for gene in GENES for name in gene) == sorted(DECISIONS)
    assert sorted((*FAMILY_NAMES, *GROUP_NAMES, *MEMBER_NAMES)) == sorted(DECISIONS)


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_a_child_has_each_gene_of_either_parent(layout: Layout, other: Layout, seed: int) -> None:
    child = cross_layouts(layout, other, Random(seed))
    for gene in GENES:
        values = tuple(child[name] for name in gene)
        assert values in [tuple(getattr(parent, name) for name in gene) for parent in (layout, other)]


def test_genes_come_from_both_parents_alike() -> None:
    one, other = Layout(data=2, tensor=4), Layout(data=8, tensor=1)
    rng = Random(0)
    children = [cross_layouts(one, other, rng) for _ in range(1000)]
    # a quarter of 1,000 has each of the four pairs, with a deviation of sqrt(1000 * 1/4 * 3/4) = 13.7
    for data in (2, 8):
        for tensor in (1, 4):
            count = sum((child["data"], child["tensor"]) == (data, tensor) for child in children)
            assert abs(count - 250) < 5 * 13.7


@settings(max_examples=25, deadline=None)
@given(PROBLEMS, SPACES, st.integers(0, 99))
def test_a_repaired_child_is_legal_and_the_nearest(problem: Problem, space: Space, seed: int) -> None:
    every = list(layouts(problem, space))
    if not every:
        return
    rng = Random(seed)
    repair = Repair(problem, space, rng)
    assert repair.find_layout({name: getattr(every[-1], name) for name in DECISIONS}) == every[-1]
    decisions = cross_layouts(rng.choice(every), rng.choice(every), rng)
    child = repair.find_layout(decisions)
    assert child in every
    near = every
    for names in (FAMILY_NAMES, GROUP_NAMES, MEMBER_NAMES):  # brute force, level by level
        least = min(count_differences(layout, decisions, names) for layout in near)
        assert count_differences(child, decisions, names) == least
        near = [layout for layout in near if all(getattr(layout, name) == getattr(child, name) for name in names)]
    assert near == [child]


def test_what_is_illegal_is_repaired_by_hand() -> None:
    # 8 devices: data 8 x tensor 4 is too many. With one decision changed it is data 2 x tensor 4 or data 8 x tensor 1
    repair = Repair(PROBLEM, Space(microbatch=(1,)), Random(0))
    decisions = {name: getattr(Layout(data=8, tensor=4), name) for name in DECISIONS}
    found = {(child.data, child.tensor, child.pipeline) for child in (repair.find_layout(decisions) for _ in range(50))}
    assert found == {(2, 4, 1), (8, 1, 1)}


def test_without_crossover_and_immigrants_children_are_neighbours_of_the_population() -> None:
    algorithm = Genetic(population=6, elite=1, crossover=0.0, tournament=2)
    costs = FakeCost()
    result = search(algorithm, PROBLEM, costs=costs, budget=6 + 3 * 5)
    layout_of = {complete(PROBLEM, layout): layout for layout in LAYOUTS}
    plans = [layout_of[trial.plan] for trial in result.trials]
    population, children = plans[:6], plans[6:]
    while children:
        near = {rewrite for layout in population for rewrite in neighbours(PROBLEM, Space(), layout)}
        assert near.issuperset(children[:5])
        best = min(population, key=lambda layout: costs.step_time(complete(PROBLEM, layout)))
        population, children = [best, *children[:5]], children[5:]


def test_a_tournament_of_all_is_won_by_the_fastest() -> None:
    costs = FakeCost(seed=4)
    result = search(Genetic(population=6, tournament=6, crossover=0.0), PROBLEM, costs=costs, budget=6 + 3)
    layout_of = {complete(PROBLEM, layout): layout for layout in LAYOUTS}
    first = [layout_of[trial.plan] for trial in result.trials[:6]]
    best = min(first, key=lambda layout: costs.step_time(complete(PROBLEM, layout)))
    children = [layout_of[trial.plan] for trial in result.trials[6:]]
    assert len(children) == 3
    assert set(neighbours(PROBLEM, Space(), best)).issuperset(children)


def test_what_does_not_fit_is_not_evaluated_and_in_the_end_all_else_is_once() -> None:
    costs = FakeCost(capacity=0.4)
    result = search(Genetic(), PROBLEM, SPACE, costs=costs)
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE)]
    evaluated = [trial.plan for trial in result.trials]
    assert len(evaluated) == len(set(evaluated)) == len(costs.evaluated)
    assert set(evaluated) == set(filter(costs.fits, plans))


def find_gap(algorithm: SearchAlgorithm, seed: int) -> float:
    """Return the gap to the optimum after 60 evaluations, of costs that are a product of factors of decisions."""
    costs = Separable(seed=seed)
    optimum = min(costs.step_time(complete(LARGER, layout)) for layout in layouts(LARGER))
    result = search(algorithm, LARGER, costs=costs, budget=60)
    assert result.best is not None
    return result.best.evaluation.step_time / optimum - 1


def test_it_is_nearer_to_the_optimum_than_random_draws_by_its_selection() -> None:
    seeds = range(8)
    gap = fmean(find_gap(Genetic(seed), seed) for seed in seeds)
    assert gap < 0.5 * fmean(find_gap(RandomSearch(seed), seed) for seed in seeds)
    # parents that are not selected and a best that is not kept: the same crossover and mutation are worth little
    assert gap < 0.5 * fmean(find_gap(Genetic(seed, tournament=1, elite=0), seed) for seed in seeds)


def test_good_decisions_of_both_parents_meet_in_a_child() -> None:
    # one parent has ZeRO 1 but recomputes, the other does neither: ZeRO 1 without recomputation is drawn soon
    one, other = (
        next(layout for layout in LAYOUTS if (layout.zero, str(layout.recompute), layout.data) == wanted)
        for wanted in ((1, "full", 8), (0, "none", 8))
    )
    rng = Random(1)
    repair = Repair(PROBLEM, Space(), rng)
    children = (repair.find_layout(cross_layouts(one, other, rng)) for _ in range(100))
    assert any((child.zero, str(child.recompute)) == (1, "none") for child in islice(children, 30))


@pytest.mark.parametrize(
    "wrong",
    [{"population": 1}, {"tournament": 0}, {"tournament": 99}, {"elite": 99}, {"crossover": 1.5}, {"mutation": -0.1}],
)
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"genetic: .* met"):
        Genetic(**wrong)  # type: ignore[arg-type]


def test_it_begins_with_draws_that_fit() -> None:
    costs = FakeCost(capacity=0.3)
    result = search(Genetic(population=10), PROBLEM, costs=costs, budget=10)
    assert all(isinstance(trial.plan, Plan) and costs.fits(trial.plan) for trial in result.trials)
    assert len({trial.plan.tensor for trial in result.trials}) > 1
