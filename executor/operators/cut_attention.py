"""Causal attention of a rank that has some of the queries and all keys.

Queries ``[start, stop)`` see the keys ``[0, stop)``: a causal part that is aligned to its lower right corner. Parts are
contiguous, so the last of ``n`` ranks computes ``2 - 1 / n`` times as many scores as ranks do on average, and all wait
for it (`meshwise.scenarios.inputs.operator_cuts.find_causal_imbalance`). Brandon et al. 2023, "Striped attention", has
rows in turn instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.layouts import Layouts

IS_CAUSAL = 5
"""The place of an argument of the operator."""


def find_attention_part(node: Node, layouts: Layouts, ranks: RankMesh) -> Callable[..., Tensor] | None:
    """Return what computes this rank's part of causal attention; ``None`` for other operators, and for all queries."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or not _is_causal(node):
        return None
    query = node.args[0]
    assert isinstance(query, Node)
    cuts, names = dict(layouts.sharding(node).cuts), layouts.captured.dims[query.name][-2]
    # of a dim that was merged from several, only the outermost one may be cut
    axes = tuple(axis for name in names for axis in cuts.get(name, ()))
    return partial(attend_rows, ranks.find_part(axes)) if ranks.count_parts(axes) > 1 else None


def attend_rows(
    part: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None = None,
    dropout: float = 0.0,
    is_causal: bool = True,
    **options: Any,
) -> Tensor:
    """Return causal attention of the queries of a part, of which each has as many, to the keys that they see."""
    num_rows = query.shape[-2]
    start, stop = part * num_rows, min((part + 1) * num_rows, key.shape[-2])
    bias: Tensor | None = None
    if start > 0 or stop < num_rows:
        is_aligned = stop - start == num_rows and query.is_cuda and not isinstance(query, FakeTensor)
        # kernels of a GPU know this alignment, and need no mask in memory
        bias = causal_lower_right(num_rows, stop) if is_aligned else _build_mask(start, num_rows, stop, query)
    keys, values = key[..., :stop, :], value[..., :stop, :]
    return scaled_dot_product_attention(query, keys, values, bias, dropout, bias is None, **options)


def _build_mask(start: int, num_rows: int, num_keys: int, like: Tensor) -> Tensor:
    """Return whether each query from ``start`` on sees each key."""
    return torch.ones(num_rows, num_keys, dtype=torch.bool, device=like.device).tril(start)


def _is_causal(node: Node) -> bool:
    return bool(node.args[IS_CAUSAL] if len(node.args) > IS_CAUSAL else node.kwargs.get("is_causal", False))
