"""Kernels that memory bounds, which a device is timed with: norms, softmax, elementwise ones, loss and optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.device_gradients import one_direction
from executor.device_products import DTYPES
from executor.device_timer import Run

WIDTH = 4096
"""Elements of a row that a norm or softmax is over, where the tensor has as many."""


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
"""Functions of a tensor, and how many parameters as wide as a row each has."""
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
        function, parameters = _FUNCTIONS[self.name]
        width = min(WIDTH, self.elements)
        shapes = [(self.elements // width, width), *[(width,)] * parameters]
        inputs = [torch.randn(shape, device=device, dtype=DTYPES[self.dtype], requires_grad=True) for shape in shapes]
        return one_direction(function, inputs, backward=self.backward)


@dataclass(frozen=True, slots=True)
class Addition:
    """The sum of two tensors, as of a residual."""

    dtype: str
    elements: int

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {"kernel": "add", "dtype": self.dtype, "pass": "fwd", "elements": self.elements, "impl": "torch"}

    def prepare(self, device: str) -> Run:
        """Return the sum of random values."""
        one, other = torch.randn(2, self.elements, device=device, dtype=DTYPES[self.dtype])
        return lambda: one + other


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table by token, or the gradient of the whole table."""

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
        return one_direction(lambda weight: functional.embedding(tokens, weight), [table], backward=self.backward)


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
        return one_direction(lambda x: functional.cross_entropy(x, targets), [logits], backward=self.backward)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A step of AdamW over ``params`` fp32 parameters: one fused kernel, or one for each operation."""

    params: int
    fused: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the row's fields: a fused step moves 28 bytes a parameter."""
        made = "AdamW fused" if self.fused else "AdamW foreach"
        return {
            "kernel": "optimizer_step",
            "dtype": "fp32",
            "params": self.params,
            "bytes": 28 * self.params,
            "impl": made,
            "note": "bytes = 28 per parameter (read p,g,m,v; write p,m,v)",
        }

    def prepare(self, device: str) -> Run:
        """Return the step."""
        parameter = torch.nn.Parameter(torch.zeros(self.params, device=device))
        parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW([parameter], fused=self.fused, foreach=not self.fused).step
