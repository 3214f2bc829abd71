from dataclasses import dataclass

import pytest

from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.expert import Expert
from meshwise.strategies.search.simulated_search import search

from ..small_problems import FakeCost, small_problem


@dataclass
class Divided(FakeCost):
    """Memory that model parallelism divides, and recomputation reduces to a half."""

    def peak_memory(self, plan: Plan) -> float:
        return (0.5 if plan.recompute is Recompute.FULL else 1.0) / (plan.tensor * plan.pipeline)


@pytest.mark.parametrize(
    ("devices_per_node", "capacity", "degrees", "recompute"),
    [
        (4, 1.0, (8, 1, 1), Recompute.NONE),  # data parallel if it fits
        (4, 0.5, (4, 2, 1), Recompute.NONE),  # tensor inside the node
        (4, 0.2, (1, 4, 2), Recompute.NONE),  # and pipeline across
        (1, 0.3, (2, 1, 4), Recompute.NONE),  # a node of one device has no tensor parallelism
        (4, 0.07, (1, 4, 2), Recompute.FULL),  # recompute when memory binds: 1/8 > 0.07 >= 1/16
    ],
)
def test_the_first_plan_follows_the_guidelines(
    devices_per_node: int, capacity: float, degrees: tuple[int, int, int], recompute: Recompute
) -> None:
    problem = small_problem(nodes=8 // devices_per_node, devices_per_node=devices_per_node, heads=8)
    first = search(Expert(), problem, costs=Divided(capacity=capacity), budget=1).trials[0].plan
    assert (first.data, first.tensor, first.pipeline) == degrees
    assert first.recompute is recompute
    assert first.microbatch == 1
    assert first.zero == (1 if first.data > 1 else 0)
    assert first.sequence_parallel == (first.tensor > 1)


def test_it_tries_the_microbatch_and_then_the_schedule_of_so_many_degrees() -> None:
    problem = small_problem(nodes=1, devices_per_node=4, global_batch=16)
    costs = FakeCost(seed=4)
    trials = search(Expert(choices=2), problem, costs=costs).trials
    by_degrees: dict[tuple[int, int, int], list[Plan]] = {}
    for trial in trials:
        plan = trial.plan
        by_degrees.setdefault((plan.data, plan.tensor, plan.pipeline), []).append(plan)
    assert list(by_degrees) == [(4, 1, 1), (2, 2, 1)]
    assert [plan.microbatch for plan in by_degrees[4, 1, 1]] == [1, 2, 4]  # no pipeline: one schedule

    third = search(Expert(choices=3), problem, costs=costs).trials[len(trials)].plan
    assert (third.data, third.tensor, third.pipeline) == (2, 1, 2)  # before all four in one model


def test_a_pipeline_has_the_schedule_tried_at_the_best_microbatch() -> None:
    problem = small_problem(nodes=4, devices_per_node=1, heads=1, ffn=1, sequence=3, global_batch=16)
    costs = Divided(seed=2, capacity=0.3)  # only four pipeline ranks fit without recomputation
    plans = [trial.plan for trial in search(Expert(choices=1), problem, costs=costs).trials]
    sizes = [plan for plan in plans if plan.schedule == "1f1b"]
    assert [plan.microbatch for plan in sizes] == [1, 2, 4]  # 1f1b needs as many microbatches as ranks: 16 / 4
    best = min(sizes, key=costs.step_time)
    others = [plan for plan in plans if plan.schedule != "1f1b"]
    assert others
    assert all(plan.microbatch == best.microbatch for plan in others)


def test_choices_of_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="expert: choices is at least 1, met 0"):
        Expert(choices=0)
