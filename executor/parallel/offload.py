"""Offload: memory of the host, and activations that stay there from forward to backward, layer by layer.

The tensors that autograd saves of a layer [1]_ are copied to the host when the layer's forward has ended. The device
has two buffers, each for the activations of one layer [2]_: the tensors stay on it until the forward of the layer after
the next needs their buffer. They come back while the layer behind theirs runs backward. The last two layers of a
microbatch whose backward follows its forward at once are not moved. So the device has the activations of at most two
layers (`meshwise.strategies.lowering.tasks.contents` says the same of the simulated step). Where copies run beneath
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwise.executor.recording.accelerator import CORE, Accelerator
from meshwise.executor.recording.private_torch import storage, waited
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import local
from meshwise.strategies.plan.offloading import fraction_of
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.schedules.schedule import ActionKind


class HostMemory:
    """Makes tensors on the host and counts their bytes: those in use now, and the peak."""

    def __init__(self, recorder: Recorder, accelerator: Accelerator = CORE) -> None:
        self.recorder, self.accelerator = recorder, accelerator
        self.used = self.peak = 0
        self._addresses: set[int] = set()

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised vector on the host."""
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
        """Add bytes to those in use on the host."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.is_apart(tensor) or tensor.untyped_storage().data_ptr() in self._addresses

    def is_apart(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on another kind of device than the accelerator: never where this is a core."""
        return tensor.device.type != self.accelerator.device.type

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host: a copy, or the tensor itself where it is there, which then counts."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._addresses:
            return tensor
        if not self.is_apart(tensor):
            return self.copy(tensor)
        self._addresses.add(storage.data_ptr())
        self.count(storage.nbytes())
        return tensor

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: a copy, or the tensor itself where it is there."""
        if not self.holds(tensor):
            return tensor
        return torch.empty_like(tensor, device=self.accelerator.device).copy_(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, on the host, of a contiguous tensor."""
        there = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the host in a dtype: a copy on the host, or the tensor itself where it has the dtype."""
        return tensor if tensor.dtype is dtype else self.room(tensor.numel(), dtype).view(tensor.shape).copy_(tensor)

    @contextmanager
    def moving(self, name: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Record the body as a copy to, on or from the host, as the last words of ``name`` say."""
        with self.recorder.host_copy(name, stage, microbatch), torch.no_grad():
            yield


BUFFERS = 2
"""Layers whose activations the device has memory for."""


class _Storage:
    """The bytes of one storage that autograd saves: on the device, on the host or on both."""

    def __init__(self, layer: "_Layer", tensor: Tensor) -> None:
        self.layer = layer
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.device: Tensor | None = torch.as_strided(tensor.detach(), (elements,), (1,), 0)
        self.host: Tensor | None = None
        self.copied: Any = None
        """The copy to wait for: to the host, before the device frees its bytes, or back, before their use."""


class _Kept(NamedTuple):
    """Stands for a tensor that autograd saves: its place in a storage, and its cut where it is a DTensor."""

    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    cut: "_Cut | None"


