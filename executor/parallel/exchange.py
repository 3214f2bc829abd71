"""Collectives whose gradients go the opposite way, as autograd functions, marked for the profiler.

Every one runs inside a region that `moving` names after the axis and the collective, by which
`meshwise.executor.recording.trace` tells whose communication it is.

A `Share` moves nothing: it counts the gradient of one of several readers once.
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


def moving(axis: str, collective: str) -> AbstractContextManager[Any]:
    """Return a region of the profiler in which ranks along ``axis`` run a collective."""
    return record_function(f"{MOVING}{axis} {collective}")


class Exchange(torch.autograd.Function):
    """Rows sent to every rank of a group, and those received from every one, by rank (all-to-all)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, axis: str, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Return the rows that other ranks sent here.

        Parameters
        ----------
        rows
            ``(sum(sent), ...)``: first those for rank 0 of the group.
        sent, received
            Rows to and from every rank.
        """
        ctx.group, ctx.axis, ctx.sent, ctx.received = group, axis, sent, received
        return _all_to_all(rows, group, axis, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the rows, which comes back the same way."""
        return _all_to_all(gradients[0], ctx.group, ctx.axis, ctx.received, ctx.sent), None, None, None, None


def exchange_parts(parts: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
    """Return what every rank sent here, of ``parts`` with one for each rank in dim 0."""
    even = [1] * group.size()
    result: Tensor = Exchange.apply(parts, group, axis, even, even)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(
    rows: Tensor, group: dist.ProcessGroup, axis: str, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    with moving(axis, "all_to_all"):
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class Gather(torch.autograd.Function):
    """The parts of all ranks of a group, one after the other in a new dim 0; its gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
        """Return ``(ranks, *part.shape)``."""
        ctx.group, ctx.axis = group, axis
        whole = part.new_empty((group.size(), *part.shape))
        with moving(axis, "all_gather"):
            all_gather(whole.flatten(0, 1), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the sum over ranks of the gradients of this rank's part."""
        whole = gradients[0].contiguous()
        part = whole.new_empty(whole.shape[1:])
        with moving(ctx.axis, "reduce_scatter"):
            reduce_scatter(part, whole.flatten(0, 1), group=ctx.group)
        return part, None, None


def gather_parts(part: Tensor, group: dist.ProcessGroup, axis: str) -> Tensor:
    """Return the parts of all ranks, ``(ranks, *part.shape)``."""
    result: Tensor = Gather.apply(part, group, axis)  # type: ignore[no-untyped-call]
    return result


class Share(torch.autograd.Function):
    """A value for one of several readers whose gradients are added before they are summed over ``axes``.

    Where the gradient of this reader is whole on every rank it must count once, not once a rank.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, ways: int) -> Tensor:
        """Return the value."""
        ctx.num_ranks = ways
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the part of the gradient that a rank adds."""
        return gradients[0] / ctx.num_ranks, None
