"""Collectives as autograd functions, whose gradients go the opposite way, marked for the profiler.

Each runs inside a region that `mark_collective` names after its axis and collective. By these names
`meshwise.executor.recording.trace` tells which technique communicates.

`Share` moves nothing: it makes the gradient of one of several readers count once in a sum over ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwise.executor.recording.private_torch import all_gather, reduce_scatter
from meshwise.executor.recording.trace import MOVING


def mark_collective(axis: str, collective: str) -> AbstractContextManager[Any]:
    """Return a context that marks, for the profiler, a collective of the ranks along ``axis``."""
    return record_function(f"{MOVING}{axis} {collective}")


class Exchange(torch.autograd.Function):
    """Sends rows to every rank of a group and receives rows from each (all-to-all)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        axis: str,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> Tensor:
        """Return the rows that all ranks sent to this one, in the order of the ranks.

        ``rows`` are ``(sum(send_counts), ...)``: first those for rank 0 of the group. Counts are the number of rows to
        and from each rank.
        """
        ctx.group, ctx.axis, ctx.sent, ctx.received = group, axis, send_counts, receive_counts
        return _all_to_all(rows, group, axis, send_counts, receive_counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the rows, from the ranks that they went to."""
        return _all_to_all(gradients[0], ctx.group, ctx.axis, ctx.received, ctx.sent), None, None, None, None


def exchange_parts(parts: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
    """Return the parts that all ranks sent to this one; dim 0 of ``parts`` has one part for each rank."""
    counts = [1] * group.size()
    result: Tensor = Exchange.apply(parts, group, axis, counts, counts)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(
    rows: Tensor, group: dist.ProcessGroup, axis: str, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    received_rows = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    with mark_collective(axis, "all_to_all"):
        dist.all_to_all_single(received_rows, rows.contiguous(), list(receive_counts), list(send_counts), group=group)
    return received_rows


class Gather(torch.autograd.Function):
    """Gathers the parts of all ranks of a group in a new dim 0; its gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
        """Return ``(ranks, *part.shape)``."""
        ctx.group, ctx.axis = group, axis
        parts = part.new_empty((group.size(), *part.shape))
        with mark_collective(axis, "all_gather"):
            all_gather(parts.flatten(0, 1), part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient of this rank's part, summed over ranks."""
        parts = gradients[0].contiguous()
        part = parts.new_empty(parts.shape[1:])
        with mark_collective(ctx.axis, "reduce_scatter"):
            reduce_scatter(part, parts.flatten(0, 1), group=ctx.group)
        return part, None, None


def gather_parts(part: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
    """Return the parts of all ranks, ``(ranks, *part.shape)``."""
    result: Tensor = Gather.apply(part, group, axis)  # type: ignore[no-untyped-call]
    return result


class Share(torch.autograd.Function):
    """Passes on a value to one of several readers whose gradients are added first and then summed over ranks.

    Where the gradient of this reader is complete on every rank, the sum must count it once, not once for each rank.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, num_ranks: int) -> Tensor:
        """Return the value."""
        ctx.num_ranks = num_ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return this rank's share of the gradient: ``1 / num_ranks`` of it."""
        return gradients[0] / ctx.num_ranks, None