class _Cut(NamedTuple):
    """How a DTensor is cut, of which a rank has one part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]


class _Layer:
    """The storages that autograd saves of one layer for one microbatch; backward frees them one by one."""

    def __init__(self, name: str, stage: int, microbatch: int, before: "_Layer | None") -> None:
        self.name, self.stage, self.microbatch, self.before = name, stage, microbatch, before
        # weak: only autograd's saved tensors keep storages alive, so a layer is done when its set is empty
        self.storages: WeakSet[_Storage] = WeakSet()
        self.by_number: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self.weights: set[int] | None = None
        self.begun = False


class ActivationOffload:
    """Moves the activations of the layers of one rank; all stages of the rank share two buffers."""

    def __init__(self, plan: Plan, position: int, host: HostMemory) -> None:
        self.host, self.copier = host, host.accelerator.copier()
        self.buffers: list[_Layer] = []
        order = plan.actions.orders[position]
        follows = {(a.stage, a.microbatch) for a, b in pairwise(order) if b == a._replace(kind=ActionKind.BACKWARD)}
        self.at_once = follows
        self.last: _Layer | None = None

    @contextmanager
    def layer(self, module: nn.Module, name: str, left: int) -> Iterator[None]:
        """Move the activations of a layer, whose forward is the body.

        ``num_behind`` more layers with activations that move come after it in the stage.
        """
        stage, microbatch = self.host.recorder.current
        before = self.last if self.last and (self.last.stage, self.last.microbatch) == (stage, microbatch) else None
        layer = self.last = _Layer(name, stage, microbatch, before)
        self._admit(layer)

        def pack(tensor: Tensor) -> _Kept | Tensor:
            return self._pack(layer, module, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        layer.by_number.clear()
        if left >= BUFFERS or (stage, microbatch) not in self.at_once:
            self._to_host(layer)

    def _pack(self, layer: _Layer, module: nn.Module, tensor: Tensor) -> _Kept | Tensor:
        part = waited(local(tensor.detach()))
        if layer.weights is None:  # not before: a sharded layer gathers its parameters in its own forward
            layer.weights = set(_numbers(module.parameters()))
        number = storage(part)
        if number in layer.weights or self.host.is_apart(part):  # some kernels save a number or two on the host
            return tensor
        found = layer.by_number.get(number)
        if found is None:
            found = layer.by_number[number] = _Storage(layer, part)
            layer.storages.add(found)
        cut = None
        if isinstance(tensor, DTensor):
            cut = _Cut(tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())
        return _Kept(found, part.size(), part.stride(), int(part.storage_offset()), cut)

    def _unpack(self, kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        layer = kept.storage.layer
        if not layer.begun:
            layer.begun = True
            self._admit(layer)
            self._from_host(layer)
            if layer.before is not None:
                self._admit(layer.before, beside=layer)
                self._from_host(layer.before)
        assert kept.storage.device is not None
        self._wait(kept.storage)
        part = torch.as_strided(kept.storage.device, kept.size, kept.stride, kept.offset)
        if kept.cut is None:
            return part
        mesh, placements, size, stride = kept.cut
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)

    def _admit(self, layer: _Layer, beside: _Layer | None = None) -> None:
        """Give a layer a buffer on the device; a layer that runs backward keeps the other buffer."""
        self.buffers = [each for each in self.buffers if each.storages and each is not layer]
        while len(self.buffers) >= BUFFERS:
            self._leave(next(each for each in self.buffers if each is not beside))
        self.buffers.append(layer)

    def _leave(self, layer: _Layer) -> None:
        self._to_host(layer)
        self.buffers.remove(layer)
        for each in layer.storages:
            self._wait(each)
            each.device = None

    def _wait(self, storage: _Storage) -> None:
        if storage.copied is not None:
            self.copier.wait(storage.copied)
            storage.copied = None

    def _to_host(self, layer: _Layer) -> None:
        away = [each for each in layer.storages if each.host is None]
        if away:
            with self.host.moving(f"activations of {layer.name} to host", layer.stage, layer.microbatch):
                for each in away:
                    assert each.device is not None
                    each.host = self.host.room(each.device.numel(), each.device.dtype)
                    each.copied = self.copier.copy(each.device, each.host)

    def _from_host(self, layer: _Layer) -> None:
        away = [each for each in layer.storages if each.device is None]
        if away:
            with self.host.moving(f"activations of {layer.name} from host", layer.stage, layer.microbatch):
                for each in away:
                    assert each.host is not None
                    each.device = torch.empty_like(each.host, device=self.host.accelerator.device)
                    each.copied = self.copier.copy(each.host, each.device)
                    each.host = None


def layers_away(plan: Plan, position: int, layers: int) -> int:
    """Return how many of the first layers of a stage move their activations to the host."""
    return fraction_of(layers, plan.offload.at("activations", position))


def _numbers(parameters: Iterable[nn.Parameter]) -> Iterator[int]:
    for parameter in parameters:
        yield storage(local(parameter.detach()))
