"""Root mean square norm that keeps its input alone for backward, as torch's own kernel for GPUs does.

On other devices torch composes it of operators, of which each keeps what it reads: the normalised input too, and the
input in fp32 where it has 16 bits.

References
----------
Zhang and Sennrich 2019, "Root mean square layer normalization", equation 4.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """Norm along the last dim, ``(..., width)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` over the root of its mean square, times the weight."""
        if x.is_cuda:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        result: Tensor = _Norm.apply(x, self.weight, eps)  # type: ignore[no-untyped-call]
        return result


class _Norm(torch.autograd.Function):
    """``y = x r w`` with ``r = (mean(x**2) + eps) ** -0.5``; values of 16 bits are reckoned in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``y``."""
        exact = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(exact)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return gradients: of ``x`` ``r (g w - n mean(g w n))`` with ``n = x r``, and of the weight ``g n`` summed."""
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        normal = x.to(scale.dtype) * scale
        of_weight = (gradient * normal).sum(tuple(range(x.dim() - 1)))
        inner = gradient * weight
        inner -= normal.mul_((inner * normal).mean(-1, keepdim=True))
        return inner.mul_(scale).to(x.dtype), of_weight.to(weight.dtype), None
