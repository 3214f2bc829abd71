"""Rotary positions: queries and keys are turned by where their token stands.

References
----------
Su et al. 2021, "RoFormer: enhanced transformer with rotary position embedding", section 3.2.2.
"""

from typing import Any

import torch
from torch import Tensor

BASE = 10000.0
"""Base of the wavelengths."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines, each (positions, half of a head)."""


def rotation(positions: Tensor, values: Tensor) -> Turn:
    """Return cosines and sines that turn ``values``, ``(..., head_dim)``, at some positions.

    Angles are reckoned in fp64 for values of fp64, else in fp32.
    """
    half, device = values.shape[-1] // 2, values.device
    exact = torch.float64 if values.dtype is torch.float64 else torch.float32
    turns = BASE ** (-torch.arange(half, dtype=exact, device=device) / half)
    angles = positions.to(device, exact)[:, None] * turns
    return angles.cos().to(values.dtype), angles.sin().to(values.dtype)


def rotated(heads: Tensor, turn: Turn) -> Tensor:
    """Return ``(batch, sequence, ..., head_dim)`` turned by position: value i with i + half of them.

    Tokens come before heads, so that what attention puts out lies as the next product reads it.
    """
    result: Tensor = _Rotated.apply(heads, *turn)  # type: ignore[no-untyped-call]
    return result


class _Rotated(torch.autograd.Function):
    """A turn of pairs of numbers; its gradient is turned back by the same angles, which are all that is kept."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return what is turned."""
        ctx.save_for_backward(cosine, sine)
        return _turned(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of what was turned; none is made of angles."""
        cosine, sine = ctx.saved_tensors
        return _turned(gradients[0], cosine, -sine), None, None


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    cosine, sine = torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)
    cosine, sine = (part.view(part.shape[0], *(1,) * (heads.dim() - 3), -1) for part in (cosine, sine))
    one, other = heads.chunk(2, dim=-1)
    return torch.cat([other, one], dim=-1).mul_(sine).addcmul_(heads, cosine)
