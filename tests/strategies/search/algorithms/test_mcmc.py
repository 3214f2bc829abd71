from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms.mcmc import MCMC, _Place
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts, neighbours

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
SPACE = Space(core=True, recompute=("none",), zero=(0,))  # type: ignore[arg-type]
LAYOUT = {complete(PROBLEM, layout): layout for layout in layouts(PROBLEM)}


def walk(algorithm: MCMC, space: Space, costs: FakeCost) -> Iterator[Layout]:
    """Yield every layout that the walk proposes."""
    proposals = algorithm.propose(PROBLEM, space, costs)
    plan = next(proposals)
    while True:
        yield LAYOUT[plan]  # type: ignore[index]
        try:
            plan = proposals.send(costs.evaluate(plan))  # type: ignore[arg-type]
        except StopIteration:
            return


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_the_walk_is_in_detailed_balance(temperature: float) -> None:
    costs, algorithm = FakeCost(), MCMC(temperature=temperature)
    places = {
        layout: _Place(layout, costs.step_time(complete(PROBLEM, layout)), neighbours(PROBLEM, SPACE, layout))
        for layout in layouts(PROBLEM, SPACE)
    }
    assert len({len(place.neighbour_layouts) for place in places.values()}) > 1  # or the correction would not matter

    def flow(a: _Place, b: _Place) -> float:
        return float(a.cost ** (-1 / temperature) / len(a.neighbour_layouts) * algorithm._find_acceptance(a, b))

    for here in places.values():
        for layout in here.neighbour_layouts:
            assert flow(here, places[layout]) == pytest.approx(flow(places[layout], here))


def test_acceptance_by_hand() -> None:
    slow, fast = _Place(Layout(), 0.002, (Layout(),)), _Place(Layout(), 0.001, (Layout(),))
    assert MCMC(temperature=1.0)._find_acceptance(fast, slow) == pytest.approx(0.5)
    assert MCMC(temperature=0.5)._find_acceptance(fast, slow) == pytest.approx(0.25)
    assert MCMC(faithful=True)._find_acceptance(fast, slow) == pytest.approx(exp(-1.2))  # 1 ms slower
    assert MCMC()._find_acceptance(slow, fast) == MCMC(faithful=True)._find_acceptance(slow, fast) == 1.0


def test_every_proposal_of_a_walk_without_restarts_is_a_neighbour_of_an_earlier_one() -> None:
    proposed = list(walk(MCMC(steps=300, patience=None), SPACE, FakeCost()))
    assert len(proposed) == 301
    for index, layout in enumerate(proposed[1:], start=1):
        assert any(layout in neighbours(PROBLEM, SPACE, earlier) for earlier in proposed[:index])


def test_the_published_walk_goes_back_to_the_best_every_hundredth_of_its_steps() -> None:
    costs = FakeCost()
    proposed = list(walk(MCMC(steps=1000, faithful=True, alpha=0.0), SPACE, costs))
    times = [costs.step_time(complete(PROBLEM, layout)) for layout in proposed]
    for index in range(11, 1000, 10):
        best = proposed[times.index(min(times[:index]))]
        assert proposed[index] in neighbours(PROBLEM, SPACE, best)
    # with alpha 0 every step is accepted, so between resets each proposal is next to the one before
    assert all(proposed[i] in neighbours(PROBLEM, SPACE, proposed[i - 1]) for i in range(2, 1001) if i % 10 != 1)


def test_only_restarts_reach_what_neighbours_do_not() -> None:
    problem = small_problem(nodes=1, devices_per_node=6, heads=6, ffn=6, global_batch=6)
    space = Space(data=(2, 3), pipeline=(1,))  # data 2 x tensor 3 and data 3 x tensor 2: no factor to trade
    tensors = {}
    for patience in (None, 10):
        result = search(MCMC(patience=patience, steps=500), problem, space, costs=FakeCost())
        tensors[patience] = {trial.plan.tensor for trial in result.trials}
    assert tensors == {None: {2}, 10: {2, 3}}


@dataclass
class Divided(FakeCost):
    """Memory that model parallelism divides."""

    def peak_memory(self, plan: Plan) -> float:
        return 1 / (plan.tensor * plan.pipeline)


@pytest.mark.parametrize(
    ("devices_per_node", "capacity", "degrees"),
    [(4, 1.0, (8, 1, 1)), (4, 0.5, (4, 2, 1)), (4, 0.3, (2, 4, 1)), (4, 0.2, (1, 4, 2)), (1, 0.3, (2, 1, 4))],
)
def test_it_starts_where_an_expert_would(devices_per_node: int, capacity: float, degrees: tuple[int, int, int]) -> None:
    problem = small_problem(nodes=8 // devices_per_node, devices_per_node=devices_per_node, heads=8)
    first = search(MCMC(), problem, costs=Divided(capacity=capacity), budget=1).trials[0].plan
    assert (first.data, first.tensor, first.pipeline) == degrees
    assert (first.microbatch, first.schedule) == (1, "1f1b")


def test_what_does_not_fit_is_not_evaluated() -> None:
    costs = FakeCost(capacity=0.5)
    result = search(MCMC(steps=2000), PROBLEM, SPACE, costs=costs)
    assert result.evaluations > 20
    assert all(trial.evaluation.fits for trial in result.trials)
    assert result.considered > result.evaluations


def test_a_long_walk_finds_the_optimum_of_most_small_spaces() -> None:
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE)]
    optimal = 0
    for seed in range(6):
        costs = FakeCost(seed=seed)
        result = search(MCMC(), PROBLEM, SPACE, costs=costs)
        assert result.best is not None
        assert result.gap is None  # found, not proven
        optimal += result.best.evaluation.step_time == min(map(costs.step_time, plans))
    assert optimal > 3


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"temperature": 0.0}, {"patience": 0}, {"alpha": -1.0}])
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"mcmc: .* met"):
        MCMC(**wrong)  # type: ignore[arg-type]
