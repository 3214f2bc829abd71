"""What is between the two products of a feed-forward layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": functional.silu, "geglu": functional.gelu}


def width(kind: str, ffn: int) -> int:
    """Return the width of what comes into an activation of a kind that ``ffn`` values leave.

    >>> width("gelu", 8), width("swiglu", 8)
    (8, 16)
    """
    return 2 * ffn if kind in _GATES else ffn


def activation(kind: str) -> Callable[[Tensor], Tensor]:
    """Return what makes the middle, ``(..., ffn)``, of what is wide: where it is gated, of pairs ``[ffn, 2]``."""
    if kind not in _GATES:
        return functional.gelu
    function = _GATES[kind]

    def gated(wide: Tensor) -> Tensor:
        gate, value = _pairs(wide) if wide.is_cuda else _Apart.apply(wide)  # type: ignore[no-untyped-call]
        del wide  # where both were copied it is not needed any longer, and whoever made it has let it go
        return function(gate) * value

    return gated


def _pairs(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates and the values of ``(..., 2 ffn)`` as views."""
    gate, value = wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2).unbind(-1)
    return gate, value


class _Apart(torch.autograd.Function):
    """Gates and values, each brought together: of every second number a CPU computes six times as slowly.

    What a gate and a product keep of them is as large as the input, which nothing keeps then.
    """

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Return gates and values."""
        gate, value = _pairs(wide)
        return gate.contiguous(), value.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return both gradients beside each other."""
        *shape, ffn = gradients[0].shape
        wide = gradients[0].new_empty(*shape, 2 * ffn)
        for place, gradient in zip(_pairs(wide), gradients, strict=True):
            place.copy_(gradient)
        return wide
