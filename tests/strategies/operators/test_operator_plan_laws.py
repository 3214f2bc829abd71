"""Plans that cut every operator in a way of its own obey the laws of all plans."""

from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.operator_plan import build_operator_plan, with_data
from meshwise.strategies.plan.mesh import OPERATOR_AXES, TENSOR, TENSOR_DEPTH
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding

from ..problems import problem
from ..test_laws import LAWS, Lowered
from .operator_plans import random_plan


class Drawn(NamedTuple):
    """A problem and a plan, as `Lowered` asks for them."""

    small: Problem
    plan: Plan

    def build(self) -> tuple[Problem, Plan]:
        return self


@pytest.mark.parametrize("seed", range(25))
def test_every_way_to_time_memory_and_bytes_agrees(seed: int) -> None:
    lowered = Lowered(Drawn(*random_plan(Random(seed))))  # type: ignore[arg-type]
    for law in LAWS:
        law(lowered)


def test_plans_drawn_here_use_every_axis_and_any_degree() -> None:
    drawn = [random_plan(Random(seed))[1] for seed in range(25)]
    met = {(axis.name, axis.size) for plan in drawn for axis in plan.mesh.axes if axis.name in OPERATOR_AXES}
    assert {name for name, size in met if size > 1} == set(OPERATOR_AXES)
    assert {size for _, size in met} >= {2, 3, 6}


def whole_batch(small: Problem, axis: str, cuts: dict[str, tuple[str, ...]]) -> tuple[OperatorSharding, ...]:
    """Return shardings by which an axis cuts all batches, and others what is named."""
    found = []
    for block in small.graph.blocks:
        for operator in block.operators:
            own = [(dim, cuts[dim]) for dim, _ in operator.dims if dim in cuts]
            found.append(OperatorSharding(f"{block.name}.{operator.name}", ((BATCH, (axis,)), *own)))
    return tuple(found)


@pytest.mark.parametrize("axis", OPERATOR_AXES)
def test_gradients_of_whole_parameters_are_summed_along_the_axis_that_cuts_the_batch(axis: str) -> None:
    small = problem(devices=4, layers=2, batch=8)
    plan = build_operator_plan(small, {axis: 4}, 8, whole_batch(small, axis, {}))
    held = StageCosts(small).plan_parameters(plan).positions[0]
    assert held.replicated_elements == tuple(small.graph.num_parameters * (each == axis) for each in OPERATOR_AXES)
    # the same as data parallelism whose gradients are reduced after backward, in one all-reduce
    data = replace(with_data(small, plan), overlap_gradients=False)
    assert (data.data, data.sequences) == (4, 2)
    assert SimulatedCost(small).evaluate(data).step_time == pytest.approx(
        SimulatedCost(small).evaluate(plan).step_time, rel=1e-3
    )


def test_of_a_cut_parameter_each_rank_sums_its_share() -> None:
    # batch over depth, feed-forward columns over tensor: up_weight [64, 256] is cut in 2, its share summed over depth
    small = problem(devices=4, layers=1, batch=8)
    degrees = {TENSOR_DEPTH: 2, TENSOR: 2}
    plan = build_operator_plan(small, degrees, 8, whole_batch(small, TENSOR_DEPTH, {"ffn": (TENSOR,)}))
    depth, rows, tensor = StageCosts(small).plan_parameters(plan).positions[0].replicated_elements
    cut = 64 * 256 + 256 + 256 * 64  # up_weight, up_bias, down_weight
    assert (depth, rows, tensor) == (small.graph.num_parameters - cut // 2, 0, 0)
