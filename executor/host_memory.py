"""Memory of the host, apart from the device's.

A rank on gloo is its own host: both are main memory. What torch allocates counts as its device; what is on its host
lies in arrays of NumPy, which torch's allocator and its profiler do not see. A tensor on the host reads and writes such
an array. All that moves between the two is copied, and every copy is recorded.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from executor.recorder import Recorder


class HostMemory:
    """Makes tensors on the host and counts their bytes: those there are, and the most there have been."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.used = self.peak = 0
        self._addresses: set[int] = set()

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of zeros on the host."""
        array = np.zeros(max(elements * dtype.itemsize, 1), np.uint8)
        self.used += array.nbytes
        self.peak = max(self.peak, self.used)
        address = array.ctypes.data
        self._addresses.add(address)
        weakref.finalize(array, self._free, address, array.nbytes)
        return torch.from_numpy(array)[: elements * dtype.itemsize].view(dtype)

    def _free(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.used -= size

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host of a tensor without gaps."""
        there = self.zeros(tensor.numel(), tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    @contextmanager
    def moving(self, name: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Record the body as copies to, on or from the host: the last words of ``name`` say which."""
        with self.recorder.host_copy(name, stage, microbatch), torch.no_grad():
            yield
