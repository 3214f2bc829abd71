"""Gives the parameters of a sharded module their first values: a rank makes its own parts, one parameter at a time."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwise.executor.recording.private_torch import list_chunks
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.starting.first_values import FirstValues, select_box


def move_present(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module whose tensors with values are on a device; those on the meta device stay there."""
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call, no-any-return]


def has_equal_values(values: FirstValues) -> bool:
    """Return whether all ranks have the same first values, as programs make them that know nothing of their rank."""
    if not dist.is_initialized():
        return True
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, values.compute_digest())
    return len(set(digests)) == 1


def fill_shards(module: nn.Module, values: FirstValues, device: torch.device) -> None:
    """Give the parameters of a module of ``fully_shard``, which are on the meta device, memory and first values."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            local = to_local(parameter)
            offsets = [chunk.offsets for chunk in list_chunks(parameter)]
            sizes = [chunk.sizes for chunk in list_chunks(parameter)]
            for own_offsets, own_sizes in zip(offsets, sizes, strict=True):
                starts = [own - first for own, first in zip(own_offsets, offsets[0], strict=True)]
                if 0 not in own_sizes:
                    part = values.read_part(name, own_offsets, own_sizes)
                    select_box(local, starts, own_sizes).copy_(part)
