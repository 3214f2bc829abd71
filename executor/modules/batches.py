"""Batches of a user's data: tensors with samples in dim 0, in tuples or dicts, and the parts that ranks train on.

Strings, and lists of other things than tensors, have one item a sample. Single values and tuples of them belong to all.
"""

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
        return _rebuild(batch, [map_tensors(part, change) for part in batch])
    return batch


def is_sample_list(part: Any) -> bool:
    """Return whether a part of a batch is a list with an item a sample, such as the texts that a loader collates.

    >>> is_sample_list(("a", "b")), is_sample_list([3, 4]), is_sample_list((224, 224)), is_sample_list([Tensor()])
    (True, True, False, False)
    """
    if not isinstance(part, tuple | list) or not part or list_tensors(part):
        return False
    return isinstance(part, list) or all(isinstance(item, str | bytes) for item in part)


def _list_sample_lists(batch: Any) -> list[Any]:
    if is_sample_list(batch):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [found for part in parts for found in _list_sample_lists(part)]


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch; `BatchError` where its tensors and lists have no common number."""
    tensors = list_tensors(batch)
    if not tensors:
        raise BatchError(f"a batch is a tensor, or a tuple or dict of tensors, met {type(batch).__name__}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise BatchError("dim 0 of each tensor of a batch is the sample, met a scalar")
    sizes = [tensor.shape[0] for tensor in tensors]
    if len(set(sizes)) > 1:
        raise BatchError(f"all tensors of a batch have the same samples in dim 0, met {', '.join(map(str, sizes))}")
    for part in _list_sample_lists(batch):
        if len(part) != sizes[0]:
            raise BatchError(
                f"a list in a batch has an item for each of its samples({sizes[0]}), met {len(part)}; nearest: a "
                "tensor, or a tuple of numbers for what all samples share"
            )
    return sizes[0]


def select_samples(batch: Any, first: int, end: int) -> Any:
    """Return the samples from ``first`` to ``end``, which is not among them."""
    return map_parts(batch, lambda part: part[first:end])


def map_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with all tensors and all lists of samples changed."""
    if isinstance(batch, Tensor) or is_sample_list(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_parts(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        return _rebuild(batch, [map_parts(part, change) for part in batch])
    return batch


def _rebuild(batch: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """Return a tuple or list of the kind of another, with other parts."""
    is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    return type(batch)(*parts) if is_named else type(batch)(parts)


def count_tokens(batch: Any) -> int | None:
    """Return the tokens of a batch of token numbers; ``None`` for other batches.

    They are ``input_ids``, as tokenizers name them, or else the first tensor, if it has whole numbers for (sample,
    token).

    >>> count_tokens((torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5))), count_tokens(torch.zeros(2, 5))
    (10, None)
    """
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tokens = named if isinstance(named, Tensor) else next(iter(list_tensors(batch)), None)
    is_numbers = tokens is not None and tokens.dim() == 2 and tokens.dtype in (torch.int64, torch.int32)
    return tokens.numel() if tokens is not None and is_numbers else None


def split_evenly(batch: Any, num_parts: int, parts_name: str) -> list[Any]:
    """Return the equal parts of a batch in order; `BatchError` where the samples do not divide."""
    num_samples = count_samples(batch)
    if not num_samples or num_samples % num_parts:
        divisors = [number for number in range(1, num_samples + 1) if num_samples % number == 0]
        nearest = min(divisors, key=lambda number: abs(number - num_parts), default=1)
        others = max(num_samples // num_parts, 1) * num_parts
        met = f"met {num_samples} samples; nearest: {parts_name}({nearest}), or {others} samples"
        raise BatchError(f"{parts_name}({num_parts}) divide the batch, {met}")
    size = num_samples // num_parts
    return [select_samples(batch, part * size, (part + 1) * size) for part in range(num_parts)]


def select_part(batch: Any, part: int, num_parts: int) -> Any:
    """Return one of the parts of a batch in order, of as equal sizes as there are; it may be empty."""
    num_samples = count_samples(batch)
    return select_samples(batch, num_samples * part // num_parts, num_samples * (part + 1) // num_parts)


def to_double(batch: Any) -> Any:
    """Return a batch whose floats are fp64."""
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; copies from page-locked memory run beside computing."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def gather_samples(batch: Any, most: int) -> Any:
    """Return the first samples of all ranks, about ``most``; those of the first rank where ranks' shapes differ."""
    if not dist.is_initialized():
        return select_samples(batch, 0, most)
    own_samples = map_tensors(select_samples(batch, 0, max(most // dist.get_world_size(), 1)), Tensor.cpu)
    rank_samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_samples, own_samples)
    columns = [list_tensors(samples) for samples in rank_samples]
    shapes = {tuple(tensor.shape for tensor in column) for column in columns}
    if len(shapes) > 1:
        return to_device(rank_samples[0], list_tensors(batch)[0].device)
    return _join(rank_samples, batch)


def _join(parts: list[Any], batch: Any) -> Any:
    """Return equal parts as one batch; tensors are on the devices of those of ``batch``."""
    if isinstance(batch, Tensor):
        return torch.cat(parts).to(batch.device)
    if is_sample_list(batch):
        return type(batch)(item for part in parts for item in part)
    if isinstance(batch, Mapping):
        return {key: _join([part[key] for part in parts], item) for key, item in batch.items()}
    if isinstance(batch, tuple | list):
        return _rebuild(batch, [_join(list(rows), item) for *rows, item in zip(*parts, batch, strict=True)])
    return batch
