from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms.simulated_annealing import SimulatedAnnealing, find_acceptance
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts, neighbours

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
SPACE = Space(core=True, recompute=("none",), zero=(0,))
LAYOUTS = {complete(PROBLEM, layout): layout for layout in layouts(PROBLEM, SPACE)}


def walk(algorithm: SimulatedAnnealing, costs: FakeCost) -> Iterator[Layout]:
    """Yield every layout that the walk proposes."""
    proposals = algorithm.propose(PROBLEM, SPACE, costs)
    plan = next(proposals)
    while True:
        assert isinstance(plan, Plan)
        yield LAYOUTS[plan]
        try:
            plan = proposals.send(costs.evaluate(plan))
        except StopIteration:
            return


def test_acceptance_and_initial_temperature_by_hand() -> None:
    # a step of 2 s instead of 1 s at temperature 1: (1 / 2)**(1 / 1); at temperature 0.5: (1 / 2)**2
    assert find_acceptance(log(2.0), 1.0) == pytest.approx(0.5)
    assert find_acceptance(log(2.0), 0.5) == pytest.approx(0.25)
    assert find_acceptance(-log(2.0), 0.01) == 1.0
    # changes of 0.1 and 0.3: their mean, 0.2, is accepted at the initial temperature as often as is asked for
    for acceptance in (0.1, 0.5, 0.8):
        temperature = SimulatedAnnealing(acceptance=acceptance).find_initial_temperature([0.1, 0.3])
        assert exp(-0.2 / temperature) == pytest.approx(acceptance)
    assert SimulatedAnnealing().find_initial_temperature([0.0, 0.0]) > 0


def test_moves_that_are_measured_are_all_accepted() -> None:
    proposed = list(walk(SimulatedAnnealing(steps=60, measured=60), FakeCost()))
    assert len(proposed) == 61
    assert all(after in neighbours(PROBLEM, SPACE, before) for before, after in pairwise(proposed))


def test_a_frozen_walk_goes_back_to_the_best_or_starts_anew() -> None:
    # measured for 1 move; then 1, 1/2, 1/4 < 0.3 of the initial temperature: it is frozen after 3 moves, and every 2
    costs = FakeCost()
    algorithm = SimulatedAnnealing(steps=300, measured=1, moves=1, cooling=0.5, frozen=0.3, reheating=1.0)
    proposed = list(walk(algorithm, costs))
    times = [costs.step_time(complete(PROBLEM, layout)) for layout in proposed]
    index, num_reheats, num_restarts = 4, 0, 0
    since = 0  # where the walk was heated
    while index < len(proposed):
        best_time = min(times[:index])
        if min(times[since + 1 : index]) <= best_time < min(times[: since + 1], default=9.0):
            best = proposed[times.index(best_time)]
            assert proposed[index] in neighbours(PROBLEM, SPACE, best)
            since, index, num_reheats = index - 1, index + 2, num_reheats + 1
        else:  # the restart is a proposal of its own
            since, index, num_restarts = index, index + 3, num_restarts + 1
    assert num_reheats > 2
    assert num_restarts > 10


def test_a_walk_that_stays_hot_gets_around_more() -> None:
    def count_layouts(acceptance: float, seed: int) -> int:
        algorithm = SimulatedAnnealing(steps=150, acceptance=acceptance, cooling=0.999999, frozen=1e-9)
        return len(set(walk(algorithm, FakeCost(seed=seed))))

    for seed in range(3):
        assert count_layouts(0.001, seed) < count_layouts(0.9, seed)


@dataclass
class InMilliseconds(FakeCost):
    """The same costs in another unit."""

    unit: float = 1.0

    def step_time(self, plan: Plan) -> float:
        return self.unit * super().step_time(plan)


def test_the_unit_of_time_does_not_matter() -> None:
    plans = []
    for unit in (1.0, 1e-3, 3600.0):
        result = search(SimulatedAnnealing(seed=5), PROBLEM, SPACE, costs=InMilliseconds(unit=unit), budget=40)
        plans.append([trial.plan for trial in result.trials])
    assert plans[0] == plans[1] == plans[2]


def test_what_does_not_fit_is_not_evaluated() -> None:
    result = search(SimulatedAnnealing(steps=2000), PROBLEM, SPACE, costs=FakeCost(capacity=0.5))
    assert result.evaluations > 20
    assert all(trial.evaluation.fits for trial in result.trials)
    assert result.considered > result.evaluations


def test_a_long_walk_finds_the_optimum_of_most_small_spaces() -> None:
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE)]
    num_optimal = 0
    for seed in range(6):
        costs = FakeCost(seed=seed)
        result = search(SimulatedAnnealing(), PROBLEM, SPACE, costs=costs)
        assert result.best is not None
        assert result.gap is None  # found, not proven
        num_optimal += result.best.evaluation.step_time == min(map(costs.step_time, plans))
    assert num_optimal > 3


def test_only_restarts_reach_what_neighbours_do_not() -> None:
    problem = small_problem(nodes=1, devices_per_node=6, heads=6, ffn=6, global_batch=6)
    space = Space(data=(2, 3), pipeline=(1,))  # data 2 x tensor 3 and data 3 x tensor 2: no factor to trade
    result = search(SimulatedAnnealing(steps=500), problem, space, costs=FakeCost())
    assert {trial.plan.tensor for trial in result.trials} == {2, 3}


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"measured": 0}, {"moves": 0}, {"acceptance": 1.0}, {"cooling": 1.0}, {"frozen": 0.0},
     {"reheating": 0.01}, {"reheating": 1.5}],
)  # fmt: skip
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"simulated_annealing: .* met"):
        SimulatedAnnealing(**wrong)  # type: ignore[arg-type]
