"""Offload: memory of the host, and activations that stay there from forward to backward, layer by layer.

The tensors that autograd saves of a layer [1]_ are copied to the host when the layer's forward has ended. The device
has two buffers, each for the activations of one layer [2]_: the tensors stay on it until the forward of the layer after
the next needs their buffer. They come back while the layer behind theirs runs backward. The last two layers of a
microbatch whose backward follows its forward at once are not moved. So the device has the activations of at most two
layers (`meshwise.strategies.lowering.contents` says the same of the simulated step). Where copies run beneath
computing, the computation waits only for a copy whose buffer it overwrites, or whose values it reads.

A rank on a core is its own host: both are main memory. Memory that torch allocates counts as its device. Memory of its
host is in NumPy arrays, which torch's allocator and profiler do not see; a tensor on the host is a view of such an
array, page-locked on a host of GPUs. Everything that moves between the two is copied, and every copy is recorded.

References
----------
.. [1] torch, ``torch.autograd.graph.saved_tensors_hooks``.
.. [2] TransformerEngine, ``pytorch/cpu_offload.py``, ``AsyncDoubleBufferGroupOffloadHandler`` (two buffers in turns).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.executor.recording.accelerator import CORE, Accelerator
from meshwise.executor.recording.private_torch import storage_number, wait_collective
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import Cut, read_cut, to_local
from meshwise.strategies.plan.offloading import count_fraction
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.schedules.schedule import ActionKind, Schedule


class HostMemory:
    """Makes tensors on the host and counts their bytes: those in use now, and the peak."""

    def __init__(self, recorder: Recorder, accelerator: Accelerator = CORE) -> None:
        self.recorder, self.accelerator = recorder, accelerator
        self.used_bytes = self.peak_bytes = 0
        self._addresses: set[int] = set()

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised vector on the host."""
        array = self.accelerator.host_bytes(max(elements * dtype.itemsize, 1))
        self.count_bytes(array.nbytes)
        address = array.ctypes.data
        self._addresses.add(address)
        weakref.finalize(array, self._free, address, array.nbytes)
        return torch.from_numpy(array)[: elements * dtype.itemsize].view(dtype)

    def _free(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.used_bytes -= size

    def count_bytes(self, size: int) -> None:
        """Add bytes to those in use on the host."""
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.is_off_device(tensor) or tensor.untyped_storage().data_ptr() in self._addresses

    def is_off_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on another kind of device than the accelerator: never where this is a core."""
        return tensor.device.type != self.accelerator.device.type

    def ensure_on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host: a copy, or the tensor itself where it is there, which then counts."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._addresses:
            return tensor
        if not self.is_off_device(tensor):
            return self.copy_to_host(tensor)
        self._addresses.add(storage.data_ptr())
        self.count_bytes(storage.nbytes())
        return tensor

    def bring_to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: a copy, or the tensor itself where it is there."""
        if not self.holds(tensor):
            return tensor
        return torch.empty_like(tensor, device=self.accelerator.device).copy_(tensor)

    def copy_to_host(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy, on the host, of a contiguous tensor; by default in the dtype that it has."""
        return self.allocate(tensor.numel(), dtype or tensor.dtype).view(tensor.shape).copy_(tensor)

    def cast_on_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the host in a dtype: a copy on the host, or the tensor itself where it has the dtype."""
        return tensor if tensor.dtype is dtype else self.copy_to_host(tensor, dtype)

    @contextmanager
    def record_copy(self, name: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Record the body as a copy to, on or from the host, as the last words of ``name`` say."""
        with self.recorder.record_host_copy(name, stage, microbatch), torch.no_grad():
            yield


NUM_BUFFERS = 2
"""Layers whose activations the device has memory for."""


class _Storage:
    """The bytes of one storage that autograd saves: on the device, on the host or on both."""

    def __init__(self, layer: "_Layer", tensor: Tensor) -> None:
        self.layer = layer
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.device: Tensor | None = torch.as_strided(tensor.detach(), (elements,), (1,), 0)
        self.host: Tensor | None = None
        self.copy_event: Any = None
        """The copy to wait for: to the host, before the device frees its bytes, or back, before their use."""


class _SavedTensor(NamedTuple):
    """Stands for a tensor that autograd saves: its place in a storage, and its cut where it is a DTensor."""

    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    cut: Cut | None


class _Layer:
    """The storages that autograd saves of one layer for one microbatch; backward frees them one by one."""

    def __init__(self, name: str, stage: int, microbatch: int, previous: "_Layer | None") -> None:
        self.name, self.stage, self.microbatch, self.previous = name, stage, microbatch, previous
        # weak: only autograd's saved tensors keep storages alive, so a layer is done when its set is empty
        self.storages: WeakSet[_Storage] = WeakSet()
        self.storage_by_number: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self.weights: set[int] | None = None
        self.has_begun = False


class ActivationOffload:
    """Moves the activations of the layers of one rank; all stages of the rank share two buffers."""

    def __init__(self, schedule: Schedule, position: int, host: HostMemory) -> None:
        self.host, self.copier = host, host.accelerator.copier()
        self.buffers: list[_Layer] = []
        order = schedule.orders[position]
        turns = {(a.stage, a.microbatch) for a, b in pairwise(order) if b == a._replace(kind=ActionKind.BACKWARD)}
        self.turns = turns
        self.last_layer: _Layer | None = None

    @contextmanager
    def offload_layer(self, module: nn.Module, name: str, num_behind: int) -> Iterator[None]:
        """Move the activations of a layer, whose forward is the body.

        ``num_behind`` more layers with activations that move come after it in the stage.
        """
        stage, microbatch = self.host.recorder.current_pass
        last = self.last_layer
        previous = last if last and (last.stage, last.microbatch) == (stage, microbatch) else None
        layer = self.last_layer = _Layer(name, stage, microbatch, previous)
        self._admit(layer)

        def pack(tensor: Tensor) -> _SavedTensor | Tensor:
            return self._pack(layer, module, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        layer.storage_by_number.clear()
        if num_behind >= NUM_BUFFERS or (stage, microbatch) not in self.turns:
            self._copy_to_host(layer)

    def _pack(self, layer: _Layer, module: nn.Module, tensor: Tensor) -> _SavedTensor | Tensor:
        part = wait_collective(to_local(tensor.detach()))
        if layer.weights is None:  # not before: a sharded layer gathers its parameters in its own forward
            layer.weights = {storage_number(to_local(parameter.detach())) for parameter in module.parameters()}
        number = storage_number(part)
        if number in layer.weights or self.host.is_off_device(part):  # some kernels save a number or two on the host
            return tensor
        entry = layer.storage_by_number.get(number)
        if entry is None:
            entry = layer.storage_by_number[number] = _Storage(layer, part)
            layer.storages.add(entry)
        cut = read_cut(tensor) if isinstance(tensor, DTensor) else None
        return _SavedTensor(entry, part.size(), part.stride(), int(part.storage_offset()), cut)

    def _unpack(self, saved_tensor: _SavedTensor | Tensor) -> Tensor:
        if isinstance(saved_tensor, Tensor):
            return saved_tensor
        layer = saved_tensor.storage.layer
        if not layer.has_begun:
            layer.has_begun = True
            self._admit(layer)
            self._copy_from_host(layer)
            if layer.previous is not None:
                self._admit(layer.previous, running_layer=layer)
                self._copy_from_host(layer.previous)
        assert saved_tensor.storage.device is not None
        self._wait(saved_tensor.storage)
        part = torch.as_strided(
            saved_tensor.storage.device, saved_tensor.size, saved_tensor.stride, saved_tensor.offset
        )
        return part if saved_tensor.cut is None else saved_tensor.cut.restore(part)

    def _admit(self, layer: _Layer, running_layer: _Layer | None = None) -> None:
        """Give a layer a buffer on the device; a layer that runs backward keeps the other buffer."""
        self.buffers = [buffer for buffer in self.buffers if buffer.storages and buffer is not layer]
        while len(self.buffers) >= NUM_BUFFERS:
            self._evict(next(buffer for buffer in self.buffers if buffer is not running_layer))
        self.buffers.append(layer)

    def _evict(self, layer: _Layer) -> None:
        self._copy_to_host(layer)
        self.buffers.remove(layer)
        for entry in layer.storages:
            self._wait(entry)
            entry.device = None

    def _wait(self, storage: _Storage) -> None:
        if storage.copy_event is not None:
            self.copier.wait(storage.copy_event)
            storage.copy_event = None

    def _copy_to_host(self, layer: _Layer) -> None:
        entries = [entry for entry in layer.storages if entry.host is None]
        if entries:
            with self.host.record_copy(f"activations of {layer.name} to host", layer.stage, layer.microbatch):
                for entry in entries:
                    assert entry.device is not None
                    entry.host = self.host.allocate(entry.device.numel(), entry.device.dtype)
                    entry.copy_event = self.copier.copy(entry.device, entry.host)

    def _copy_from_host(self, layer: _Layer) -> None:
        entries = [entry for entry in layer.storages if entry.device is None]
        if entries:
            with self.host.record_copy(f"activations of {layer.name} from host", layer.stage, layer.microbatch):
                for entry in entries:
                    assert entry.host is not None
                    entry.device = torch.empty_like(entry.host, device=self.host.accelerator.device)
                    entry.copy_event = self.copier.copy(entry.host, entry.device)
                    entry.host = None


def count_offloaded_layers(plan: Plan, position: int, layers: int) -> int:
    """Return how many of the first layers of a stage move their activations to the host."""
    return count_fraction(layers, plan.offload.fraction_at("activations", position))
