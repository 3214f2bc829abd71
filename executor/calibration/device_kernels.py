"""Kernels to time on a device, forward or backward alone.

Matrix products are those of a linear layer and its gradients, batched products, and fp8. Attention is one fused kernel,
or products and softmax in sequence. Norms, softmax, elementwise kernels, loss and optimizer are bound by memory. The
time of a tiny layer is its launches. Copies are between host and device, and inside the memory of a device.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.executor.calibration.figures import TINY_MODEL
from meshwise.executor.model.network import Layer
from meshwise.executor.recording.private_torch import has_kernel
from meshwise.executor.recording.timer import Run


class DeviceKernel(NamedTuple):
    """A kernel to time: the fields of its row, except the time, and what makes it ready to run on a device."""

    fields: dict[str, Any]
    prepare: Callable[[str], Run]


DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""Name of a dtype in rows -> torch dtype; ``tf32`` and ``fp32`` differ in how products round."""
FIRST_WITH_FP8 = (8, 9)
"""Lowest CUDA compute capability that multiplies in fp8 (Ada; Hopper is 9.0)."""
_LAYOUTS = {"fwd": "TN", "dgrad": "NN", "wgrad": "NT"}
_PASS = {False: "fwd", True: "bwd"}


def has_fp8(device: str) -> bool:
    """Return whether torch multiplies in fp8 on a device."""
    if device == "cuda" and torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        return False
    return has_kernel("aten::_scaled_mm_v2", device)


def build_product(dtype: str, m: int, n: int, k: int, direction: str = "fwd") -> DeviceKernel:
    """Return a product of a linear layer from ``k`` to ``n`` over ``m`` tokens; rows have the sizes that are computed.

    ``direction`` is ``fwd``: [m, k] x [k, n]; ``dgrad``, the gradient of the input: [m, n] x [n, k]; or ``wgrad``, the
    gradient of the weight: [n, m] x [m, k].
    """
    sizes = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[direction]
    layout = {"layout": _LAYOUTS[direction], "accumulate": False}
    fields = {"kernel": "gemm", "dtype": dtype, "pass": direction, **dict(zip("mnk", sizes, strict=True)), **layout}

    def prepare(device: str) -> Run:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        if dtype == "fp8":
            return _prepare_fp8_product(m, n, k, device)
        draw = partial(torch.randn, device=device, dtype=DTYPES[dtype])
        if direction == "fwd":
            return partial(functional.linear, draw(m, k), draw(n, k))
        if direction == "dgrad":
            return partial(torch.mm, draw(m, n), draw(n, k))
        return partial(torch.mm, draw(m, n).t(), draw(m, k))

    return DeviceKernel(fields, prepare)


def _prepare_fp8_product(m: int, n: int, k: int, device: str) -> Run:
    """Return the product in fp8 with one scale for each tensor, and its result in bf16."""
    scale = torch.ones((), device=device)
    source, weight = (torch.randn(rows, k, device=device).to(DTYPES["fp8"]) for rows in (m, n))
    recipe = functional.ScalingType.TensorWise
    return partial(functional.scaled_mm, source, weight.t(), scale, recipe, scale, recipe, use_fast_accum=True)


def build_batched_product(dtype: str, batch: int, m: int, n: int, k: int) -> DeviceKernel:
    """Return ``batch`` products [m, k] x [k, n] in one kernel."""
    fields = {"kernel": "bmm", "dtype": dtype, "pass": "fwd", "batch": batch, "m": m, "n": n, "k": k}

    def prepare(device: str) -> Run:
        draw = partial(torch.randn, device=device, dtype=DTYPES[dtype])
        return partial(torch.bmm, draw(batch, m, k), draw(batch, k, n))

    return DeviceKernel(fields, prepare)


