"""Operator times by hand on an ideal accelerator, and monotone on a real one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.catalog import accelerator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import (
    Pass,
    matmul_time,
    operator_launches,
    operator_time,
    optimizer_time,
    streaming_kind,
    weight_gradient_time,
)
from meshwise.simulator.machine.kernels import Matmul, MatmulModel
from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model, build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.vision import ResNet
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind

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


@pytest.mark.parametrize(("dtype", "vocab", "times"), [("fp16", 127, 1.9), ("fp16", 126, 1.0), ("fp32", 127, 1.0)])
def test_products_of_odd_rows_of_two_bytes_take_longer(dtype: str, vocab: int, times: float) -> None:
    # logits: 32 x 64 times 64 x vocab, 2 * 32 * 64 * vocab FLOP at 1 GFLOP/s, and twice as many backward
    head = build(replace(SPEC, vocab=vocab), 32, dtype).blocks[-1]
    logits = next(operator for operator in head.operators if operator.name == "logits")
    fast = Accelerator("fast memory", ((dtype, 1e9),), memory=1e9, memory_bandwidth=1e15)
    forward, backward = (operator_time(fast, head, logits, dict(logits.dims), direction) for direction in Pass)
    assert forward == pytest.approx(times * 2 * 32 * 64 * vocab / 1e9, rel=1e-5)
    assert backward == pytest.approx(2 * forward)


def test_a_norm_moves_its_tensors_once() -> None:
    # forward reads and writes 32 * 64 * 4 = 8192 bytes each; backward reads the saved input and the
    # gradient and writes one: three times
    assert time("input_norm", Pass.FORWARD) == pytest.approx(0.5 + 2 * 8192 / 1e6)
    assert time("input_norm", Pass.BACKWARD) == pytest.approx(0.5 + 3 * 8192 / 1e6)


@pytest.mark.parametrize("direction", Pass)
def test_a_dropout_writes_its_mask_forward_and_reads_it_backward(direction: Pass) -> None:
    # 32 x 64 elements: forward reads two of 4 bytes each, writes one and a mask of 1; backward reads the mask and a
    # gradient and writes two: 3 * 8192 + 2048 bytes either way
    block = build(replace(SPEC, dropout=True), 32, "fp32").blocks[1]
    found = next(each for each in block.operators if each.name == "attention_residual")
    assert operator_time(IDEAL, block, found, dict(found.dims), direction) == pytest.approx(0.5 + 26_624 / 1e6)


def test_an_activation_reaches_its_own_bandwidth_and_a_sum_that_of_elementwise() -> None:
    # activation: 32 x 256 in and out, 4 bytes: 65,536 bytes, backward 98,304; a residual reads two of 32 x 64: 24,576
    kinds = (("elementwise", 0.8), ("activation", 0.5), ("activation_backward", 0.25))
    device = replace(IDEAL, launch=0.0, kernel_bandwidth=kinds)
    assert time("activation", Pass.FORWARD, device) == pytest.approx(0.065536 / 0.5)
    assert time("activation", Pass.BACKWARD, device) == pytest.approx(0.098304 / 0.25)
    assert time("attention_residual", Pass.FORWARD, device) == pytest.approx(0.024576 / 0.8)


@pytest.mark.parametrize("known", ["elementwise", "activation"])
def test_where_one_of_activations_and_sums_was_measured_it_holds_for_both(known: str) -> None:
    kinds = ((known, 0.5), (f"{known}_backward", 0.25))
    device = replace(IDEAL, launch=0.0, kernel_bandwidth=kinds)
    for name, moved in (("activation", (0.065536, 0.098304)), ("attention_residual", (0.024576, 0.024576))):
        assert time(name, Pass.FORWARD, device) == pytest.approx(moved[0] / 0.5)
        assert time(name, Pass.BACKWARD, device) == pytest.approx(moved[1] / 0.25)


@pytest.mark.parametrize(
    ("operator", "kind", "relative"),
    [
        ("activation", "gated_activation", "activation"),
        ("activation", "gated_activation", "elementwise"),
        ("rotary", "rotary", "elementwise"),
        ("input_norm", "rms_norm", "norm"),
    ],
)
def test_kernels_of_a_llama_have_their_own_bandwidth_and_without_it_that_of_the_nearest_kind(
    operator: str, kind: str, relative: str
) -> None:
    spec = Transformer(1, 64, 4, 4, 256, 100, ffn_kind="swiglu", positions="rotary")
    block = next(block for block in build(spec, 32, "fp32").blocks if block.layer)
    found = next(each for each in block.operators if each.name == operator)
    assert streaming_kind(found) == kind

    def seconds(**shares: float) -> float:
        device = replace(IDEAL, launch=0.0, kernel_bandwidth=tuple(shares.items()))
        return operator_time(device, block, found, dict(found.dims), Pass.FORWARD)

    # at a quarter of the memory bandwidth it takes four times as long, whatever else is known
    assert seconds(**{kind: 0.25, relative: 0.5}) == pytest.approx(4 * seconds())
    assert seconds(**{relative: 0.5}) == pytest.approx(2 * seconds())


def test_a_tensor_cut_into_several_is_a_copy_and_no_rotary_positions() -> None:
    halves = Operator("chunk", OperatorKind.ELEMENTWISE, (("sequence", 8),), ("x",), ("left", "right"))
    assert streaming_kind(halves) == "elementwise"
    assert streaming_kind(replace(halves, inputs=("x", "y"))) == "rotary"


def test_waves_round_up() -> None:
    waves = Accelerator("waves", (("fp32", 1e9),), 1e9, 1e15, matmul=MatmulModel(tiles=((10, 10),), units=4))
    # 4 tiles of 10 x 10 are one wave, 5 tiles are two
    one = matmul_time(waves, "fp32", Matmul(1, 20, 20, 7))
    assert matmul_time(waves, "fp32", Matmul(1, 50, 10, 7)) == pytest.approx(2 * one)


def test_processors_without_a_tile_share_the_reduction_of_others() -> None:
    # 1 tile of 10 x 10 on 4 processors: each reduces 2 of 8, a quarter of the time of 4 tiles; 2 tiles: a half;
    # 3 tiles leave one processor idle and take as long as 4
    waves = Accelerator("waves", (("fp32", 1e9),), 1e9, 1e15, matmul=MatmulModel(tiles=((10, 10),), units=4))
    one, two, three, four = (matmul_time(waves, "fp32", Matmul(1, 10, 10 * tiles, 8)) for tiles in (1, 2, 3, 4))
    assert (one, two, three) == pytest.approx((four / 4, four / 2, four))


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb"])
def test_gradients_of_a_small_kernel_are_not_slower_than_its_forward_by_the_number_of_processors(name: str) -> None:
    # 3 x 3 from 64 to 64 channels on 256 images of 56 x 56: weights' gradients are one product of [576, 802,816] and
    # [802,816, 64], 5 tiles; backward does twice the work of forward, some of it at a lower rate
    block, operator = found(ResNet((3, 4, 6, 3)), "stage_1", "convolution")
    sizes = {dim: 256 if dim == "batch" else size for dim, size in operator.dims}
    forward, backward = (operator_time(accelerator(name), block, operator, sizes, each) for each in Pass)
    assert 1 < backward / forward < 4


def test_optimizer_reads_and_writes_state_once() -> None:
    assert optimizer_time(IDEAL, 1e6 * 30.0) == pytest.approx(0.5 + 30.0)


@given(st.integers(64, 8192), st.integers(64, 8192), st.integers(64, 8192), st.floats(1, 3))
def test_no_matmul_beats_the_peak_and_more_work_takes_longer(m: int, n: int, k: int, factor: float) -> None:
    device = accelerator("a100-80gb")
    product = Matmul(1, m, n, k)
    seconds = matmul_time(device, "bf16", product)
    assert product.flops / seconds <= device.peak("bf16")
    assert matmul_time(device, "bf16", Matmul(1, int(m * factor), n, k)) >= seconds


COMPUTE = Accelerator("infinite memory", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e30)
MEMORY = Accelerator("infinite compute", (("fp32", 1e30),), memory=1e9, memory_bandwidth=1e6)
MIXED = Transformer(1, 16, 2, 2, 32, 64, ffn_kind="swiglu", positions="rotary", experts=Experts(8, 2, 32))


def found(spec: Model, block: str, name: str) -> tuple[Block, Operator]:
    blocks = {each.name: each for each in build(spec, 32, "fp32").blocks}
    return blocks[block], next(operator for operator in blocks[block].operators if operator.name == name)


def seconds(device: Accelerator, spec: Model, place: str, direction: Pass = Pass.FORWARD, **local: int) -> float:
    block, operator = found(spec, *place.split("."))
    return operator_time(device, block, operator, dict(operator.dims) | local, direction)


def test_a_convolution_is_the_product_of_an_implicit_gemm() -> None:
    # the 3 x 3 convolution of stage 2's first bottleneck: 28 x 28 points out, 128 channels in and out
    place, spec = "stage_2_first.convolution", ResNet((1, 1))
    flops = 2 * 28 * 28 * 128 * 128 * 9
    assert seconds(COMPUTE, spec, place) == pytest.approx(flops / 1e9)
    assert seconds(COMPUTE, spec, place, Pass.BACKWARD) == pytest.approx(2 * flops / 1e9)
    assert seconds(COMPUTE, spec, place, batch=3) == pytest.approx(3 * flops / 1e9)
    # backward reduces over 128 channels out for the image, and over 28 x 28 points for the kernel
    short = replace(COMPUTE, matmul=MatmulModel(half_k=100))
    expected = flops / 1e9 * ((128 + 100) / 128 + (28 * 28 + 100) / (28 * 28))
    assert seconds(short, spec, place, Pass.BACKWARD) == pytest.approx(expected)
    # it reads the image of 56 x 56 and the kernel, and writes 28 x 28: no patches
    elements = 128 * 56 * 56 + 128 * 128 * 9 + 128 * 28 * 28
    assert seconds(MEMORY, spec, place) == pytest.approx(4 * elements / 1e6)
    assert seconds(MEMORY, spec, place, Pass.BACKWARD) == pytest.approx(2 * 4 * elements / 1e6)
    assert operator_launches(found(spec, *place.split("."))[1], Pass.BACKWARD) == 2


def test_experts_are_a_product_each() -> None:
    # 32 tokens to 2 of 8 experts: 8 tokens an expert through 16 x 64 (two matrices of 32)
    assert seconds(COMPUTE, MIXED, "layers.expert_up") == pytest.approx(8 * 2 * 8 * 16 * 64 / 1e9)
    elements = 8 * (8 * 16 + 16 * 64 + 8 * 64)
    assert seconds(MEMORY, MIXED, "layers.expert_up") == pytest.approx(4 * elements / 1e6)
    # a rank with two of the experts takes a quarter
    assert seconds(COMPUTE, MIXED, "layers.expert_up", experts=2) == pytest.approx(2 * 2 * 8 * 16 * 64 / 1e9)


def test_imbalance_slows_the_rank_with_the_most_loaded_expert() -> None:
    # at twice the mean, 16 tokens in the place of 8; the other 7 experts share 48 tokens, 48 / 7 each
    uneven = Transformer(
        1, 16, 2, 2, 32, 64, ffn_kind="swiglu", positions="rotary", experts=Experts(8, 2, 32, imbalance=2.0)
    )
    each = 2 * 16 * 64 / 1e9
    for place in ("layers.expert_up", "layers.expert_activation"):
        one, even = (seconds(COMPUTE, spec, place, experts=1) for spec in (uneven, MIXED))
        assert one == pytest.approx(2 * even)
    assert seconds(COMPUTE, uneven, "layers.expert_up", experts=1) == pytest.approx(16 * each)
    # a rank with two takes 16 + 48 / 7 tokens, 11.4 an expert, in 12 slots; one with all takes what there is
    assert seconds(COMPUTE, uneven, "layers.expert_up", experts=2) == pytest.approx(2 * 12 * each)
    assert seconds(COMPUTE, uneven, "layers.expert_up") == seconds(COMPUTE, MIXED, "layers.expert_up")
    assert seconds(COMPUTE, uneven, "layers.router") == seconds(COMPUTE, MIXED, "layers.router")


def test_routing_moves_its_tensors_once() -> None:
    # dispatch reads 32 tokens of 16 numbers and 2 indices of 8 bytes each, and writes 64 routed tokens
    read, indices, written = 4 * 32 * 16, 8 * 32 * 2, 4 * 64 * 16
    assert seconds(MEMORY, MIXED, "layers.dispatch") == pytest.approx((read + indices + written) / 1e6)
    # combine reads those, a weight and an index for each, and writes the tokens
    assert seconds(MEMORY, MIXED, "layers.combine") == pytest.approx((written + 4 * 64 + indices + read) / 1e6)


def test_an_embedding_bag_reads_the_rows_of_its_bag_and_no_others() -> None:
    # 5 rows of 16 numbers read, one written, whatever the table's million rows; backward the other way
    spec = Dlrm((1_000_000,), (5,), embedding=16, dense=4, bottom=(16,), top=(1,))
    for direction in Pass:
        assert seconds(MEMORY, spec, "embedding.bag_0", direction) == pytest.approx(4 * 16 * (5 + 1) / 1e6)


def test_batch_norm_and_pooling_move_their_tensors_once() -> None:
    spec = ResNet((1,))
    image = 4 * 64 * 56 * 56
    assert seconds(MEMORY, spec, "stage_1_first.reduce_norm") == pytest.approx(2 * image / 1e6)
    # 3 x 3 maxima of 112 x 112 points and where they stand, 8 bytes each
    assert seconds(MEMORY, spec, "stem.pooling") == pytest.approx((4 * image + image + 2 * image) / 1e6)


def weight_gradient(device: Accelerator, spec: Model, place: str, **more: int) -> float:
    block, operator = found(spec, *place.split("."))
    return weight_gradient_time(device, block, operator, dict(operator.dims), **more)


def test_a_view_takes_no_time_and_launches_nothing() -> None:
    view = replace(OPERATOR["input_norm"], kind=OperatorKind.VIEW)
    for direction in Pass:
        assert operator_time(IDEAL, LAYER, view, dict(view.dims), direction) == 0
        assert operator_launches(view, direction) == 0


def test_gradients_of_weights_are_one_of_two_products_all_of_an_embedding_and_none_of_a_norm() -> None:
    # up: 64 -> 256 of 32 tokens. The gradient of its weight reduces over tokens: 32 and 10 more to begin and end
    short = replace(COMPUTE, launch=0.5, matmul=MatmulModel(half_k=10))
    flops = 2 * 32 * 64 * 256
    assert weight_gradient(short, SPEC, "layers.up") == pytest.approx(0.5 + flops / 1e9 * (32 + 10) / 32)
    both = seconds(short, SPEC, "layers.up", Pass.BACKWARD)
    assert both == pytest.approx(2 * 0.5 + flops / 1e9 * ((32 + 10) / 32 + (256 + 10) / 256))
    bag = Dlrm((100,), (5,), embedding=16, dense=4, bottom=(16,), top=(1,))
    assert weight_gradient(MEMORY, bag, "embedding.bag_0") == seconds(MEMORY, bag, "embedding.bag_0", Pass.BACKWARD)
    assert weight_gradient(IDEAL, SPEC, "layers.input_norm") == 0  # comes with the gradient of its input
    assert weight_gradient(IDEAL, SPEC, "layers.activation") == 0  # has no parameters


def test_a_gradient_that_is_added_to_a_wider_sum_reads_and_writes_it() -> None:
    # up, in place of writing 64 * 256 gradients of 4 bytes, reads and writes sums of 8 bytes: 16 - 4 more of each
    more = 64 * 256 * (2 * 8 - 4) / 1e6
    block, operator = found(SPEC, "layers", "up")
    plain, added = (
        operator_time(MEMORY, block, operator, dict(operator.dims), Pass.BACKWARD, gradient_bytes=size)
        for size in (0, 8)
    )
    assert added - plain == pytest.approx(more)
    apart = [weight_gradient(MEMORY, SPEC, "layers.up", gradient_bytes=size) for size in (0, 8)]
    assert apart[1] - apart[0] == pytest.approx(more)
    # forward makes no gradients
    times = [
        operator_time(MEMORY, block, operator, dict(operator.dims), Pass.FORWARD, gradient_bytes=s) for s in (0, 8)
    ]
    assert times[0] == times[1]


def test_a_product_in_fp8_casts_first_and_then_moves_a_byte_for_each_operand() -> None:
    # up in bf16: 32 tokens, 64 -> 256. Forward casts the input: 2 bytes read and 2 copies of 1 byte written, with half
    # of the bandwidth; the product reads input and weight in 1 byte and writes the result in 2
    device = Accelerator("d", (("fp8", 1e30),), 1e9, 1e6, launch=0.5, kernel_bandwidth=(("elementwise", 0.5),))
    block = build(SPEC, 32, "bf16").blocks[1]
    operator = next(each for each in block.operators if each.name == "up")
    x, weight, result = 32 * 64, 64 * 256, 32 * 256
    forward, backward = (
        operator_time(device, block, operator, dict(operator.dims), each, quantised=True) for each in Pass
    )
    assert forward == pytest.approx(2 * 0.5 + x * (2 + 2) / 0.5e6 + (x + weight + 2 * result) / 1e6)
    # backward casts the gradient of the result; each of its products reads 1 byte of two and writes 2 of the third
    moved = (result + weight + 2 * x) + (result + x + 2 * weight)
    assert backward == pytest.approx(3 * 0.5 + result * (2 + 2) / 0.5e6 + moved / 1e6)


def test_a_batch_of_products_runs_at_its_own_rate_and_experts_do_not() -> None:
    # 3 products of 2 * 10 * 10 * 10 = 2,000 FLOP at 1 GFLOP/s, half of which a batch reaches
    device = replace(COMPUTE, matmul=MatmulModel(batched=0.5))
    assert matmul_time(device, "fp32", Matmul(3, 10, 10, 10)) == pytest.approx(2 * 3 * 2e-6)
    assert matmul_time(device, "fp32", Matmul(1, 10, 10, 10)) == pytest.approx(2e-6)
    assert matmul_time(device, "fp32", Matmul(3, 10, 10, 10), grouped=True) == pytest.approx(3 * 2e-6)


def test_both_products_of_backward_may_run_at_rates_of_their_own() -> None:
    device = replace(COMPUTE, matmul=MatmulModel(data_gradient=0.5, weight_gradient=0.25))
    forward = seconds(COMPUTE, SPEC, "layers.up")
    assert seconds(device, SPEC, "layers.up") == forward
    assert seconds(device, SPEC, "layers.up", Pass.BACKWARD) == pytest.approx(forward * (1 / 0.5 + 1 / 0.25))


def test_the_update_launches_a_kernel_for_each_tensor_besides() -> None:
    device = replace(IDEAL, optimizer_launch=0.25, kernel_bandwidth=(("optimizer", 0.5),))
    assert optimizer_time(device, 1e6, 3) == pytest.approx(0.5 + 3 * 0.25 + 2.0)
