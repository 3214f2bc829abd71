"""Gradients that kernels of their own add to those of a step: hand-computed traffic, and what it never changes."""

from dataclasses import replace

import pytest

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS, MEGATRON
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.schedules.schedule import ActionKind

from ...problems import problem

STREAMING = Accelerator("streaming", (("fp32", 1e30), ("fp16", 1e30)), memory=1e12, memory_bandwidth=1e12)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMEWORKS, "adding", replace(MEGATRON, name="adding", adds_gradients=True))


def backward(small: Problem, layout: Layout, framework: str) -> int:
    """Return the ticks of backward of a layer."""
    small = replace(small, training=replace(small.training, framework=framework))
    plan, costs = complete(small, layout), StageCosts(small)
    return costs.stage_cost(plan, 0, costs.machine(plan).ranks[0][0]).blocks[1].backward_ticks


@pytest.mark.usefixtures("adding")
@pytest.mark.parametrize(("precision", "each"), [("fp16", 2 + 2 * 2), ("fp32", 4 + 2 * 4)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_every_parameter_is_read_and_its_sum_read_and_written(precision: str, each: int, tensor: int) -> None:
    # at 1e12 byte/s a byte takes a tick; 64 wide, 256 within, biases of 192, 64, 256 and 64, two norms of 2 * 64
    small = problem(precision=precision, accelerator=STREAMING)
    cut = 64 * 192 + 192 + 64 * 64 + 64 * 256 + 256 + 256 * 64
    whole = 64 + 64 + 4 * 64
    layout = Layout(tensor=tensor, data=8 // tensor)
    plan = complete(small, layout)
    assert StageCosts(small).plan_costs(plan).stages[0].blocks[1].parameters == cut // tensor + whole
    added = backward(small, layout, "adding") - backward(small, layout, "megatron")
    assert added == each * (cut // tensor + whole)


@pytest.mark.usefixtures("adding")
def test_gradients_that_leave_after_every_microbatch_are_not_added() -> None:
    small = problem(precision="fp32", accelerator=STREAMING)
    layout = Layout(data=8, zero=2)
    assert backward(small, layout, "adding") == backward(small, layout, "megatron")


@pytest.mark.usefixtures("adding")
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_both_engines_and_both_granularities_agree(schedule: str) -> None:
    small = problem(precision="bf16", bandwidth=1e11, launch=1e-6)
    small = replace(small, training=replace(small.training, framework="adding"))
    plan = complete(small, Layout(tensor=2, pipeline=2, data=2, schedule=schedule))
    programs = [lower(small, plan, granularity) for granularity in Granularity]
    times = {to_ticks(evaluate(program)) for program in programs for evaluate in (step_time, _simulated)}
    assert len(times) == 1


def _simulated(program: object) -> float:
    return simulate(program).step_time  # type: ignore[arg-type]


@pytest.mark.usefixtures("adding")
def test_they_go_with_the_gradients_of_weights_where_backward_is_split() -> None:
    small = problem(precision="fp16", accelerator=STREAMING)
    small = replace(small, training=replace(small.training, framework="adding"))
    plan, costs = complete(small, Layout(pipeline=8, schedule="zb1p")), StageCosts(small)
    block = costs.stage_cost(plan, 0, costs.machine(plan).ranks[0][0]).blocks[1]
    found = [[s.label for s, _ in block.passes.select(kind).segments] for kind in (ActionKind.INPUT, ActionKind.WEIGHT)]
    added = [[name.split()[2] for name in names if name.startswith("gradients of")] for names in found]
    assert added == [["feed_forward_norm", "input_norm"], ["down", "up", "projection", "qkv"]]
