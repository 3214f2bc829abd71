"""Grouped products of a rank that has some of the experts and all rows.

Rows are sorted by expert, so that those of a rank's experts follow each other; where they begin depends on the data.
They are moved to the first place, multiplied, and moved back; all other rows of the result are zeros. So shapes do not
depend on the data, and the results of all ranks are summed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from meshwise.executor.capture.rules.products import GROUPED
from meshwise.executor.capture.rules.table import get_name
from meshwise.executor.operators.calls import QUICK_CALLS
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.layouts import Layouts


def find_experts_part(node: Node, layouts: Layouts, ranks: RankMesh) -> Callable[..., Tensor] | None:
    """Return what computes this rank's part of a grouped product; ``None`` for other operators, and for all experts."""
    if not isinstance(node.target, torch._ops.OpOverload) or get_name(node.target) not in GROUPED:
        return None
    weight = node.args[1]
    assert isinstance(weight, Node)
    cuts, names = dict(layouts.sharding(node).cuts), layouts.captured.dims[weight.name][0]
    axes = tuple(axis for name in names for axis in cuts.get(name, ()))
    is_cut = ranks.count_parts(axes) > 1
    return (
        partial(multiply_experts, QUICK_CALLS.get(node.target, node.target), ranks.find_part(axes)) if is_cut else None
    )


def multiply_experts(
    product: Callable[..., Tensor],
    part: int,
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """Return the product of the rows of a part of the experts with their matrices, and zeros in other rows.

    Parameters
    ----------
    weight
        The matrices of the part alone.
    ends
        For each of all experts the row after its last one.
    """
    num_experts, num_rows = weight.shape[0], rows.shape[0]
    first = part * num_experts
    own_ends = ends[first : first + num_experts]
    start = ends[first - 1] if first else torch.zeros_like(ends[0])
    places = torch.arange(num_rows, device=rows.device)
    is_own = (places < own_ends[-1] - start)[:, None]
    # kernels neither write the rows after the last end nor their gradients
    moved = rows[(places + start) % num_rows].where(is_own, 0)
    result = product(moved, weight, (own_ends - start).to(ends.dtype), *arguments, **options).where(is_own, 0)
    return result[(places - start) % num_rows]
