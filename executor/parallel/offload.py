"""Offload: memory of the host, and activations that are there from forward to backward.

Activations in host memory from forward to backward, layer by layer, through two buffers on the device.

What autograd keeps of a layer is copied to the host when the layer's forward has ended, and stays on the device until
the forward of the layer after the next needs the room. It comes back while the layer behind it runs backward. The last
two layers of a microbatch whose backward follows its forward at once move nowhere. So at most two layers' activations
are on the device (`meshwise.strategies.lowering.tasks.contents` says the same of the simulated step). Where copies run
beside what computes, what computes waits for the copy whose room it takes, or whose values it reads.

Memory of the host, apart from the device's.

A rank on a core is its own host: both are main memory. What torch allocates counts as its device; what is on its host
lies in arrays of NumPy, which torch's allocator and its profiler do not see. A tensor on the host reads and writes such
an array; that of a GPU is page-locked. All that moves between the two is copied, and every copy is recorded.

References
----------
TransformerEngine, ``pytorch/cpu_offload.py``, ``AsyncDoubleBufferGroupOffloadHandler`` (two buffers in turns).
torch, ``torch.autograd.graph.saved_tensors_hooks``.
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


BUFFERS = 2
"""Layers whose activations the device has room for."""


class _Storage:
    """The bytes of one storage that autograd keeps, on the device, on the host or on both."""

    def __init__(self, layer: "_Layer", tensor: Tensor) -> None:
        self.layer = layer
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.device: Tensor | None = torch.as_strided(tensor.detach(), (elements,), (1,), 0)
        self.host: Tensor | None = None
        self.copied: Any = None
        """What to wait for: the copy to the host before the device gives its own up, or the one back before its use."""


class _Kept(NamedTuple):
    """One tensor that autograd keeps: where in a storage it lies, and how a rank's part of a whole one is cut."""

    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    cut: "_Cut | None"


class _Cut(NamedTuple):
    """How a whole tensor is cut, of which a rank keeps a part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]


class _Layer:
    """What autograd keeps of one layer for one microbatch; backward gives it up piece by piece."""

    def __init__(self, name: str, stage: int, microbatch: int, before: "_Layer | None") -> None:
        self.name, self.stage, self.microbatch, self.before = name, stage, microbatch, before
        self.storages: WeakSet[_Storage] = WeakSet()
        self.by_number: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self.weights: set[int] | None = None
        self.begun = False


class ActivationOffload:
    """Moves the activations of the layers of one rank; all its stages share two buffers."""

    def __init__(self, plan: Plan, position: int, host: HostMemory) -> None:
        self.host, self.copier = host, host.accelerator.copier()
        self.buffers: list[_Layer] = []
        order = plan.actions.orders[position]
        follows = {(a.stage, a.microbatch) for a, b in pairwise(order) if b == a._replace(kind=ActionKind.BACKWARD)}
        self.at_once = follows
        self.last: _Layer | None = None

    @contextmanager
    def layer(self, module: nn.Module, name: str, left: int) -> Iterator[None]:
        """Run the body, which is the forward of a layer with ``left`` more behind it whose activations move too."""
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
        if layer.weights is None:  # now: a sharded layer is gathered by its own forward
            layer.weights = set(_numbers(module.parameters()))
        number = storage(part)
        if number in layer.weights or self.host.is_apart(part):  # some kernels keep a number or two on the host
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
        """Make room on the device for a layer, beside one that runs backward."""
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
    """Return of how many of the layers of a stage, the first ones, activations go to the host."""
    return fraction_of(layers, plan.offload.at("activations", position))


def _numbers(parameters: Iterable[nn.Parameter]) -> Iterator[int]:
    for parameter in parameters:
        yield storage(local(parameter.detach()))
