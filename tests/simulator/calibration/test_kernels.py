"""What was measured, as kernels: seconds by hand on a device whose products reach its peak."""

from dataclasses import replace

import pytest

from meshwise.simulator.calibration.kernels import FusedAttention, Product, Stream
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.machine.kernels import AttentionShape, Matmul, MatmulModel

DEVICE = Accelerator("ideal", (("bf16", 1e12), ("fp8", 2e12)), 1e12, 1e3, launch=0.5)
PRODUCT = Product(Matmul(1, 8, 16, 32), "bf16")
MOVED = 2 * (8 * 32 + 32 * 16)
"""Bytes of both factors: memory bounds every product of this size on this device."""


def test_a_product_moves_its_factors_and_its_result_once() -> None:
    assert PRODUCT.seconds(DEVICE) == pytest.approx(0.5 + (MOVED + 2 * 8 * 16) / 1e3)
    # a sum of gradients in fp32 is read and written: 8 bytes an element
    assert replace(PRODUCT, result_bytes=8).seconds(DEVICE) == pytest.approx(0.5 + (MOVED + 8 * 8 * 16) / 1e3)
    assert replace(PRODUCT, copied_bytes=1e3).seconds(DEVICE) == pytest.approx(PRODUCT.seconds(DEVICE) + 0.5 + 1.0)


def test_a_cast_is_two_kernels_that_read_the_input_twice_and_write_it_narrow() -> None:
    plain = Product(Matmul(1, 8, 16, 32), "fp8")
    more = replace(plain, casts_input=True).seconds(DEVICE) - plain.seconds(DEVICE)
    assert more == pytest.approx(2 * 0.5 + 8 * 32 * (2 + 2 + 1) / 1e3)


def test_gradients_reach_their_own_part_of_the_rate() -> None:
    slower = replace(DEVICE, matmul=MatmulModel(data_gradient=0.5, weight_gradient=0.25))
    plain = PRODUCT.seconds(slower) - 0.5
    assert replace(PRODUCT, gradient="data").seconds(slower) == pytest.approx(0.5 + 2 * plain)
    assert replace(PRODUCT, gradient="weight").seconds(slower) == pytest.approx(0.5 + 4 * plain)


def test_a_stream_is_its_traffic_at_the_bandwidth_of_its_kind() -> None:
    device = replace(DEVICE, kernel_bandwidth=(("norm", 0.5), ("norm_backward", 0.25)))
    assert Stream("norm", 1e3).seconds(device) == pytest.approx(0.5 + 2.0)
    assert Stream("norm", 1e3, backward=True).seconds(device) == pytest.approx(0.5 + 4.0)
    assert Stream("norm", 1e3, backward=True).name == "norm_backward"


def test_attention_both_ways_is_one_after_the_other() -> None:
    shape = AttentionShape(4, 64, 64, 32, 32, 32)
    both = FusedAttention(shape, "bf16", (Pass.FORWARD, Pass.BACKWARD)).seconds(DEVICE)
    assert both == pytest.approx(sum(FusedAttention(shape, "bf16", (way,)).seconds(DEVICE) for way in Pass))
