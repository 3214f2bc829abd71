"""Memory of the host, apart from the device's.

A rank on a core is its own host: both are main memory. What torch allocates counts as its device; what is on its host
lies in arrays of NumPy, which torch's allocator and its profiler do not see. A tensor on the host reads and writes such
an array; that of a GPU is page-locked. All that moves between the two is copied, and every copy is recorded.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from executor.accelerator import CORE, Accelerator
from executor.recorder import Recorder


class HostMemory:
    """Makes tensors on the host and counts their bytes: those there are, and the most there have been."""

    def __init__(self, recorder: Recorder, accelerator: Accelerator = CORE) -> None:
        self.recorder, self.accelerator = recorder, accelerator
        self.used = self.peak = 0
        self._addresses: set[int] = set()

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the host, of any values."""
        array = self.accelerator.host_bytes(max(elements * dtype.itemsize, 1))
        self.count(array.nbytes)
        address = array.ctypes.data
        self._addresses.add(address)
        weakref.finalize(array, self._free, address, array.nbytes)
        return torch.from_numpy(array)[: elements * dtype.itemsize].view(dtype)

    def _free(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.used -= size

    def count(self, size: int) -> None:
        """Take note of bytes that are held on the host."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.is_apart(tensor) or tensor.untyped_storage().data_ptr() in self._addresses

    def is_apart(self, tensor: Tensor) -> bool:
        """Return whether a tensor is where the device is not."""
        return tensor.device.type != self.accelerator.device.type

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host: itself where it is there, which is counted from now on, else a copy."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._addresses:
            return tensor
        if not self.is_apart(tensor):
            return self.copy(tensor)
        self._addresses.add(storage.data_ptr())
        self.count(storage.nbytes())
        return tensor

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: a copy of one on the host."""
        if not self.holds(tensor):
            return tensor
        return torch.empty_like(tensor, device=self.accelerator.device).copy_(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host of a tensor without gaps."""
        there = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor that is on the host there in a dtype: itself where it has it."""
        return tensor if tensor.dtype is dtype else self.room(tensor.numel(), dtype).view(tensor.shape).copy_(tensor)

    @contextmanager
    def moving(self, name: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Record the body as copies to, on or from the host: the last words of ``name`` say which."""
        with self.recorder.host_copy(name, stage, microbatch), torch.no_grad():
            yield
