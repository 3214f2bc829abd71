"""Rows become kernels, or say why not; what is no row is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.calibration.kernel_rows import MAX_ROW_BYTES, Row, RowError, Skipped, read_rows
from meshwise.simulator.calibration.kernels import FusedAttention, Product, Stream
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.machine.kernels import Matmul

SAMPLE = Path(__file__).parent / "kernels.jsonl"
GEMM: dict[str, Any] = {
    "source_id": "s",
    "source_repo": "someone/kernels",
    "accelerator": "A100 SXM",
    "dtype": "bf16",
    "kernel": "gemm",
    "m": 64,
    "n": 128,
    "k": 256,
    "time_us": 10.0,
}
ATTENTION = {
    **GEMM,
    "kernel": "attention_fwd",
    "batch": 2,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "seq_q": 512,
    "seq_kv": 512,
    "causal": True,
}


def line(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (GEMM | changes).items() if value is not None}).encode()


def one(**changes: Any) -> Row:
    used, skipped = read_rows([line(**changes)])
    assert not skipped
    return used[0]


def reason(**changes: Any) -> str:
    used, skipped = read_rows([line(**changes)])
    assert not used
    return skipped[0].reason


def product(row: Row) -> Product:
    assert isinstance(row.kernel, Product)
    return row.kernel


def test_every_row_is_used_or_skipped_with_a_reason() -> None:
    lines = SAMPLE.read_bytes().splitlines()
    used, skipped = read_rows(lines)
    assert sorted(row.line for row in [*used, *skipped]) == list(range(1, len(lines) + 1))
    assert all(row.reason for row in skipped)
    assert {row.device for row in used} == {"a100-80gb", "h100-80gb"}


def test_a_product_is_as_stated_and_gradients_of_forward_sizes_are_turned() -> None:
    assert product(one()).matmul == Matmul(1, 64, 128, 256)
    assert one().seconds == pytest.approx(10e-6)
    # with a layout the sizes are the product's own; without one those of its forward
    stated = one(**{"pass": "dgrad", "layout": "NN"})
    assert product(stated).matmul == Matmul(1, 64, 128, 256) and product(stated).gradient == "data"
    assert product(one(**{"pass": "dgrad"})).matmul == Matmul(1, 64, 256, 128)
    experts = [product(one(kernel="grouped_gemm", groups=8, **{"pass": each})) for each in ("fwd", "dgrad", "wgrad")]
    turned = [(64, 128, 256), (64, 256, 128), (256, 128, 64)]
    assert [each.matmul for each in experts] == [Matmul(8, *sizes) for sizes in turned]
    assert all(each.grouped for each in experts)


def test_a_sum_of_gradients_is_read_and_written_in_fp32() -> None:
    assert product(one(**{"pass": "wgrad", "layout": "NT", "accumulate": True})).result_bytes == 8
    assert product(one()).result_bytes == 0


def test_a_sum_in_16_bits_is_narrower_and_one_of_no_stated_dtype_is_left_out() -> None:
    wgrad = {"pass": "wgrad", "layout": "NT", "accumulate": True}
    assert product(one(**wgrad, note="output bf16")).result_bytes == 4
    assert product(one(**wgrad, note="output fp32")).result_bytes == 8
    assert "dtype of the sum" in reason(kernel="grouped_gemm", groups=8, **{"pass": "wgrad", "accumulate": True})


def test_clocks_sink_after_ten_milliseconds_of_the_same_kernel() -> None:
    large = {"m": 8192, "n": 8192, "k": 8192}
    for publisher, runs in (("MooreThreads/SimuMax", 100), ("microsoft/vidur", 40)):
        just = 10e3 / runs
        assert one(**large, source_repo=publisher, time_us=0.99 * just).burst
        assert not one(**large, source_repo=publisher, time_us=1.01 * just).burst
    assert not one(time_us=1.0).burst  # nothing is known of its loop
    assert one(source_repo="ai-dynamo/aiconfigurator", time_us=1e6).burst


def test_a_split_result_is_copied_and_its_gradient_joined() -> None:
    # 64 x 128 of 2 bytes, read and written; the gradient's product reduces over these 128
    qkv = {"impl": "enc-attention-qkv"}
    assert product(one(**qkv)).copied_bytes == 64 * 128 * 2 * 2
    assert product(one(**qkv, **{"pass": "dgrad"})).copied_bytes == 64 * 128 * 2 * 2
    assert product(one()).copied_bytes == 0


def test_what_a_tensor_group_adds_up_is_no_product() -> None:
    for made, own, name in (("fwd", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2"), ("dgrad", "enc-MLP-GEMM-2", "enc-MLP-GEMM-1")):
        assert product(one(impl=own, tp=4, **{"pass": made}))
        assert product(one(impl=name, tp=1, **{"pass": made}))
        assert "all-reduce" in reason(impl=name, tp=4, **{"pass": made})


def test_torch_has_one_kernel_for_layernorm_and_a_serving_stack_another_for_norms() -> None:
    large = {"elements": 2**28, "impl": "HF / torch eager"}
    assert one(kernel="layernorm", **large).kernel == Stream("norm", 2.0**30)
    assert "one after the other" in reason(kernel="rmsnorm", **large)
    assert "serving" in reason(kernel="rmsnorm", elements=2**28, source_repo="microsoft/vidur")
    assert one(kernel="add", elements=2**28, source_repo="microsoft/vidur").kernel == Stream("elementwise", 1.5 * 2**30)


def test_activations_are_apart_from_additions_and_a_gh200_is_an_h100_with_faster_memory() -> None:
    # fp16: GELU reads and writes 2 bytes an element, its backward reads two tensors and writes one
    gelu = {"kernel": "gelu", "elements": 2**28, "accelerator": "GH200 SXM 96GB"}
    assert one(**gelu).kernel == Stream("activation", 4.0 * 2**28)
    assert one(**gelu, **{"pass": "bwd"}).kernel == Stream("activation", 6.0 * 2**28, backward=True)
    assert (one(**gelu).device, one(**gelu).bandwidth) == ("h100-80gb", 4.0e12)


def test_backward_kernels_of_autograd_wait_for_the_host_where_they_are_small() -> None:
    liger = {"kernel": "rope", "source_repo": "linkedin/Liger-Kernel", "impl": "Liger Triton"}
    assert "timed from the host" in reason(**liger, elements=2**25, **{"pass": "bwd"})
    assert one(**liger, elements=2**25).kernel == Stream("elementwise", 2.0**27)
    assert one(**liger, elements=2**26, **{"pass": "bwd"}).kernel == Stream("elementwise", 2.0**28, backward=True)


def test_causal_attention_sees_half() -> None:
    kernel = one(**ATTENTION).kernel
    assert isinstance(kernel, FusedAttention)
    assert (kernel.shape.heads, kernel.shape.mean_keys, kernel.passes) == (16, 256, (Pass.FORWARD,))
    both = one(**ATTENTION | {"kernel": "attention_fwd_bwd", "causal": False}).kernel
    assert isinstance(both, FusedAttention)
    assert (both.shape.mean_keys, both.passes) == (512, (Pass.FORWARD, Pass.BACKWARD))
    # keys and values of 4 heads of 64, 2 x 512 tokens, 2 bytes each: read and written
    cached = one(**ATTENTION | {"note": "KV-cache write included"}).kernel
    assert isinstance(cached, FusedAttention)
    assert cached.copied_bytes == 2 * 2 * 512 * 4 * (64 + 64) * 2


def test_a_norm_moves_two_tensors_and_backward_three() -> None:
    norms = [one(kernel="layernorm", elements=2**25, **{"pass": each}).kernel for each in ("fwd", "bwd")]
    assert norms == [Stream("norm", 4.0 * 2**25), Stream("norm", 6.0 * 2**25, backward=True)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_us": None}, "no time_us"),
        ({"accelerator": "Abacus"}, "Abacus is not in the catalogue"),
        ({"kernel": "moe_dispatch"}, "no single kernel"),
        ({"dtype": "nvfp4"}, "dtype nvfp4"),
        ({"dtype": "fp32"}, "products in fp32"),
        ({"k": None}, "no k is stated"),
        ({"pass": "dgrad+wgrad"}, "more than one product"),
        ({"note": "best shape of a search"}, "no fair sample"),
        ({"kernel": "layernorm", "elements": 1000}, "less than 32 MB"),
        ({"kernel": "rmsnorm", "elements": 2**25, "impl": "HF / torch eager"}, "one after the other"),
        ({"kernel": "bias_dropout_add", "elements": 2**25}, "three kernels"),
        ({"source_repo": "eth-easl/sailor"}, "timed from the host"),
        (ATTENTION | {"source_repo": "Dao-AILab/flash-attention", "impl": "torch unfused"}, "not what training runs"),
    ],
)
def test_rows_that_are_not_used_say_why(changes: dict[str, Any], words: str) -> None:
    assert words in reason(**changes)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"{", "a row is a JSON object"),
        (b"[1]", "a row is a JSON object, met list"),
        (b'"x"', "a row is a JSON object, met str"),
        (b"\xff\xfe", "a row is a JSON object"),
        (b"[" * 50_000, "a row is a JSON object"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "a row is a JSON object"),
        (b" " * 10 + b'{"a": "' + b"x" * MAX_ROW_BYTES + b'"}', "a row has at most 65536 bytes"),
        (line(source_id=7), "source_id is a text"),
        (line(source_id="a\x1b[31m"), "source_id is a text"),
        (line(accelerator=None), "accelerator is a text"),
        (line(time_us=-1), "time_us is a number from 0.001 to 1e12, met -1"),
        (line(time_us=1e-320), "time_us is a number from 0.001 to 1e12, met 1e-320"),
        (line(time_us=0), "time_us is a number from 0.001 to 1e12, met 0"),
        (line(time_us=float("inf")), "a number is finite, met Infinity"),
        (line(time_us=True), "time_us is a number from 0.001 to 1e12"),
        (line(time_us=float("nan")), "a number is finite, met NaN"),
        (line(time_us="1"), "time_us is a number from 0.001 to 1e12"),
        (line(m=0), "m is a whole number from 1"),
        (line(m=1.5), "m is a whole number from 1"),
        (line(m=10**30), "m is a whole number from 1"),
        (line(**ATTENTION | {"causal": "yes"}), "causal is true or false"),
    ],
    ids=range(21),
)
def test_what_is_no_row_is_refused_with_its_line(row: bytes, words: str) -> None:
    with pytest.raises(RowError) as caught:
        read_rows([line(), b"", row])
    assert str(caught.value).startswith("3: ") and words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(RowError, match="one JSON object a line, met none"):
        read_rows([b"", b"\n"])


PLAIN = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5)
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3))


@given(st.sampled_from((GEMM, ATTENTION)), st.dictionaries(st.sampled_from(sorted(GEMM | ATTENTION)), JSON, max_size=4))
def test_any_field_of_anything_is_used_skipped_or_refused(row: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        used, skipped = read_rows([json.dumps(row | changes).encode()])
    except RowError as error:
        assert str(error).startswith("1: ")
    else:
        assert len(used) + len(skipped) == 1
        assert all(isinstance(each, Row | Skipped) for each in [*used, *skipped])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"m": None}, "no m is stated"),
        ({"time_us": None}, "no time_us is stated"),
        ({"kernel": "bmm", "batch": 4, "pass": "bwd"}, "two products in one time"),
        ({"kernel": "bias_dropout_add", "elements": 2**28}, "ran as three kernels, which training fuses"),
        ({"kernel": "optimizer_step", "params": 2**28}, "an optimizer of many kernels"),
        ({"kernel": "optimizer_step", "params": 2**28, "impl": "foreach"}, "an optimizer of many kernels"),
        ({"kernel": "optimizer_step", "params": 2**10, "impl": "fused"}, "less than 32 MB moved"),
        (ATTENTION | {"note": "encoder attention"}, "a serving stack's kernel for images"),
    ],
)
def test_what_is_no_kernel_of_training_is_left_out_with_the_reason(changes: dict[str, Any], why: str) -> None:
    assert why in reason(**changes)


def test_a_batch_of_products_and_the_update_are_what_they_move() -> None:
    batch = one(kernel="bmm", batch=4)
    assert (batch.family, product(batch).matmul) == ("batched matmul forward", Matmul(4, 64, 128, 256))
    # parameter, gradient and two moments of 4 bytes are read, and all but the gradient written: 28 bytes
    assert one(kernel="optimizer_step", params=2**28, impl="fused Adam").kernel == Stream("optimizer", 28.0 * 2**28)
    # 2 bytes read and 1 written
    assert one(kernel="quantize", elements=2**28).kernel == Stream("elementwise", 3.0 * 2**28)
