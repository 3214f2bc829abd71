"""Memory: what the search is told is what the simulation reaches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.memory import stage_memory
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.problem import Problem

from ..lowering.test_lower import Case, cases
from ..problems import problem

BYTES = st.integers(0, 9)


@given(cases(), st.floats(0.5, 2))
@settings(max_examples=60, deadline=None)
def test_a_plan_fits_where_its_simulation_stays_below_every_capacity(case: Case, room: float) -> None:
    small, plan = case.build()
    peak = PlanMemory(StageCosts(small)).peak(plan)
    ((node, count),) = small.cluster.nodes
    node = replace(node, accelerator=replace(node.accelerator, memory=peak * room))
    small = replace(small, cluster=replace(small.cluster, nodes=((node, count),)))
    timeline = simulate(lower(small, plan), "longest_path")
    needs = PlanMemory(StageCosts(small))
    assert needs.peak(plan) == peak == timeline.peak_memory
    assert needs.fits(plan) == all(timeline.peak_memory <= capacity for capacity in lower(small, plan).capacity)


def test_each_position_must_fit_its_own_devices() -> None:
    # with 1F1B on two stages the first holds two microbatches, the second one: small devices do only behind
    small = problem(nodes=2, devices=1, batch=4)
    small = replace(small, training=replace(small.training, framework="torch"))  # no workspace for the head
    ((node, _),) = small.cluster.nodes
    plan = complete(small, Layout(pipeline=2))
    peak = PlanMemory(StageCosts(small)).peak(plan)
    tight = replace(node, accelerator=replace(node.accelerator, memory=peak - 1))
    fits = []
    for nodes in ((node, tight), (tight, node)):
        cluster = replace(small.cluster, nodes=tuple((each, 1) for each in nodes))
        for placement in ((), (1, 0)):
            fits.append(
                PlanMemory(StageCosts(replace(small, cluster=cluster))).fits(replace(plan, placement=placement))
            )
    assert fits == [True, False, False, True]


def with_devices(*changes: dict[str, float]) -> Problem:
    """Return a small problem on two nodes of a device each, with fields of each device changed."""
    small = problem(nodes=2, devices=1, batch=4)
    ((node, _),) = small.cluster.nodes
    devices = (replace(node.accelerator, name=f"device {n}", **fields) for n, fields in enumerate(changes))
    nodes = tuple((replace(node, accelerator=device), 1) for device in devices)
    return replace(small, cluster=replace(small.cluster, nodes=nodes))


@pytest.mark.parametrize("reserved", [(0.0, 5e9), (5e9, 0.0)])
def test_each_device_counts_what_its_own_runtime_reserves(reserved: tuple[float, float]) -> None:
    # two stages on two nodes whose devices differ in the bytes that the framework takes before the first tensor
    small = with_devices(*({"reserved": size} for size in reserved))
    plan = complete(small, Layout(pipeline=2))
    peaks = [profile.peak for profile in simulate(lower(small, plan)).memory]
    assert max(peaks) > 5e9 > min(peaks)
    assert PlanMemory(StageCosts(small)).peak(plan) == max(peaks)
    for room in (-1, 0):
        # each device has room for what its rank holds, or the fuller one lacks a byte
        memories = [peak + (room if peak == max(peaks) else 0) for peak in peaks]
        pairs = zip(reserved, memories, strict=True)
        tight = with_devices(*({"reserved": size, "memory": memory} for size, memory in pairs))
        assert PlanMemory(StageCosts(tight)).fits(plan) == (room == 0)


@pytest.mark.parametrize("reserved", [(0.0, 5e9), (5e9, 0.0)])
def test_a_server_counts_its_own_device(reserved: tuple[float, float]) -> None:
    # the first of two ranks has the states: what the other one's runtime reserves does not add to them
    small = with_devices(*({"reserved": size} for size in reserved))
    plan = complete(small, Layout(data=2, gradient_reduction="parameter_server"))
    costs = SimulatedCost(small)
    assert costs.peak_memory(plan) == simulate(lower(small, plan)).peak_memory


@given(st.lists(st.tuples(st.builds(BlockMemory, BYTES, BYTES, BYTES, BYTES), st.integers(1, 4)), max_size=4))
def test_runs_of_blocks_hold_what_their_blocks_hold_one_by_one(runs: list[tuple[BlockMemory, int]]) -> None:
    blocks = [memory for memory, count in runs for _ in range(count)]
    kept = sum(block.kept_bytes for block in blocks)
    before = np.cumsum([0, *(block.kept_bytes for block in blocks)])[1:].tolist()
    forward = max((held + block.forward for held, block in zip(before, blocks, strict=True)), default=0)
    rows = zip(before, blocks, strict=True)
    backward = max((held + block.recomputed_bytes + block.backward for held, block in rows), default=0)
    assert stage_memory(runs)[:3] == (kept, max(forward - kept, 0), max(backward - kept, 0))


@pytest.mark.parametrize("zero", [0, 1])
def test_offloaded_states_are_not_on_the_device(zero: int) -> None:
    small = problem(batch=8, precision="bf16")
    needs, plan = PlanMemory(StageCosts(small)), complete(small, Layout(data=8, zero=zero))
    count = StageCosts(small).plan_parameters(plan).elements[0]
    states = 12 * (-(-count // 8) if zero else count)  # AdamW in mixed precision keeps 12 bytes a parameter
    assert needs.peak(plan) - needs.peak(replace(plan, offload=Offloading(optimizer=(1.0,)))) == states
