"""Expert parallelism: ranks divide the experts of a layer, and all-to-alls bring tokens to them and back [1]_.

Every rank routes its own tokens. Ranks first exchange how many tokens they send, so no token is padded or dropped. With
tensor parallelism the experts are cut along their width [2]_. Where tensor ranks also cut the sequence, each sends its
own part of the tokens, and the tokens of an expert are gathered over the tensor ranks before it and scattered after it
[3]_.

References
----------
.. [1] Lepikhin et al. 2020, "GShard", section 3.
.. [2] Shoeybi et al. 2019, "Megatron-LM", section 3.
.. [3] Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2 (gather
   before, scatter after).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwise.executor.model.mixture import Compute, Experts, here
from meshwise.executor.model.network import Network
from meshwise.executor.parallel.exchange import Exchange, Share, moving
from meshwise.executor.recording.private_torch import all_gather
from meshwise.executor.recording.tensors import local
from meshwise.strategies.plan.mesh import EXPERT, TENSOR


def apply(network: Network, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut the experts of ``network`` over the expert and tensor axes of ``mesh``, in place.

    The loss of a rank is over its own tokens, and gradients become means over data ranks. An expert gets the tokens of
    all ranks along the expert axis, so its gradient is divided by the number of these ranks.
    """
    group = mesh[EXPERT].get_group()
    for layer in network.decoder_layers():
        if layer.mixture is not None:
            layer.mixture.spread = partial(spread, group=group) if group.size() > 1 else here
            _cut(layer.mixture.experts, mesh)
            if mesh[TENSOR].size() > 1:
                across = gathered if sequence_parallel else replicated
                layer.mixture.spread = partial(_with, layer.mixture.spread, partial(across, mesh[TENSOR].get_group()))


def apart(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that all ranks along the expert axis have, and those of experts, which they divide."""
    spread = [parameter for parameter in parameters if _is_spread(parameter)]
    return [parameter for parameter in parameters if not _is_spread(parameter)], spread


def _is_spread(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and EXPERT in (parameter.device_mesh.mesh_dim_names or ())


def _with(spread: Callable[..., Tensor], across: Callable[..., Tensor], experts: Compute, *rows: Tensor) -> Tensor:
    """Return the results of experts that tensor ranks cut along their width, for rows of all expert ranks."""
    return spread(partial(across, experts), *rows)


def _cut(experts: Experts, mesh: DeviceMesh) -> None:
    ways = mesh[EXPERT].size()
    axes = tuple(axis for axis in (EXPERT, TENSOR) if mesh[axis].size() > 1)
    if not axes:
        return
    for name, dim in (("up", 1), ("down", 2)):
        placements = {EXPERT: Shard(0), TENSOR: Shard(dim)}
        cut = distribute_tensor(getattr(experts, name).detach(), mesh[axes], [placements[axis] for axis in axes])
        setattr(experts, name, nn.Parameter(cut))
    experts.own = partial(_share, ways=ways)


def _share(parameter: Tensor, *, ways: int) -> Tensor:
    result: Tensor = Share.apply(local(parameter), ways)  # type: ignore[no-untyped-call]
    return result


def spread(experts: Compute, rows: Tensor, counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the results of experts for ``rows``, in the same order; rows go to the ranks of their experts and back.

    Parameters
    ----------
    rows
        ``(rows, hidden)``, sorted by expert.
    counts
        The number of rows for each expert. Ranks of the group have equally many experts each, in order.
    """
    sent = counts.view(group.size(), -1)
    received = torch.empty_like(sent)
    with moving(EXPERT, "all_to_all counts"):
        dist.all_to_all_single(received, sent.contiguous(), group=group)
    there, back = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = Exchange.apply(rows, group, EXPERT, there, back)  # type: ignore[no-untyped-call]
    order = by_expert(received)
    made = experts(arrived[order], received.sum(0).tolist())
    result: Tensor = Exchange.apply(made[order.argsort()], group, EXPERT, back, there)  # type: ignore[no-untyped-call]
    return result


def by_expert(counts: Tensor) -> Tensor:
    """Return the indices that sort rows by expert, where they come sorted by source rank and then by expert.

    ``counts``, ``(sources, experts)``, has the number of rows from each source for each expert.

    >>> by_expert(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    sources, experts = counts.shape
    return (
        torch.arange(experts, device=counts.device)
        .repeat(sources)
        .repeat_interleave(counts.flatten())
        .argsort(stable=True)
    )


def replicated(group: dist.ProcessGroup, experts: Compute, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the results of experts for ``rows``, which all tensor ranks have, and which each computes in part."""
    made = experts(_Enter.apply(rows, group), counts)  # type: ignore[no-untyped-call]
    result: Tensor = _Leave.apply(made, group)  # type: ignore[no-untyped-call]
    return result


def gathered(group: dist.ProcessGroup, experts: Compute, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the results of experts for this rank's ``rows``, where tensor ranks cut both the width and the tokens.

    Every tensor rank computes its part of the width for the rows of all; the parts of a row are summed where it came
    from.
    """
    ranks, own = group.size(), torch.tensor(counts, device=rows.device)
    every = own.new_empty(ranks * len(own))
    with moving(TENSOR, "all_gather counts"):
        all_gather(every, own, group=group)
    every = every.view(ranks, -1)
    mine, theirs = [len(rows)] * ranks, every.sum(1).tolist()
    arrived = Exchange.apply(rows.repeat(ranks, 1), group, TENSOR, mine, theirs)  # type: ignore[no-untyped-call]
    order = by_expert(every)
    made = experts(arrived[order], every.sum(0).tolist())[order.argsort()]
    parts: Tensor = Exchange.apply(made, group, TENSOR, theirs, mine)  # type: ignore[no-untyped-call]
    return parts.view(ranks, *rows.shape).sum(0)


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    with moving(TENSOR, "all_reduce"):
        dist.all_reduce(total, group=group)
    return total


class _Enter(torch.autograd.Function):
    """Passes on values that all tensor ranks have; in backward it sums the partial gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _sum(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """Sums the partial values of tensor ranks; the gradient of the sum is the gradient of each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None
