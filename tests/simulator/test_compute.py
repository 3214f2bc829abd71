"""Operator times by hand on an ideal accelerator, and monotone on a real one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.accelerator import Accelerator, MatmulModel
from simulator.catalog import accelerator
from simulator.compute import Matmul, Pass, matmul_time, operator_time, optimizer_time
from simulator.models.transformer import Transformer, build

IDEAL = Accelerator("ideal", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e6, launch=0.5)
SPEC = Transformer(2, 64, 4, 4, 256, 128)
LAYER = build(SPEC, 32, "fp32").blocks[1]
OPERATOR = {operator.name: operator for operator in LAYER.operators}


def time(name: str, direction: Pass, device: Accelerator = IDEAL) -> float:
    return operator_time(device, LAYER, OPERATOR[name], dict(OPERATOR[name].dims), direction)


def test_a_matmul_is_bound_by_the_slower_of_compute_and_memory() -> None:
    # up: 32 x 64 times 64 x 256: 2 * 32 * 64 * 256 = 1,048,576 FLOP = 1.049 ms at 1 GFLOP/s;
    # 4 * (32 * 64 + 64 * 256 + 32 * 256) = 106,496 bytes = 106 ms at 1 MB/s
    assert time("up", Pass.FORWARD) == pytest.approx(0.5 + 0.106496)
    fast = Accelerator("fast memory", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e12)
    assert time("up", Pass.FORWARD, fast) == pytest.approx(1.048576e-3)
    assert time("up", Pass.BACKWARD, fast) == pytest.approx(2 * 1.048576e-3)


def test_a_norm_moves_its_tensors_once() -> None:
    # forward reads and writes 32 * 64 * 4 = 8192 bytes each; backward reads the saved input and the
    # gradient and writes one: three times
    assert time("input_norm", Pass.FORWARD) == pytest.approx(0.5 + 2 * 8192 / 1e6)
    assert time("input_norm", Pass.BACKWARD) == pytest.approx(0.5 + 3 * 8192 / 1e6)


def test_waves_round_up() -> None:
    waves = Accelerator("waves", (("fp32", 1e9),), 1e9, 1e15, matmul=MatmulModel(tile=(10, 10), units=4))
    # 4 tiles of 10 x 10 are one wave, 5 tiles are two
    one = matmul_time(waves, "fp32", Matmul(1, 20, 20, 7))
    assert matmul_time(waves, "fp32", Matmul(1, 50, 10, 7)) == pytest.approx(2 * one)


def test_optimizer_reads_and_writes_state_once() -> None:
    assert optimizer_time(IDEAL, 1e6, 30.0) == pytest.approx(0.5 + 30.0)


@given(st.integers(64, 8192), st.integers(64, 8192), st.integers(64, 8192), st.floats(1, 3))
def test_no_matmul_beats_the_peak_and_more_work_takes_longer(m: int, n: int, k: int, factor: float) -> None:
    device = accelerator("a100-80gb")
    product = Matmul(1, m, n, k)
    seconds = matmul_time(device, "bf16", product)
    assert product.flops / seconds <= device.peak("bf16")
    assert matmul_time(device, "bf16", Matmul(1, int(m * factor), n, k)) >= seconds
