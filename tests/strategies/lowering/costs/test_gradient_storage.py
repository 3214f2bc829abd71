"""When a rank has memory for gradients."""

from dataclasses import replace

import pytest

from meshwise.simulator.models.experts import Experts
from meshwise.strategies.lowering.costs.optimizer import begin_in_step, in_ddp_buckets
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import WHOLE, Offloading
from meshwise.strategies.plan.problem import Training

from ...problems import problem

TORCH = Training(32, 32, "fp32", framework="torch")
DDP = Layout(data=2)


def storage(layout: Layout, training: Training = TORCH, **model: object) -> tuple[bool, bool]:
    """Return whether gradients are in DistributedDataParallel's buckets, and whether they begin in a step."""
    small = replace(problem(devices=layout.data * layout.tensor * layout.pipeline, **model), training=training)  # type: ignore[arg-type]
    plan = complete(small, layout)
    return in_ddp_buckets(training, plan), begin_in_step(training, plan)


def test_buckets_are_there_all_the_time() -> None:
    assert storage(DDP) == (True, False)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),  # nothing is summed
        Layout(data=2, zero=1),  # shared
        Layout(data=2, tensor=2),  # parameters are cut
        Layout(data=2, overlap_gradients=False),
        Layout(data=2, pipeline=2, schedule="zb1p"),  # backward is split
        Layout(data=2, gradient_reduction="parameter_server"),
    ],
    ids=repr,
)
def test_without_buckets_gradients_begin_with_the_first_backward_of_a_step(layout: Layout) -> None:
    assert storage(layout) == (False, True)


def test_experts_of_their_own_are_cut_parameters() -> None:
    model = {"ffn_kind": "swiglu", "positions": "rotary", "experts": Experts(4, 2, 64)}
    assert storage(Layout(data=4, expert=2), **model) == (False, True)
    assert storage(Layout(data=4), **model) == (True, False)


@pytest.mark.parametrize(("precision", "buckets"), [("fp64", True), ("tf32", True), ("bf16", False), ("fp16", False)])
def test_16_bits_are_too_few_to_sum_in(precision: str, buckets: bool) -> None:
    assert storage(DDP, replace(TORCH, precision=precision)) == (buckets, not buckets)


def test_megatron_keeps_its_buffer_and_frozen_weights_have_no_gradients() -> None:
    assert not storage(Layout(), replace(TORCH, framework="megatron"))[1]
    assert not storage(Layout(), replace(TORCH, frozen=True))[1]


def test_gradients_of_several_versions_and_on_hosts_stay() -> None:
    assert storage(Layout(data=2, pipeline=2, schedule="pipedream")) == (False, False)
    on_host = Layout(data=2, zero=3, offload=Offloading(parameters=WHOLE, optimizer=WHOLE))
    assert storage(on_host) == (False, False)
