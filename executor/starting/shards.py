"""Gives the parameters of a sharded module their first values: a rank makes its own parts, one parameter at a time."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwise.executor.recording.private_torch import list_chunks
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.starting.construction import DeferredModule, Start
from meshwise.executor.starting.first_values import FirstValues, select_box

WHOLE_START = "every rank begins with the whole module"


def move_present(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module whose tensors with values are on a device; those on the meta device stay there."""
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call, no-any-return]


def find_obstacle(start: Start) -> str | None:
    """Return why some rank cannot make only its parts of first values, in words for all ranks; ``None`` if all can.

    All ranks call it, whatever they have started with. The words are empty where a module is there already.
    """
    own_reason = None if isinstance(start, DeferredModule) else start.reason
    own_digest = start.values.compute_digest() if isinstance(start, DeferredModule) else ""
    rows: list[Any] = [(own_reason, own_digest)]
    if dist.is_initialized():
        rows *= dist.get_world_size()
        dist.all_gather_object(rows, (own_reason, own_digest))
    for rank, (reason, _) in enumerate(rows):
        if reason is not None:
            return f"rank {rank}: {reason}" if reason else ""
    return None if len({digest for _, digest in rows}) == 1 else "ranks build different modules"


def tell_whole(obstacle: str) -> None:
    """Say in one line why every rank has had the whole module in memory; there are no words of one that was there."""
    if obstacle and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"{WHOLE_START}: {obstacle}", file=sys.stderr, flush=True)


def fill_shards(module: nn.Module, values: FirstValues, device: torch.device) -> None:
    """Give the parameters of a module of ``fully_shard``, which are on the meta device, memory and first values."""
    make_room(module, device)
    for name, parameter in module.named_parameters():
        fill_shard(parameter, name, values)


def make_room(module: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device of a module memory on a device."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]


@torch.no_grad()
def fill_shard(parameter: nn.Parameter, name: str, values: FirstValues) -> None:
    """Give a parameter its first values: those of this rank's shards, or of the whole where ranks have copies."""
    if not isinstance(parameter, DTensor):  # a scalar
        parameter.copy_(values.read(name))
        return
    local = to_local(parameter)
    offsets = [chunk.offsets for chunk in list_chunks(parameter)]
    sizes = [chunk.sizes for chunk in list_chunks(parameter)]
    for own_offsets, own_sizes in zip(offsets, sizes, strict=True):
        starts = [own - first for own, first in zip(own_offsets, offsets[0], strict=True)]
        if 0 not in own_sizes:
            part = values.read_part(name, own_offsets, own_sizes)
            select_box(local, starts, own_sizes).copy_(part)
