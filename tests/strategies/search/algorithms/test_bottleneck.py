from collections.abc import Callable
from dataclasses import dataclass

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Resource
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.bottleneck import Bottleneck
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ...problems import problem
from ..small_problems import FakeCost, small_problem


@dataclass
class Held(FakeCost):
    """Costs with the same bottleneck in every plan, and bounds that leave nothing out."""

    most: Resource = Resource.COMPUTE

    def plan_bound(self, plan: Plan) -> float:
        return 0.0

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        return {resource: float(resource is self.most) for resource in Resource}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("most", "relieves"),
    [
        (Resource.COMPUTE, lambda old, new: new.microbatch > old.microbatch),
        (Resource.BUBBLE, lambda old, new: new.chunks > old.chunks),
        (Resource.DATA, lambda old, new: new.zero != old.zero),
    ],
)
def test_what_takes_most_is_relieved_first(most: Resource, relieves: Callable[[Plan, Plan], bool], seed: int) -> None:
    # a pipeline of four ranks; by habit the first plan has microbatches of one sequence, and 1f1b
    small = small_problem(layers=8, global_batch=16)
    first, second = search(
        Bottleneck(), small, Space(data=(2,), tensor=(1,)), costs=Held(seed=seed, most=most), budget=2
    ).trials
    assert relieves(first.plan, second.plan)


@pytest.mark.parametrize("seed", range(4))
def test_what_cannot_be_faster_than_the_best_is_not_evaluated(seed: int) -> None:
    costs = FakeCost(seed=seed, tight=0.5)
    trials = search(Bottleneck(), small_problem(layers=8, global_batch=16), Space(core=True), costs=costs).trials
    assert len(trials) > 2
    best = trials[0].evaluation.step_time
    for trial in trials[1:]:
        assert costs.plan_bound(trial.plan) < best
        best = min(best, trial.evaluation.step_time)


@pytest.mark.parametrize("seed", range(3))
def test_seconds_of_resources_are_within_the_step(seed: int) -> None:
    small = problem(devices=4, layers=4, batch=8)
    costs = SimulatedCost(small)
    for layout in list(layouts(small))[seed::7]:
        plan = complete(small, layout)
        spent, step = costs.resource_times(plan), costs.evaluate(plan).step_time
        assert set(spent) == set(Resource)
        assert all(0 <= seconds <= step * (1 + 1e-9) for seconds in spent.values())
        assert (spent[Resource.RECOMPUTE] > 0) == (plan.recompute is not Recompute.NONE)
        assert (spent[Resource.TENSOR] > 0) == (plan.tensor > 1)
