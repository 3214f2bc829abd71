"""What a device is timed with: kernels do what their rows say, and the project reads every row."""

import json

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from meshwise.executor.calibration.device_kernels import (  # noqa: E402
    build_attention,
    build_batched_product,
    build_cross_entropy,
    build_device_copy,
    build_embedding,
    build_host_copy,
    build_optimizer_step,
    build_product,
    build_run,
    build_stream,
    has_fp8,
)
from meshwise.simulator.calibration.kernel_rows import Row, read_rows  # noqa: E402
from meshwise.simulator.calibration.kernels import FusedAttention, Product  # noqa: E402
from meshwise.simulator.calibration.kernels import Stream as Streamed  # noqa: E402

MACHINE = {"source_id": "s", "source_repo": "meshwise calibrate", "accelerator": "H200 SXM"}


def read(kernel, **fields) -> Row:
    used, skipped = read_rows([json.dumps({**MACHINE, **kernel.fields, "time_us": 1.0, **fields}).encode()])
    assert not skipped, skipped
    return used[0]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["fwd", "dgrad", "wgrad"]))
def test_a_product_is_of_the_sizes_in_its_row(m: int, n: int, k: int, direction: str) -> None:
    kernel = build_product("fp16", m, n, k, direction)
    found = read(kernel).kernel
    assert isinstance(found, Product)
    assert tuple(kernel.prepare("cpu")().shape) == (found.matmul.m, found.matmul.n)
    assert found.matmul.flops == 2 * m * n * k  # all three passes of a layer have 2 m n k
    assert found.gradient == {"fwd": "", "dgrad": "data", "wgrad": "weight"}[direction]


def test_products_of_a_layer_have_the_shapes_of_its_gradients() -> None:
    layer = torch.nn.Linear(5, 3, bias=False)  # k = 5, n = 3
    x = torch.randn(7, 5, requires_grad=True)
    layer(x).sum().backward()
    assert build_product("fp32", 7, 3, 5, "dgrad").prepare("cpu")().shape == x.grad.shape
    assert build_product("fp32", 7, 3, 5, "wgrad").prepare("cpu")().shape == layer.weight.grad.shape


def test_a_batch_of_products() -> None:
    kernel = build_batched_product("fp32", 2, 3, 4, 5)
    assert tuple(kernel.prepare("cpu")().shape) == (2, 3, 4)
    assert read(build_batched_product("bf16", 2, 3, 4, 5)).kernel.matmul.flops == 2 * 2 * 3 * 4 * 5


@pytest.mark.skipif(not has_fp8("cpu"), reason="this torch has no product in fp8 for cores: 2.13")
def test_fp8_products_give_bf16() -> None:
    assert build_product("fp8", 32, 16, 48).prepare("cpu")().dtype is torch.bfloat16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_attention_is_the_same_in_one_kernel_and_in_several(causal: bool, backward: bool) -> None:
    def result(fused: bool):
        torch.manual_seed(3)  # the same queries, keys and values
        kernel = build_attention("fp32", (2, 4, 4, 16, 8), causal=causal, backward=backward, fused=fused)
        found = kernel.prepare("cpu")()
        return found if backward else [found]

    for one, other in zip(result(True), result(False), strict=True):
        torch.testing.assert_close(one, other)


def test_attention_rows_are_read_as_the_fused_kernel_alone() -> None:
    found = read(build_attention("bf16", (2, 8, 2, 64, 16), backward=True)).kernel
    assert isinstance(found, FusedAttention)
    assert (found.shape.heads, found.shape.queries) == (2 * 8, 64)  # of every sequence and head
    row = {**MACHINE, **build_attention("bf16", (2, 8, 8, 64, 16), fused=False).fields, "time_us": 1.0}
    used, skipped = read_rows([json.dumps(row).encode()])
    assert not used and "no single kernel" in skipped[0].reason


def test_one_direction_is_autograds() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (found,) = build_run(torch.tanh, [x], backward=True)()
    torch.testing.assert_close(found, 1 - torch.tanh(x.detach()) ** 2)
    torch.testing.assert_close(build_run(torch.tanh, [x], backward=False)(), torch.tanh(x))


def test_traffic_of_rows_by_hand() -> None:
    # 2^26 elements of 2 bytes: GELU reads and writes them, its backward reads two and writes one; dropout forward
    # writes a mask of a byte too
    elements = 2**26
    for name, backward, nbytes in (("gelu", False, 4), ("gelu", True, 6), ("dropout", False, 5), ("softmax", True, 6)):
        found = read(build_stream(name, "bf16", elements, backward=backward)).kernel
        assert isinstance(found, Streamed)
        assert (found.traffic, found.backward) == (nbytes * elements, backward)
    assert read(build_optimizer_step(2**22)).kernel.traffic == 28 * 2**22


def test_table_and_loss() -> None:
    assert tuple(build_embedding("fp32", 5, 3, 7).prepare("cpu")().shape) == (5, 3)
    (gradient,) = build_embedding("fp32", 5, 3, 7, backward=True).prepare("cpu")()
    assert tuple(gradient.shape) == (7, 3)
    assert float(gradient.sum()) == 5 * 3  # every looked-up element has a gradient of 1
    (gradient,) = build_cross_entropy("fp32", 5, 7, backward=True).prepare("cpu")()
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(5))  # softmax less one: rows add up to 0


def test_copies_bring_every_byte() -> None:
    for kernel in (build_device_copy(100), build_host_copy(100), build_host_copy(100, to_device=False, pinned=False)):
        assert int(kernel.prepare("cpu")().sum()) == 100