def build_run(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backward: bool) -> Run:
    """Return a callable that runs ``function(*inputs)`` as in training, or its gradients for all ``inputs``."""
    if not backward:
        return lambda: function(*inputs)
    result = function(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _build_trained(
    fields: dict[str, Any],
    make_function: Callable[[str], Callable[..., Tensor]],
    shapes: Iterable[tuple[int, ...]],
    *,
    backward: bool,
) -> DeviceKernel:
    """Return a function of random inputs of ``shapes`` as it runs in training, or its gradients for all inputs.

    ``make_function`` returns the function for a device.
    """

    def prepare(device: str) -> Run:
        draw = partial(torch.randn, device=device, dtype=DTYPES[fields["dtype"]], requires_grad=True)
        return build_run(make_function(device), [draw(shape) for shape in shapes], backward=backward)

    return DeviceKernel(fields, prepare)


AttentionSizes = tuple[int, int, int, int, int]
"""Sequences, heads, heads of keys and values, tokens of a sequence, and head dim."""


def build_attention(
    dtype: str, sizes: AttentionSizes, *, causal: bool = True, backward: bool = False, fused: bool = True
) -> DeviceKernel:
    """Return attention, forward or its gradients alone.

    With ``fused`` it is one kernel that stores no scores (FlashAttention, Dao 2023), else products and softmax, which
    have another name in rows, because they are not a single kernel.
    """
    batch, heads, kv_heads, sequence, head_dim = sizes
    fields = {
        "kernel": f"{'' if fused else 'unfused_'}attention_{_PASS[backward]}",
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "seq_q": sequence,
        "seq_kv": sequence,
        "causal": causal,
        "impl": "torch sdpa, flash" if fused else "torch eager",
    }

    def make_attention(device: str) -> Callable[..., Tensor]:
        future_mask = None if fused else torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if future_mask is None:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return functional.scaled_dot_product_attention(
                        query, key, value, is_causal=causal, enable_gqa=kv_heads != heads
                    )
            scores = query @ key.transpose(-1, -2) / sqrt(head_dim)
            masked_scores = scores.masked_fill(future_mask, float("-inf")) if causal else scores
            return torch.softmax(masked_scores, dim=-1) @ value

        return attend

    shapes = [(batch, count, sequence, head_dim) for count in (heads, kv_heads, kv_heads)]
    return _build_trained(fields, make_attention, shapes, backward=backward)


WIDTH = 4096
"""Elements of a row of a norm or softmax, at most those of the tensor."""
STREAMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layernorm": (lambda x, weight, bias: functional.layer_norm(x, weight.shape, weight, bias), 2),
    "rmsnorm": (lambda x, weight: functional.rms_norm(x, weight.shape, weight), 1),
    "softmax": (partial(torch.softmax, dim=-1), 0),
    "dropout": (partial(functional.dropout, p=0.1), 0),
    "gelu": (functional.gelu, 0),
}
"""Name of a kernel -> its function, and the number of its parameters, each as wide as a row."""


