"""Gradients of a microbatch added to those before: what it costs, and where it costs nothing."""

from dataclasses import replace

import pytest

from simulator.accelerator import Accelerator
from simulator.units import to_ticks
from strategies.completion import complete
from strategies.layout import Layout
from strategies.lowering import StageCosts
from strategies.lowering.accumulation import accumulation
from strategies.lowering.step import Step
from strategies.schedule import ActionKind
from strategies.training import Training

from .problems import problem

NAME = "gradient accumulation"


def steps(framework: str, layout: Layout, kind: ActionKind = ActionKind.BACKWARD) -> list[Step]:
    """Return the additions of gradients in one layer's pass."""
    small = problem()
    own = replace(small, training=replace(small.training, framework=framework))
    layer = StageCosts(own).of(complete(own, layout)).stages[0].blocks[1]
    return [step for step in layer.steps_of(kind) if step.operators == NAME]


@pytest.mark.parametrize(("precision", "each"), [("fp16", 2 + 2 + 2), ("bf16", 2 + 4 + 4), ("fp32", 4 + 4 + 4)])
def test_it_reads_a_gradient_and_the_sum_and_writes_the_sum(precision: str, each: int) -> None:
    device = Accelerator("device", (("fp32", 1e12),), memory=1e12, memory_bandwidth=1e9, launch=1e-6)
    step = accumulation(device, Training(8, 32, precision), elements=1000, tensors=3)
    assert step.ticks == to_ticks(1000 * each / 1e9 + 3e-6)
    assert step.launches == 0  # autograd's, not the host's


def test_where_products_or_shards_add_gradients_no_kernels_do() -> None:
    several, one = Layout(data=8, microbatch=2), Layout(data=8, microbatch=4)
    assert len(steps("torch", several)) == len(steps("megatron_deepspeed", several)) == 1
    assert not steps("torch", one)
    assert not steps("megatron", several)
    assert steps("torch", replace(several, zero=1))
    assert not steps("torch", replace(several, zero=2))


def test_it_goes_with_the_gradients_of_weights() -> None:
    split = Layout(data=4, pipeline=2, microbatch=2, schedule="zb1p")
    assert not steps("torch", split, ActionKind.INPUT)
    assert len(steps("torch", split, ActionKind.WEIGHT)) == 1
