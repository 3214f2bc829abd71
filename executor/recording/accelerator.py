"""The accelerator of a rank, a core or a GPU, and everything that differs between the two.

Every tensor of a rank is on its `Accelerator.device`; code names the host explicitly where a tensor stays there. Ranks
on GPUs have a gloo group beside each NCCL group, for tensors in main memory and for objects [1]_. Copiers move tensors
between device and host, on a GPU while it computes.

References
----------
.. [1] torch, ``torch.distributed.init_process_group`` (a backend for each kind of device), ``torch.cuda`` (streams,
   events, statistics of the caching allocator), "Reproducibility" (deterministic algorithms,
   ``CUBLAS_WORKSPACE_CONFIG``).
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwise.executor.device import CPU, CUDA, avoid_broken_tiles
from meshwise.executor.recording import gpu_trace, trace
from meshwise.executor.recording.private_torch import read_allocations, read_trace_events
from meshwise.executor.recording.rank_files import WATCH_PARENT
from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.timer import CudaTimer, Timer
from meshwise.executor.recording.trace import Allocation, Row, TraceEvent


class Copier:
    """Copies tensors between device and host, synchronously with the host."""

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin a copy, after all work so far, and return the event that `wait` takes."""
        target.copy_(source)

    def wait(self, copy_event: Any) -> None:
        """Make all later work wait for a copy; here it is done already."""


class StreamCopier(Copier):
    """Copies on two streams of a GPU beside the compute stream, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self.to_host, self.to_device = make(device), make(device)

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin a copy after the work so far on the compute stream, which makes the source and frees the target."""
        stream = self.to_host if source.is_cuda else self.to_device
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, copy_event: Any) -> None:
        """Make the compute stream wait for a copy; the host does not wait."""
        torch.cuda.current_stream().wait_event(copy_event)


class DeviceMemory(NamedTuple):
    """Bytes of a device: given out by its allocator now, the most given out, and the most that it reserved."""

    now: int
    peak: int
    reserved: int


class Accelerator:
    """A device that a rank computes on; as it stands, a core of the host.

    The memory of a core is the host's, and a core works synchronously with the host.
    """

    device = torch.device(CPU)
    """The device of the rank's tensors."""
    backend = engine = "gloo"
    """The communication backend, as ``init_process_group`` takes it, and the library that has the device's tensors."""
    optimizer_options: ClassVar[dict[str, Any]] = {"foreach": False}
    """Options that choose torch's implementation of an optimizer: here one parameter, one operation after the other."""
    pins = False
    """Whether host memory is page-locked, so that copies run beneath computing."""
    timer = Timer()
    """The timer of the device."""

    @property
    def capacity(self) -> float | None:
        """The device's memory in bytes; ``None`` where ranks share main memory."""
        return None

    def claim_device(self, ranks: int) -> None:
        """Claim the device for this process, one of ``ranks`` on this host; called before any tensor is made.

        A rank has one core, and avoids instructions that are broken on this host.
        """
        if WATCH_PARENT not in os.environ:  # else the launcher of this rank has done it already
            avoid_broken_tiles()
        torch.set_num_threads(1)

    def settle(self, *, exact: bool) -> None:
        """Choose how products are computed: as fast as their dtype allows or, where ``exact``, reproducibly."""

    def synchronise(self) -> None:
        """Return when the device has finished all work."""

    def reset_peak(self) -> None:
        """Reset the peak of memory, and free what the allocator keeps in reserve."""

    def read_memory(self) -> DeviceMemory | None:
        """Return the memory statistics of the device's allocator; ``None`` on cores, where the profiler counts."""
        return None

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Return ``size`` bytes of host memory, which torch's allocator and profiler do not count as the device's."""
        return np.empty(size, np.uint8)

    def copier(self) -> Copier:
        """Return a copier for activations."""
        return Copier()

    def make_profiler(self, *, timed: bool, shapes: bool, memory: bool) -> profile:
        """Return a profiler of the host and, where ``timed``, of the device too."""
        return profile(activities=[ProfilerActivity.CPU], profile_memory=memory, record_shapes=shapes)

    def read_events(self, profiler: profile, *, timed: bool) -> list[TraceEvent]:
        """Return the events of a profiler, in order of start, in ns of its clock."""
        return read_trace_events(profiler)

    def read_allocations(self, profiler: profile) -> list[Allocation]:
        """Return the allocations and frees of torch on the device, in order of time."""
        return read_allocations(profiler, self.device.type)

    def build_rows(self, records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
        """Return the spans of a step from records and from events of the profiler."""
        return trace.build_rows(records, events)


class Gpu(Accelerator):
    """A GPU, by its number among those that the process sees."""

    backend, engine = "cpu:gloo,cuda:nccl", "nccl"
    optimizer_options: ClassVar[dict[str, Any]] = {"fused": True}
    pins = True
    timer = CudaTimer()

    def __init__(self, index: int) -> None:
        self.index, self.device = index, torch.device(CUDA, index)

    @property
    def capacity(self) -> float | None:
        """The GPU's memory in bytes."""
        return float(torch.cuda.get_device_properties(self.index).total_memory)

    def claim_device(self, ranks: int) -> None:
        """Make the GPU the current one, and divide the host's cores among its ranks: some optimizers step there."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # `settle` needs it, set before cuBLAS is loaded
        torch.cuda.set_device(self.index)
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))

    def settle(self, *, exact: bool) -> None:
        """Choose deterministic algorithms where ``exact``; TF32 is always off: a scenario's fp32 has 24 bits."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(exact, warn_only=True)

    def synchronise(self) -> None:
        """Return when all streams of the GPU have finished."""
        torch.cuda.synchronize(self.index)

    def reset_peak(self) -> None:
        """Begin a new peak at the memory in use now, with nothing else reserved."""
        self.synchronise()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)

    def read_memory(self) -> DeviceMemory | None:
        """Return the memory statistics of torch's caching allocator."""
        now, peak = torch.cuda.memory_allocated(self.index), torch.cuda.max_memory_allocated(self.index)
        return DeviceMemory(now, peak, torch.cuda.max_memory_reserved(self.index))

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Return page-locked memory, which goes back to torch's pool when it is freed."""
        array: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return array

    def copier(self) -> Copier:
        """Return a copier on streams beside the compute stream."""
        return StreamCopier(self.device)

    def make_profiler(self, *, timed: bool, shapes: bool, memory: bool) -> profile:
        """Return a profiler of the host and, where ``timed``, of the kernels and copies of the GPU too."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if timed else [])]
        return profile(activities=activities, profile_memory=memory, record_shapes=shapes)

    def read_events(self, profiler: profile, *, timed: bool) -> list[TraceEvent]:
        """Return the events of the GPU, and those of the host that name them; all of the host where not ``timed``."""
        return gpu_trace.read_profiler(profiler) if timed else read_trace_events(profiler)

    def build_rows(self, records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
        """Return spans from the events of the GPU."""
        return gpu_trace.build_rows(records, events)


CORE = Accelerator()


def find_accelerator(device: str, environment: Callable[[str, str], str] = os.environ.get) -> Accelerator:
    """Return the accelerator of this rank: a core, or the GPU with the number of the rank on its host."""
    return Gpu(int(environment("LOCAL_RANK", "0"))) if device == CUDA else CORE