def build_stream(name: str, dtype: str, elements: int, *, backward: bool = False) -> DeviceKernel:
    """Return one of `STREAMS` over a tensor of ``elements``, forward or backward."""
    function, num_parameters = STREAMS[name]
    width = min(WIDTH, elements)
    fields = {"kernel": name, "dtype": dtype, "pass": _PASS[backward], "elements": elements, "impl": "torch"}
    shapes = [(elements // width, width), *[(width,)] * num_parameters]
    return _build_trained(fields, lambda device: function, shapes, backward=backward)


def build_addition(dtype: str, elements: int) -> DeviceKernel:
    """Return the sum of two tensors, as a residual connection computes it."""

    def prepare(device: str) -> Run:
        left_operand, right_operand = torch.randn(2, elements, device=device, dtype=DTYPES[dtype])
        return lambda: left_operand + right_operand

    return DeviceKernel(
        {"kernel": "add", "dtype": dtype, "pass": "fwd", "elements": elements, "impl": "torch"}, prepare
    )


def build_embedding(dtype: str, rows: int, hidden: int, vocab: int, *, backward: bool = False) -> DeviceKernel:
    """Return a look-up of table rows by random tokens, or the gradient of the whole table."""
    sizes = {"rows": rows, "hidden": hidden, "vocab": vocab, "elements": rows * hidden}
    fields = {"kernel": "embedding", "dtype": dtype, "pass": _PASS[backward], **sizes, "impl": "torch"}

    def make_look_up(device: str) -> Callable[..., Tensor]:
        return partial(functional.embedding, torch.randint(vocab, (rows,), device=device))

    return _build_trained(fields, make_look_up, [(vocab, hidden)], backward=backward)


def build_cross_entropy(dtype: str, rows: int, vocab: int, *, backward: bool = False) -> DeviceKernel:
    """Return the mean cross entropy of ``rows`` tokens over a vocabulary, from random logits of ``dtype``."""
    sizes = {"rows": rows, "vocab": vocab, "elements": rows * vocab}
    fields = {"kernel": "cross_entropy", "dtype": dtype, "pass": _PASS[backward], **sizes, "impl": "torch eager"}

    def make_loss(device: str) -> Callable[..., Tensor]:
        return partial(functional.cross_entropy, target=torch.randint(vocab, (rows,), device=device))

    return _build_trained(fields, make_loss, [(rows, vocab)], backward=backward)


def build_optimizer_step(params: int, *, fused: bool = True) -> DeviceKernel:
    """Return a step of AdamW over ``params`` fp32 parameters: one fused kernel, or one kernel for each operation.

    A fused step moves 28 bytes a parameter.
    """
    fields = {
        "kernel": "optimizer_step",
        "dtype": "fp32",
        "params": params,
        "bytes": 28 * params,
        "impl": "AdamW fused" if fused else "AdamW foreach",
        "note": "bytes = 28 per parameter (read p,g,m,v; write p,m,v)",
    }

    def prepare(device: str) -> Run:
        parameter = torch.nn.Parameter(torch.zeros(params, device=device))
        parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW([parameter], fused=fused, foreach=not fused).step

    return DeviceKernel(fields, prepare)


HOST_BOUND = "torch eager, bound by the host's launches"
"""``impl`` of rows of layers whose time is the host's launches."""


def build_tiny_layer() -> DeviceKernel:
    """Return forward and backward of a layer of hidden size 8, whose time is the host's launches."""
    hidden = TINY_MODEL.hidden
    sizes = {"batch": 1, "seq_q": 2, "hidden": hidden}

    def prepare(device: str) -> Run:
        layer = Layer(TINY_MODEL).to(device=device, dtype=torch.bfloat16)
        x = torch.randn(1, 2, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        inputs, gradient = (x, *layer.parameters()), torch.ones_like(x)
        return lambda: torch.autograd.grad(layer(x), inputs, gradient)

    return DeviceKernel({"kernel": "layer_fwd_bwd", "dtype": "bf16", **sizes, "impl": HOST_BOUND}, prepare)


def build_host_copy(nbytes: int, *, to_device: bool = True, pinned: bool = True) -> DeviceKernel:
    """Return a copy of ``nbytes`` between host and device.

    With ``pinned`` the host's memory is page-locked, for CUDA only; else the driver copies through its own buffer.
    """
    name, implementation = "copy_h2d" if to_device else "copy_d2h", "pinned" if pinned else "pageable"

    def prepare(device: str) -> Run:
        is_pinned = pinned and device == "cuda"
        host_buffer = torch.ones(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        device_buffer = torch.ones(nbytes, dtype=torch.uint8, device=device)
        source, target = (host_buffer, device_buffer) if to_device else (device_buffer, host_buffer)
        return lambda: target.copy_(source, non_blocking=is_pinned)

    return DeviceKernel({"kernel": name, "dtype": "bytes", "bytes": nbytes, "impl": implementation}, prepare)


def build_device_copy(nbytes: int) -> DeviceKernel:
    """Return a copy of ``nbytes`` inside the memory of the device; every byte is read and written."""

    def prepare(device: str) -> Run:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    note = "each byte is read and written"
    return DeviceKernel({"kernel": "memcpy", "dtype": "bytes", "bytes": nbytes, "note": note}, prepare)


def build_launch() -> DeviceKernel:
    """Return a kernel on one element, whose time by the device's clock is its launch."""

    def prepare(device: str) -> Run:
        element = torch.zeros(1, device=device)
        return lambda: element.add_(1.0)

    return DeviceKernel({"kernel": "launch", "dtype": "fp32", "elements": 1, "impl": "torch eager"}, prepare)
