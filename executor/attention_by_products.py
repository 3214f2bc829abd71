"""Causal attention as products of whole scores, with what merges it with attention to other keys.

For devices and dtypes for which torch has no fused kernel that tells the logsumexp of its scores.

References
----------
Dao 2023, "FlashAttention-2", section 2.3.2 (gradients from the output and the logsumexp).
"""

import math

import torch
from torch import Tensor


def attention_by_products(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and the logsumexp of its scores.

    Shapes ``(batch, heads, tokens, head_dim)`` and ``(batch, heads, tokens)``.
    """
    scores = _scores(query, key, causal=causal)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp() @ value, logsumexp


def attention_gradients_by_products(
    gradient: Tensor, query: Tensor, out: Tensor, logsumexp: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; the keys may be some of those that ``out`` is over."""
    share = (_scores(query, key, causal=causal) - logsumexp.unsqueeze(-1)).exp()
    inner = (gradient * out).sum(-1, keepdim=True)
    of_scores = share * (gradient @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, share.transpose(-1, -2) @ gradient


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf"))
