"""Kernels to time on a device, forward or backward alone.

Matrix products are those of a linear layer and its gradients, batched products, and fp8. Attention is one fused kernel,
or products and softmax in sequence. Norms, softmax, elementwise kernels, loss and optimizer are bound by memory. The
time of a tiny layer is its launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.executor.calibration.figures import TINY_MODEL
from meshwise.executor.model.network import Layer
from meshwise.executor.recording.private_torch import has_kernel
from meshwise.executor.recording.timer import Run

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


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """A product of a linear layer from ``k`` to ``n`` over ``m`` tokens.

    Parameters
    ----------
    direction
        ``fwd``: [m, k] x [k, n]. ``dgrad``: the gradient of the input, [m, n] x [n, k]. ``wgrad``: the gradient of
        the weight, [n, m] x [m, k].
    """

    dtype: str
    m: int
    n: int
    k: int
    direction: str = "fwd"

    @property
    def flops(self) -> float:
        """FLOP of the product, multiplications and additions."""
        return 2.0 * self.m * self.n * self.k

    def fields(self) -> dict[str, Any]:
        """Return the row's fields; sizes are those of the product that is computed."""
        m, n, k = self.m, self.n, self.k
        sizes = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[self.direction]
        named_sizes = dict(zip(("m", "n", "k"), sizes, strict=True))
        return {
            "kernel": "gemm",
            "dtype": self.dtype,
            "pass": self.direction,
            **named_sizes,
            "layout": _LAYOUTS[self.direction],
            "accumulate": False,
        }

    def prepare(self, device: str) -> Run:
        """Return the product on random operands."""
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        if self.dtype == "fp8":
            return self._prepare_fp8(device)
        random = partial(torch.randn, device=device, dtype=DTYPES[self.dtype])
        if self.direction == "fwd":
            return partial(functional.linear, random(self.m, self.k), random(self.n, self.k))
        gradient = random(self.m, self.n)
        if self.direction == "dgrad":
            return partial(torch.mm, gradient, random(self.n, self.k))
        return partial(torch.mm, gradient.t(), random(self.m, self.k))

    def _prepare_fp8(self, device: str) -> Run:
        """Return the product in fp8 with one scale for each tensor, and its result in bf16."""
        scale = torch.ones((), device=device)
        source, weight = (torch.randn(rows, self.k, device=device).to(DTYPES["fp8"]) for rows in (self.m, self.n))
        recipe = functional.ScalingType.TensorWise
        return partial(functional.scaled_mm, source, weight.t(), scale, recipe, scale, recipe, use_fast_accum=True)


def has_fp8(device: str) -> bool:
    """Return whether torch multiplies in fp8 on a device."""
    if device == "cuda" and torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        return False
    return has_kernel("aten::_scaled_mm_v2", device)


@dataclass(frozen=True, slots=True)
class BatchedProduct:
    """``batch`` products [m, k] x [k, n] in one kernel."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        sizes = {name: getattr(self, name) for name in ("batch", "m", "n", "k")}
        return {"kernel": "bmm", "dtype": self.dtype, "pass": "fwd", **sizes}

    def prepare(self, device: str) -> Run:
        """Return the products on random operands."""

        def random(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, device=device, dtype=DTYPES[self.dtype])

        return partial(torch.bmm, random(self.m, self.k), random(self.k, self.n))


def build_run(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backward: bool) -> Run:
    """Return a callable that runs ``function(*inputs)`` as in training, or its gradients for all ``inputs``."""
    if not backward:
        return lambda: function(*inputs)
    result = function(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of ``batch`` sequences, forward or its gradients alone.

    Parameters
    ----------
    fused
        Whether attention is one kernel that stores no scores (FlashAttention, Dao 2023), else products and softmax.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    causal: bool = True
    backward: bool = False
    fused: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the row's fields; unfused attention has another name, because it is not a single kernel."""
        direction = "bwd" if self.backward else "fwd"
        return {
            "kernel": f"attention_{direction}" if self.fused else f"unfused_attention_{direction}",
            "dtype": self.dtype,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "seq_q": self.sequence,
            "seq_kv": self.sequence,
            "causal": self.causal,
            "impl": "torch sdpa, flash" if self.fused else "torch eager",
        }

    def prepare(self, device: str) -> Run:
        """Return attention over random queries, keys and values, or its gradients."""

        def random(heads: int) -> Tensor:
            shape = self.batch, heads, self.sequence, self.head_dim
            return torch.randn(*shape, device=device, dtype=DTYPES[self.dtype], requires_grad=True)

        inputs = random(self.heads), random(self.kv_heads), random(self.kv_heads)
        if self.fused:
            return build_run(self._attend_fused, inputs, backward=self.backward)
        future_mask = torch.ones(self.sequence, self.sequence, dtype=torch.bool, device=device).triu(1)

        def attend_unfused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = query @ key.transpose(-1, -2) / sqrt(self.head_dim)
            masked_scores = scores.masked_fill(future_mask, float("-inf")) if self.causal else scores
            return torch.softmax(masked_scores, dim=-1) @ value

        return build_run(attend_unfused, inputs, backward=self.backward)

    def _attend_fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads
            )


