"""Batches of a user's data: tensors with samples in dim 0, in tuples or dicts, and the parts that ranks train on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.recording.rank_files import UserError


class BatchError(UserError):
    """A batch that cannot be divided, or is no batch."""


def list_tensors(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch: a tensor, or a tuple, list or mapping of batches; other values pass through."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with all tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [map_tensors(part, change) for part in batch]
        is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
        return type(batch)(*parts) if is_named else type(batch)(parts)
    return batch


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch; `BatchError` where its tensors have no common dim 0."""
    tensors = list_tensors(batch)
    if not tensors:
        raise BatchError(f"a batch is a tensor, or a tuple or dict of tensors, met {type(batch).__name__}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise BatchError("dim 0 of each tensor of a batch is the sample, met a scalar")
    sizes = [tensor.shape[0] for tensor in tensors]
    if len(set(sizes)) > 1:
        raise BatchError(f"all tensors of a batch have the same samples in dim 0, met {', '.join(map(str, sizes))}")
    return sizes[0]


def select_samples(batch: Any, first: int, end: int) -> Any:
    """Return the samples from ``first`` to ``end``, which is not among them."""
    return map_tensors(batch, lambda tensor: tensor[first:end])


def split_evenly(batch: Any, num_parts: int, parts_name: str) -> list[Any]:
    """Return the equal parts of a batch in order; `BatchError` where the samples do not divide."""
    num_samples = count_samples(batch)
    if not num_samples or num_samples % num_parts:
        nearest = max(num_samples // num_parts, 1) * num_parts
        raise BatchError(f"{parts_name}({num_parts}) divide the batch, met {num_samples} samples; nearest: {nearest}")
    size = num_samples // num_parts
    return [select_samples(batch, part * size, (part + 1) * size) for part in range(num_parts)]


def to_double(batch: Any) -> Any:
    """Return a batch whose floats are fp64."""
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; copies from page-locked memory run beside computing."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def gather_samples(batch: Any, most: int) -> Any:
    """Return the first samples of all ranks, about ``most``; those of this rank where ranks' shapes differ."""
    if not dist.is_initialized():
        return select_samples(batch, 0, most)
    own_samples = map_tensors(select_samples(batch, 0, max(most // dist.get_world_size(), 1)), Tensor.cpu)
    rank_samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_samples, own_samples)
    columns = [list_tensors(samples) for samples in rank_samples]
    shapes = {tuple(tensor.shape for tensor in column) for column in columns}
    if len(shapes) > 1:
        return select_samples(batch, 0, most)
    joined = iter([torch.cat(tensors) for tensors in zip(*columns, strict=True)])
    return map_tensors(batch, lambda tensor: next(joined).to(tensor.device))
