"""Ticks of the optimizer's step by hand: a launch, a kernel a tensor, and the bytes that it reads and writes."""

from dataclasses import replace

import pytest

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.optimizer import Parameters, count_updated_parameters, step_bytes
from meshwise.strategies.lowering.timing import HOST_ADAM, host_ticks, norm_ticks, optimizer_ticks
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import UPDATE_CHUNKS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

from ..problems import problem

SLOW = Accelerator("slow", (("fp32", 1e12),), 1e12, 1e6, launch=0.5, optimizer_launch=1e-3)
"""1 MB/s, half a second for the first kernel, and a millisecond for each tensor."""
TRAINING = Training(32, 32, "fp32")
HELD = Parameters(1001, 10)


def plan(data: int = 1, tensor: int = 1, zero: int = 0) -> Plan:
    return complete(problem(devices=data * tensor), Layout(data=data, tensor=tensor, zero=zero))


def seconds(plan: Plan, held: Parameters = HELD, part: float = 1.0, training: Training = TRAINING) -> float:
    return optimizer_ticks(SLOW, training, plan, held, part) / to_ticks(1.0)


def test_a_step_takes_a_launch_a_kernel_a_tensor_and_its_bytes() -> None:
    # 4 bytes of gradient, 2 moments of 4 bytes in and out, 4 bytes of parameter: 4 + 2 * 8 + 4 = 24
    assert step_bytes(TRAINING, plan(data=4), HELD) == 24 * 1001
    assert seconds(plan(data=4)) == pytest.approx(0.5 + 10 * 1e-3 + 0.024 * 1.001)


def test_ranks_that_share_states_update_a_share_of_elements_and_of_tensors() -> None:
    # 1001 elements over 4 ranks are at most 251, 10 tensors 3
    shared = plan(data=4, zero=1)
    assert [count_updated_parameters(shared, elements) for elements in (1000, 1001)] == [250, 251]
    assert seconds(shared) == pytest.approx(0.5 + 3 * 1e-3 + 24 * 251e-6)


def test_a_part_of_the_update_takes_its_part_of_bytes_and_of_tensors() -> None:
    # a quarter of 10 tensors are 3 kernels
    assert seconds(plan(data=4), part=0.25) == pytest.approx(0.5 + 3 * 1e-3 + 24 * 1001e-6 / 4)


def test_weights_that_layers_multiply_by_in_fp8_are_read_and_written_twice_in_one_byte() -> None:
    # of 500 weights: 2 bytes read, 2 copies of 1 byte written
    fp8 = replace(TRAINING, precision="fp8")
    cast = seconds(plan(), HELD._replace(quantised_elements=500), training=fp8) - seconds(plan(), training=fp8)
    assert cast == pytest.approx(500 * (2 + 2) / 1e6)
    assert seconds(plan(), HELD._replace(quantised_elements=500)) == seconds(plan())


def test_the_update_of_a_cut_parameter_takes_a_launch_more_a_tensor() -> None:
    slower = replace(SLOW, sharded_launch=0.25)
    for each, more in ((plan(tensor=2), 10 * 0.25), (plan(data=2), 0.0)):
        without, with_launch = (optimizer_ticks(device, TRAINING, each, HELD) for device in (SLOW, slower))
        assert with_launch - without == pytest.approx(to_ticks(more))


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_that_share_gradients_or_parameters_have_a_part_of_every_tensor(zero: int) -> None:
    # of 1001 elements over 4 ranks at most 251, in parts of all 10 tensors, each cut
    shared, slower = plan(data=4, zero=zero), replace(SLOW, sharded_launch=0.25)
    assert seconds(shared) == pytest.approx(0.5 + 10 * 1e-3 + 24 * 251e-6)
    for data, tensors in ((4, 10), (2, 10), (1, 0)):  # one rank has all of each, and cuts none
        each = plan(data=data, zero=zero)
        more = optimizer_ticks(slower, TRAINING, each, HELD) - optimizer_ticks(SLOW, TRAINING, each, HELD)
        assert more == pytest.approx(to_ticks(tensors * 0.25))


def test_the_norm_reads_each_gradient_that_the_device_has_once() -> None:
    bare = replace(SLOW, launch=0.0, optimizer_launch=0.0)
    for each, elements in ((plan(data=4), 1001), (plan(data=4, zero=1), 251)):
        assert norm_ticks(bare, TRAINING, each, HELD) == to_ticks(4 * elements / 1e6)
        assert norm_ticks(bare, TRAINING, each, HELD, 51) == to_ticks(4 * (elements - 51) / 1e6)


def test_a_host_of_unknown_memory_takes_so_long_for_each_parameter_of_a_chunk() -> None:
    assert host_ticks(8000) == to_ticks(8000 / UPDATE_CHUNKS * HOST_ADAM)
