"""Attention that a device is timed with: one fused kernel, or products and softmax one after the other."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from executor.device_gradients import one_direction
from executor.device_products import DTYPES
from executor.device_timer import Run


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of ``batch`` sequences, forward or its gradients alone.

    Parameters
    ----------
    fused
        Whether it is one kernel that keeps no scores (FlashAttention, Dao 2023), or products and softmax.
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
        """Return the row's fields; what is not fused has a name of its own, for it is no single kernel."""
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
            return one_direction(self._fused, inputs, backward=self.backward)
        future = torch.ones(self.sequence, self.sequence, dtype=torch.bool, device=device).triu(1)

        def unfused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = query @ key.transpose(-1, -2) / sqrt(self.head_dim)
            seen = scores.masked_fill(future, float("-inf")) if self.causal else scores
            return torch.softmax(seen, dim=-1) @ value

        return one_direction(unfused, inputs, backward=self.backward)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads
            )
