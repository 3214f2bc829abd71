"""The optimizer's step by hand: what it keeps, reads and writes, and when a rank has memory for gradients."""

from dataclasses import replace

import pytest

from meshwise.simulator.models.experts import Experts
from meshwise.strategies.lowering.costs.optimizer import (
    Parameters,
    allocates_gradients,
    count_updated_parameters,
    state_bytes,
    step_bytes,
    step_temporary_bytes,
    uses_ddp_buckets,
)
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, EXPERT, Axis, Mesh
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

from ...problems import problem

TRAINING = Training(32, 32, "fp32")
HELD = Parameters(1001, 10)


def plan(data: int = 1, tensor: int = 1, zero: int = 0) -> Plan:
    return complete(problem(devices=data * tensor), Layout(data=data, tensor=tensor, zero=zero))


def test_gradients_are_read_states_read_and_written_and_parameters_written() -> None:
    # 4 bytes of gradient, 2 moments of 4 bytes in and out, 4 bytes of parameter: 4 + 2 * 8 + 4 = 24
    assert step_bytes(TRAINING, plan(data=4), HELD) == 24 * 1001
    assert state_bytes(TRAINING, plan(data=4), HELD) == 8 * 1001


def test_rows_and_columns_of_a_factored_moment_are_states() -> None:
    # Adafactor keeps no moment of the size of a parameter, and 4 bytes for each of 70 rows and columns
    factored = replace(TRAINING, optimizer="adafactor")
    held = HELD._replace(factored_elements=70)
    assert state_bytes(factored, plan(), held) == 4 * 70
    assert step_bytes(factored, plan(), held) == 1001 * (4 + 4) + 2 * 4 * 70


def test_experts_are_shared_among_the_ranks_that_hold_the_same() -> None:
    # of 1001 elements 601 are of experts: the other 400 lie over 4 ranks, those over the 2 that hold the same experts
    shared = replace(plan(data=4, zero=1), mesh=Mesh((Axis(DATA, 2), Axis(EXPERT, 2))))
    assert count_updated_parameters(shared, 1001, 601) == 400 // 4 + 301


TORCH = Training(32, 32, "fp32", framework="torch")
DDP = Layout(data=2)


def storage(layout: Layout, training: Training = TORCH, **model: object) -> tuple[bool, bool]:
    """Return whether gradients are in DistributedDataParallel's buckets, and whether they begin in a step."""
    small = replace(problem(devices=layout.data * layout.tensor * layout.pipeline, **model), training=training)  # type: ignore[arg-type]
    plan = complete(small, layout)
    return uses_ddp_buckets(training, plan), allocates_gradients(training, plan)


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
    on_host = Layout(data=2, zero=3, offload=Offloading(parameters=WHOLE_FRACTION, optimizer=WHOLE_FRACTION))
    assert storage(on_host) == (False, False)


def test_a_step_copies_gradients_and_takes_roots_of_moments() -> None:
    """Of 100 parameters on two ranks each updates 50: 4 bytes a root, and 4 a copy of a 16-bit gradient."""
    shares = plan(data=2, zero=1)
    training = Training(8, 32, framework="unknown", gradient_precision="same")
    sizes = {
        name: step_temporary_bytes(replace(training, **change), shares, Parameters(100, 1))
        for name, change in {
            "unknown": {},
            "fp32 sums": {"gradient_precision": "fp32"},
            "torch": {"framework": "torch"},
            "sgd": {"optimizer": "sgd"},
            "megatron": {"framework": "megatron"},
            "frozen": {"frozen": True},
        }.items()
    }
    assert sizes == {"unknown": 400, "fp32 sums": 200, "torch": 200, "sgd": 200, "megatron": 0, "frozen": 0}
