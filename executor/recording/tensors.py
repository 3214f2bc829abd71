"""A rank's part of a tensor, and several tensors as one vector."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``: all of it, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_whole(tensor: Tensor) -> Tensor:
    """Return the whole of ``tensor``, which all ranks of its mesh put together where it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def list_values(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` that are not known to be zeros: all of them, unless it is sparse.

    >>> list_values(torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.tensor([3.0, 1.0]), (4,)))
    tensor([4.])
    """
    return tensor.coalesce().values() if tensor.is_sparse else tensor


class Cut(NamedTuple):
    """How a DTensor is cut, of which a rank has one part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]

    def restore(self, part: Tensor) -> DTensor:
        """Return the DTensor that is cut so and whose part on this rank is ``part``."""
        size, stride = self.size, self.stride
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=size, stride=stride)


def read_cut(tensor: DTensor) -> Cut:
    """Return how a tensor is cut."""
    return Cut(tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of ``tensors`` as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a vector, as `flatten` makes it, back into ``tensors``."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
