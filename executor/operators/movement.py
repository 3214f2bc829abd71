"""How values and their gradients move between layouts, as autograd functions."""

from typing import Any

import torch
from torch import Tensor

from executor.operators.collectives import Dims, Ranks
from strategies.sharding import ShardingSpec


class Move(torch.autograd.Function):
    """A value to the layout in which it is read; its gradient back to the layout of the value."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, ranks: Ranks, dims: Dims, have: ShardingSpec, wanted: ShardingSpec, back: ShardingSpec
    ) -> Tensor:
        """Return the part of a rank in the layout ``wanted``.

        Parameters
        ----------
        have
            The layout of ``local``.
        back
            The layout in which the gradient comes back. It is given on as the value is, ``have`` with nothing left
            to sum.
        """
        ctx.ranks, ctx.dims, ctx.have, ctx.back = ranks, dims, have, back
        result = ranks.redistribute(local, dims, have, wanted)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the value as it was."""
        return ctx.ranks.redistribute(gradients[0], ctx.dims, ctx.back, ctx.have.complete), None, None, None, None, None


class Once(torch.autograd.Function):
    """A bias of results that ranks sum, on one of them; its gradient is that of a bias of the sum, on every rank."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: bool) -> Tensor:
        """Return the bias, or zeros."""
        return bias.view_as(bias) if counts else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient."""
        return gradients[0], None