WIDTH = 4096
"""Elements of a row of a norm or softmax, at most those of the tensor."""


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight)


def _dropout(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.1)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layernorm": (_layernorm, 2),
    "rmsnorm": (_rmsnorm, 1),
    "softmax": (_softmax, 0),
    "dropout": (_dropout, 0),
    "gelu": (functional.gelu, 0),
}
"""Name of a kernel -> its function, and the number of its parameters, each as wide as a row."""
STREAMS = ("layernorm", "rmsnorm", "softmax", "dropout", "gelu")


@dataclass(frozen=True, slots=True)
class Stream:
    """One of `STREAMS` over a tensor of ``elements``, forward or backward."""

    name: str
    dtype: str
    elements: int
    backward: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        direction = "bwd" if self.backward else "fwd"
        return {"kernel": self.name, "dtype": self.dtype, "pass": direction, "elements": self.elements, "impl": "torch"}

    def prepare(self, device: str) -> Run:
        """Return the kernel on random values."""
        function, num_parameters = _FUNCTIONS[self.name]
        width = min(WIDTH, self.elements)
        shapes = [(self.elements // width, width), *[(width,)] * num_parameters]
        inputs = [torch.randn(shape, device=device, dtype=DTYPES[self.dtype], requires_grad=True) for shape in shapes]
        return build_run(function, inputs, backward=self.backward)


@dataclass(frozen=True, slots=True)
class Addition:
    """The sum of two tensors, as a residual connection computes it."""

    dtype: str
    elements: int

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {"kernel": "add", "dtype": self.dtype, "pass": "fwd", "elements": self.elements, "impl": "torch"}

    def prepare(self, device: str) -> Run:
        """Return the sum of random values."""
        left_operand, right_operand = torch.randn(2, self.elements, device=device, dtype=DTYPES[self.dtype])
        return lambda: left_operand + right_operand


@dataclass(frozen=True, slots=True)
class Embedding:
    """A look-up of table rows by token, or the gradient of the whole table."""

    dtype: str
    rows: int
    hidden: int
    vocab: int
    backward: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        sizes = {"rows": self.rows, "hidden": self.hidden, "vocab": self.vocab, "elements": self.rows * self.hidden}
        direction = "bwd" if self.backward else "fwd"
        return {"kernel": "embedding", "dtype": self.dtype, "pass": direction, **sizes, "impl": "torch"}

    def prepare(self, device: str) -> Run:
        """Return the look-up of random tokens."""
        tokens = torch.randint(self.vocab, (self.rows,), device=device)
        table = torch.randn(self.vocab, self.hidden, device=device, dtype=DTYPES[self.dtype], requires_grad=True)
        return build_run(lambda weight: functional.embedding(tokens, weight), [table], backward=self.backward)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross entropy of ``rows`` tokens over a vocabulary, from logits of ``dtype``."""

    dtype: str
    rows: int
    vocab: int
    backward: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        sizes = {"rows": self.rows, "vocab": self.vocab, "elements": self.rows * self.vocab}
        direction = "bwd" if self.backward else "fwd"
        return {"kernel": "cross_entropy", "dtype": self.dtype, "pass": direction, **sizes, "impl": "torch eager"}

    def prepare(self, device: str) -> Run:
        """Return the loss of random logits and targets."""
        targets = torch.randint(self.vocab, (self.rows,), device=device)
        logits = torch.randn(self.rows, self.vocab, device=device, dtype=DTYPES[self.dtype], requires_grad=True)
        return build_run(lambda x: functional.cross_entropy(x, targets), [logits], backward=self.backward)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A step of AdamW over ``params`` fp32 parameters: one fused kernel, or one kernel for each operation."""

    params: int
    fused: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the row's fields: a fused step moves 28 bytes a parameter."""
        implementation = "AdamW fused" if self.fused else "AdamW foreach"
        return {
            "kernel": "optimizer_step",
            "dtype": "fp32",
            "params": self.params,
            "bytes": 28 * self.params,
            "impl": implementation,
            "note": "bytes = 28 per parameter (read p,g,m,v; write p,m,v)",
        }

    def prepare(self, device: str) -> Run:
        """Return the step."""
        parameter = torch.nn.Parameter(torch.zeros(self.params, device=device))
        parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW([parameter], fused=self.fused, foreach=not self.fused).step


@dataclass(frozen=True, slots=True)
class TinyLayer:
    """Forward and backward of a layer of hidden size 8, whose time is the host's launches."""

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {
            "kernel": "layer_fwd_bwd",
            "dtype": "bf16",
            "batch": 1,
            "seq_q": 2,
            "hidden": TINY_MODEL.hidden,
            "impl": HOST_BOUND,
        }

    def prepare(self, device: str) -> Run:
        """Return both passes."""
        layer = Layer(TINY_MODEL).to(device=device, dtype=torch.bfloat16)
        x = torch.randn(1, 2, TINY_MODEL.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        inputs = (x, *layer.parameters())
        gradient = torch.ones_like(x)
        return lambda: torch.autograd.grad(layer(x), inputs, gradient)


HOST_BOUND = "torch eager, bound by the host's launches"
"""``impl`` of rows of layers whose time is the host's launches."""
