"""A rank's part of a tensor, and several tensors as one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``: all of it, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of ``tensors`` as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a vector, as `flatten` makes it, back into ``tensors``."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
