"""ZeRO 1: every rank keeps the optimizer's states of its own part of the parameters, and updates that part.

The gradients of a unit are one vector, cut into as many equal parts as ranks share states, without regard to where a
parameter ends. A reduce-scatter gives each rank the mean of its part; an all-gather brings the parts that others have
updated. Where groups of ranks share states, parts are summed over the groups' replicas.

References
----------
Rajbhandari et al. 2020, "ZeRO", section 5.1 (optimizer state partitioning) and 7.1 (a reduce-scatter and an
all-gather move what an all-reduce does).
Megatron-Core, ``core/optimizer/distrib_optimizer.py`` (parts of a contiguous buffer of gradients).
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.data_parallel import Finish, Unit
from executor.private_torch import all_gather, reduce_scatter
from executor.split_optimizer import Kind, Piece, SplitOptimizer, States
from executor.tensors import fill, flatten, local
from strategies.mesh import REPLICA


def share(unit: Unit) -> int:
    """Return the elements of a rank's part; those of the last ranks may be fewer."""
    total = sum(local(parameter.detach()).numel() for parameter in unit.parameters)
    return ceil(total / unit.sharing.shards.size())


def own_pieces(unit: Unit) -> Iterator[Piece]:
    """Yield what this rank updates of every parameter; of most it is all or nothing."""
    first, each = 0, share(unit)
    begin = unit.sharing.shards.get_local_rank() * each
    for parameter in unit.parameters:
        size = local(parameter.detach()).numel()
        low, high = (min(max(edge - first, 0), size) for edge in (begin, begin + each))
        yield Piece(parameter, low, high)
        first += size


def average_own(unit: Unit) -> Finish:
    """Begin to make the gradients of this rank's part the mean over all ranks that have the same parameters."""
    sharing = unit.sharing
    group, count, each = sharing.shards.get_group(), sharing.shards.size(), share(unit)
    flat = _padded(unit.gradients, count * each)
    part = flat.new_empty(each)
    work: Any = reduce_scatter(part, flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if sharing.replicas.size() > count:
            dist.all_reduce(part, group=sharing.states[REPLICA].get_group())
        part.div_(sharing.replicas.size())
        start = 0
        for piece in own_pieces(unit):
            size = piece.stop - piece.start
            piece.gradient.copy_(part[start : start + size])
            start += size

    return finish


def gather(unit: Unit, tensors: Sequence[Tensor]) -> None:
    """Fill ``tensors``, one a parameter of a unit, of which this rank has its own part, with the parts of others."""
    each, group = share(unit), unit.sharing.shards.get_group()
    parts = zip(tensors, own_pieces(unit), strict=True)
    own = _padded([tensor.flatten()[piece.start : piece.stop] for tensor, piece in parts], each)
    whole = own.new_empty(each * group.size())
    all_gather(whole, own, group=group)
    fill(tensors, whole)


def _padded(tensors: Sequence[Tensor], elements: int) -> Tensor:
    """Return all elements of ``tensors``, and zeros behind them, as one vector."""
    return flatten([*tensors, tensors[0].new_zeros(elements - sum(tensor.numel() for tensor in tensors))])


class ShardedOptimizer:
    """Steps this rank's part of every unit and receives the others from their ranks."""

    def __init__(self, units: Sequence[Unit], kind: Kind, states: States) -> None:
        self.units = units
        pieces = [piece for unit in units for piece in own_pieces(unit)]
        self.optim = SplitOptimizer(pieces, kind, states)

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of this rank's part."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of this rank's part."""
        return self.optim.param_groups

    @property
    def own(self) -> Iterator[tuple[nn.Parameter, Tensor, str]]:
        """Every parameter with the gradient of this rank's part, and the axis along which ranks have other parts."""
        return ((piece.parameter, piece.gradient, u.sharing.axis) for u in self.units for piece in own_pieces(u))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's part and gather the others."""
        self.optim.step()
        for unit in self.units:
            gather(unit, [local(parameter.detach()) for parameter in unit.parameters])

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Make every gradient whole again."""
        for unit in self.units:
            gather(unit, unit.gradients)
