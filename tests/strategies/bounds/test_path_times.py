"""The longest paths of many plans are those of their programs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwise.simulator.engine.compiled import installed
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.bounds.path_times import LongestPaths
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.space import CORE, layouts

from ..problems import IDEAL, problem


def lowered(costs: StageCosts, plan: Plan) -> int:
    """Return the ticks of a plan's longest path by its program."""
    return int(finish_times(lower(costs.problem, plan, costs=costs))[1].max())


def walked(costs: StageCosts, plan: Plan) -> int:
    """Return the ticks of a plan's longest path without its program."""
    (ticks,) = LongestPaths(costs).ticks([plan])
    assert ticks is not None
    return ticks


@cache
def expected(small: Problem) -> list[int]:
    """Return the ticks of the longest path of every variant by its program."""
    costs = StageCosts(small)
    return [lowered(costs, plan) for plan in variants(small)]


def variants(small: Problem) -> Iterator[Plan]:
    """Yield all plans of a small problem, with every way to reduce gradients and to cross stages."""
    for layout in layouts(small, CORE):
        for changes in CHANGES:
            changed = replace(layout, **changes)
            if next(violations(small, changed), None) is None:
                yield complete(small, changed)


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"scatter_gather": True},
    {"overlap_gradients": False},
    {"overlap_tensor": True},
    {"gradient_reduction": "parameter_server"},
    {"order": ("data", "pipeline", "tensor")},
    {"offload": Offloading(optimizer=(1.0,))},
)
# each layer's gradients, 4 bytes each, fill a bucket of 25 MiB: 12 * 2,048**2 * 4 = 201 million
WIDE = {"hidden": 2048, "ffn": 8192, "vocab": 8000}
TIED = problem(nodes=2, devices=4, nics=4, layers=4, batch=4, tied=True, precision="bf16", **WIDE)
ONE_NIC = problem(nodes=2, devices=4, nics=1, layers=4, batch=4, bandwidth=1e7)


def funnel() -> Problem:
    """Return a network whose layers hand on ever fewer values, on four devices."""
    blocks = []
    for index, size in enumerate((64, 32, 16, 8)):
        tokens, dims = (("batch", 1), ("sequence", 32)), (("wide", size), ("narrow", size // 2))
        wide = Tensor("in", ("batch", "sequence", "wide"), (1, 32, size), "fp32")
        narrow = Tensor("out", ("batch", "sequence", "narrow"), (1, 32, size // 2), "fp32")
        weight = Tensor("weight", ("wide", "narrow"), (size, size // 2), "fp32")
        what = ("matmul", OperatorKind.MATMUL, tokens + dims, ("in",), ("out",), ("weight",), ("wide",))
        blocks.append(Block(f"block{index}", (Operator(*what),), (wide, narrow, weight), ("in",), ("out",)))
    return replace(problem(devices=4, batch=8), graph=OperatorGraph("funnel", tuple(blocks), 32))


@pytest.mark.parametrize("numba", [False, pytest.param(True, marks=pytest.mark.skipif(not installed(), reason="none"))])
@pytest.mark.parametrize("small", [TIED, ONE_NIC], ids=["tied", "one nic"])
def test_every_plan_of_a_space_at_once(small: Problem, numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("meshwise.strategies.bounds.longest_path.pays", "meshwise.strategies.bounds.longest_path.pays"):
        monkeypatch.setattr(name, lambda tasks: numba)
    costs, plans = SimulatedCost(small), list(variants(small))
    found = costs.list_path_ticks(plans)
    assert found == expected(small)
    assert costs.list_path_ticks(plans[::-1]) == found[::-1]
    assert len(set(found)) > len(plans) // 4  # they do differ


def test_stages_may_hand_on_different_sizes() -> None:
    small = funnel()
    costs = StageCosts(small)
    stages = tuple(Stage((block.name,)) for block in small.graph.blocks)
    plan = replace(
        complete(small, Layout(data=4)), mesh=Mesh((Axis("pipeline", 4),)), stages=stages, num_microbatches=8
    )
    sent = [costs.boundary_bytes(plan, stage) for stage in range(3)]
    assert sent == [4 * 32 * 32, 4 * 32 * 16, 4 * 32 * 8]
    assert walked(costs, plan) == lowered(costs, plan)


def test_equal_nodes_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.strategies.cost_model.lower", None)
    alike = [plan for plan in variants(TIED) if not plan.offload and plan.gradient_reduction == "all_reduce"]
    costs = SimulatedCost(TIED)
    assert None not in LongestPaths(costs.costs).ticks(alike)
    costs.list_path_ticks(alike)  # a server's links are not those of the others
    straggler = replace(TIED, cluster=replace(TIED.cluster, speeds=((3, 0.5),)))
    plan = complete(straggler, Layout(pipeline=2, data=2, tensor=2))
    assert LongestPaths(StageCosts(straggler)).ticks([plan]) == [None]
    with pytest.raises(TypeError):
        SimulatedCost(straggler).list_path_ticks([plan])


def test_longest_paths_lie_between_the_bound_and_the_simulation() -> None:
    costs, plans = SimulatedCost(ONE_NIC), list(variants(ONE_NIC))[::5]
    rows = zip(map(costs.plan_bound, plans), costs.longest_paths(plans), map(costs.evaluate, plans), strict=True)
    paths = [(bound, longest, evaluation.step_time) for bound, longest, evaluation in rows]
    assert all(bound <= longest <= simulated for bound, longest, simulated in paths)
    assert any(longest < simulated for _, longest, simulated in paths)  # one NIC is shared


def test_no_plans_take_no_time() -> None:
    assert LongestPaths(StageCosts(TIED)).ticks([]) == []
    assert SimulatedCost(TIED).list_path_ticks([]) == []


@pytest.mark.parametrize("rate", [1.0, 1e2])  # one pass takes more than 13 days; all of them together do
def test_work_that_takes_too_long_is_refused(rate: float) -> None:
    small = problem(devices=2, batch=64, accelerator=replace(IDEAL, peak_flops=(("fp32", rate),)))
    plan = complete(small, Layout(pipeline=2))
    costs = StageCosts(small)
    with pytest.raises(ValueError, match=r"at most|lie in"):
        lowered(costs, plan)
    with pytest.raises(ValueError, match=r"at most|lie in"):
        walked(costs, plan)
    with pytest.raises(ValueError, match=r"at most|lie in"):
        SimulatedCost(small).list_path_ticks([plan])


@pytest.mark.parametrize("name", [name for name, rule in SCHEDULES.items() if not rule.is_asynchronous])
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_schedule_has_the_longest_path_of_its_program(name: str, chunks: int) -> None:
    small = problem(layers=8, batch=8, bandwidth=1e8)
    layout = Layout(data=4, pipeline=2, schedule=name, chunks=chunks)
    if not list(violations(small, layout)):
        plan, costs = complete(small, layout), StageCosts(small)
        _, ends = finish_times(lower(small, plan, costs=costs))
        assert SimulatedCost(small).list_path_ticks([plan]) == [int(ends.max())]
