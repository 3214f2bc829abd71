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

from meshwise.executor.model.mixture import Compute, Experts, run_local_experts
from meshwise.executor.model.network import Network
from meshwise.executor.parallel.exchange import Exchange, Share, mark_collective
from meshwise.executor.recording.private_torch import all_gather
from meshwise.executor.recording.tensors import to_local
from meshwise.strategies.plan.mesh import EXPERT, TENSOR


def apply(network: Network, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut the experts of ``network`` over the expert and tensor axes of ``mesh``, in place.

    The loss of a rank is over its own tokens, and gradients become means over data ranks. An expert gets the tokens of
    all ranks along the expert axis, so its gradient is divided by the number of these ranks.
    """
    group = mesh[EXPERT].get_group()
    for layer in network.decoder_layers():
        if layer.mixture is not None:
            layer.mixture.dispatch = partial(dispatch_rows, group=group) if group.size() > 1 else run_local_experts
            _cut_experts(layer.mixture.experts, mesh)
            if mesh[TENSOR].size() > 1:
                run_cut = run_gathered if sequence_parallel else run_replicated
                layer.mixture.dispatch = partial(
                    _dispatch_cut, layer.mixture.dispatch, partial(run_cut, mesh[TENSOR].get_group())
                )


def split_experts(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that all ranks along the expert axis have, and those of experts, which they divide."""
    expert_parameters = [parameter for parameter in parameters if _is_expert(parameter)]
    return [parameter for parameter in parameters if not _is_expert(parameter)], expert_parameters


def _is_expert(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and EXPERT in (parameter.device_mesh.mesh_dim_names or ())


def _dispatch_cut(
    dispatch: Callable[..., Tensor], run_cut: Callable[..., Tensor], experts: Compute, *rows: Tensor
) -> Tensor:
    """Return the results of experts that tensor ranks cut along their width, for rows of all expert ranks."""
    return dispatch(partial(run_cut, experts), *rows)


def _cut_experts(experts: Experts, mesh: DeviceMesh) -> None:
    num_ranks = mesh[EXPERT].size()
    axes = tuple(axis for axis in (EXPERT, TENSOR) if mesh[axis].size() > 1)
    if not axes:
        return
    for name, dim in (("up", 1), ("down", 2)):
        placements = {EXPERT: Shard(0), TENSOR: Shard(dim)}
        weight = distribute_tensor(getattr(experts, name).detach(), mesh[axes], [placements[axis] for axis in axes])
        setattr(experts, name, nn.Parameter(weight))
    experts.read_weight = partial(_share_weight, num_ranks=num_ranks)


def _share_weight(parameter: Tensor, *, num_ranks: int) -> Tensor:
    result: Tensor = Share.apply(to_local(parameter), num_ranks)  # type: ignore[no-untyped-call]
    return result


def dispatch_rows(experts: Compute, rows: Tensor, counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the results of experts for ``rows``, in the same order; rows go to the ranks of their experts and back.

    ``rows``, ``(rows, hidden)``, are sorted by expert, and ``counts`` has their number for each expert. Ranks of the
    group have equally many experts each, in order.
    """
    send_counts = counts.view(group.size(), -1)
    receive_counts = torch.empty_like(send_counts)
    with mark_collective(EXPERT, "all_to_all counts"):
        dist.all_to_all_single(receive_counts, send_counts.contiguous(), group=group)
    send_sizes, receive_sizes = send_counts.sum(1).tolist(), receive_counts.sum(1).tolist()
    received_rows = Exchange.apply(rows, group, EXPERT, send_sizes, receive_sizes)  # type: ignore[no-untyped-call]
    order = order_by_expert(receive_counts)
    outputs = experts(received_rows[order], receive_counts.sum(0).tolist())
    result: Tensor = Exchange.apply(outputs[order.argsort()], group, EXPERT, receive_sizes, send_sizes)  # type: ignore[no-untyped-call]
    return result


def order_by_expert(counts: Tensor) -> Tensor:
    """Return the indices that sort rows by expert, where they come sorted by source rank and then by expert.

    ``counts``, ``(sources, experts)``, has the number of rows from each source for each expert.

    >>> order_by_expert(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    sources, experts = counts.shape
    return (
        torch.arange(experts, device=counts.device)
        .repeat(sources)
        .repeat_interleave(counts.flatten())
        .argsort(stable=True)
    )


def run_replicated(group: dist.ProcessGroup, experts: Compute, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the results of experts for ``rows``, which all tensor ranks have, and which each computes in part."""
    outputs = experts(_CopyToRanks.apply(rows, group), counts)  # type: ignore[no-untyped-call]
    result: Tensor = _SumOverRanks.apply(outputs, group)  # type: ignore[no-untyped-call]
    return result


def run_gathered(group: dist.ProcessGroup, experts: Compute, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the results of experts for this rank's ``rows``, where tensor ranks cut both the width and the tokens.

    Every tensor rank computes its part of the width for the rows of all; the parts of a row are summed where it came
    from.
    """
    ranks, own_counts = group.size(), torch.tensor(counts, device=rows.device)
    all_counts = own_counts.new_empty(ranks * len(own_counts))
    with mark_collective(TENSOR, "all_gather counts"):
        all_gather(all_counts, own_counts, group=group)
    all_counts = all_counts.view(ranks, -1)
    own_sizes, rank_sizes = [len(rows)] * ranks, all_counts.sum(1).tolist()
    received_rows = Exchange.apply(rows.repeat(ranks, 1), group, TENSOR, own_sizes, rank_sizes)  # type: ignore[no-untyped-call]
    order = order_by_expert(all_counts)
    outputs = experts(received_rows[order], all_counts.sum(0).tolist())[order.argsort()]
    parts: Tensor = Exchange.apply(outputs, group, TENSOR, rank_sizes, own_sizes)  # type: ignore[no-untyped-call]
    return parts.view(ranks, *rows.shape).sum(0)


def _all_reduce(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    with mark_collective(TENSOR, "all_reduce"):
        dist.all_reduce(total, group=group)
    return total


class _CopyToRanks(torch.autograd.Function):
    """Passes on values that all tensor ranks have; in backward it sums the partial gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _all_reduce(gradients[0], ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    """Sums the partial values of tensor ranks; the gradient of the sum is the gradient of each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None
