"""What a rank computes on, a core or a GPU, and all that differs between the two.

Every tensor of a rank is on its `Accelerator.device`; what stays on the host is asked for by name. Ranks on GPUs have a
gloo group beside each NCCL group: tensors in main memory, and objects, go by it.

Copies between device and host while the device computes on.

References
----------
torch, ``torch.distributed.init_process_group`` (a backend for each kind of device), ``torch.cuda`` (streams, events,
statistics of the caching allocator), "Reproducibility" (deterministic algorithms, ``CUBLAS_WORKSPACE_CONFIG``).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwise.executor.device import CPU, CUDA, avoid_broken_tiles
from meshwise.executor.recording import gpu_trace, trace
from meshwise.executor.recording.private_torch import allocations, trace_events
from meshwise.executor.recording.rank_files import WATCH_PARENT
from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.timer import CudaTimer, HostTimer, Timer
from meshwise.executor.recording.trace import Allocation, Row, TraceEvent


class Copier(Protocol):
    """Copies tensors between device and host."""

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin a copy of what has been computed so far and return what `wait` takes."""
        ...

    def wait(self, copied: Any) -> None:
        """Make all that is computed from now on come after a copy."""
        ...


class AtOnce:
    """Copies in step with the host."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def wait(self, copied: Any) -> None:
        """Do nothing: the copy is done."""


class Streams:
    """Copies on two streams of a GPU, one for each direction, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self.outward, self.inward = make(device), make(device)

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin a copy when the stream that computes has come to here: what it reads and the room are ready then."""
        stream = self.outward if source.is_cuda else self.inward
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let the stream that computes wait; the host goes on."""
        torch.cuda.current_stream().wait_event(copied)


class Held(NamedTuple):
    """Bytes of a device: what its allocator gave out now, the most it gave out, and the most it took to do so."""

    now: int
    peak: int
    reserved: int


class Accelerator(Protocol):
    """What a rank computes on."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of the rank are."""
        ...

    @property
    def backend(self) -> str:
        """What ranks communicate by, as ``init_process_group`` takes it."""
        ...

    @property
    def engine(self) -> str:
        """What tensors on the device go by, in a word."""
        ...

    @property
    def capacity(self) -> float | None:
        """Bytes of the device; ``None`` where it shares main memory with other ranks."""
        ...

    @property
    def timer(self) -> Timer:
        """The clock of the device."""
        ...

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """How optimizers of torch's are implemented here."""
        ...

    @property
    def pins(self) -> bool:
        """Whether host memory is page-locked, so that copies run beside what the device computes."""
        ...

    def begin(self, ranks: int) -> None:
        """Make the device this process's own, one of ``ranks`` on this host; before any tensor."""
        ...

    def settle(self, *, exact: bool) -> None:
        """Choose how products are computed: as fast as their dtype allows, or each time alike to the last digit."""
        ...

    def synchronise(self) -> None:
        """Return when the device has done all that it was given."""
        ...

    def reset_peak(self) -> None:
        """Forget the most that was held, and give back what is held for nothing."""
        ...

    def held(self) -> Held | None:
        """Return what the device's allocator says; ``None`` where it says nothing."""
        ...

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Return so many bytes of the host's memory, which the device's own does not count."""
        ...

    def copier(self) -> Copier:
        """Return what copies activations."""
        ...

    def profiler(self, *, timed: bool, shapes: bool, memory: bool) -> profile:
        """Return a profiler of the host, and where it is ``timed`` of the device."""
        ...

    def events(self, profiler: profile, *, timed: bool) -> list[TraceEvent]:
        """Return what a profiler saw, in order of start; ns of its clock."""
        ...

    def allocations(self, profiler: profile) -> list[Allocation]:
        """Return what was taken and given back on the device, in order."""
        ...

    def rows(self, records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
        """Return the spans of a step from what was recorded and what the profiler saw."""
        ...


@dataclass(frozen=True, slots=True)
class Core:
    """A core: the device's memory is the host's, and it runs in step with the host."""

    engine: str = "gloo"
    backend: str = "gloo"
    capacity: float | None = None
    pins: bool = False

    @property
    def device(self) -> torch.device:
        """Where the tensors of the rank are."""
        return torch.device(CPU)

    @property
    def timer(self) -> Timer:
        """The clock of the host."""
        return HostTimer()

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """One operation after the other."""
        return {"foreach": False}

    def begin(self, ranks: int) -> None:
        """Compute on one core, with instructions that work."""
        if WATCH_PARENT not in os.environ:  # else who started this rank has seen to it
            avoid_broken_tiles()
        torch.set_num_threads(1)

    def settle(self, *, exact: bool) -> None:
        """Do nothing: a core computes each time alike."""

    def synchronise(self) -> None:
        """Do nothing."""

    def reset_peak(self) -> None:
        """Do nothing."""

    def held(self) -> Held | None:
        """Return nothing: the profiler counts."""
        return None

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Return memory of NumPy's, which torch's allocator and its profiler do not see."""
        return np.empty(size, np.uint8)

    def copier(self) -> Copier:
        """Return what copies in step with the host."""
        return AtOnce()

    def profiler(self, *, timed: bool, shapes: bool, memory: bool) -> profile:
        """Return a profiler of the host."""
        return profile(activities=[ProfilerActivity.CPU], profile_memory=memory, record_shapes=shapes)

    def events(self, profiler: profile, *, timed: bool) -> list[TraceEvent]:
        """Return what the profiler saw of the host."""
        return trace_events(profiler)

    def allocations(self, profiler: profile) -> list[Allocation]:
        """Return what torch allocated."""
        return allocations(profiler, CPU)

    def rows(self, records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
        """Return spans by what the host was seen to do."""
        return trace.rows(records, events)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a host, by its number among those that the process sees."""

    index: int
    engine: str = "nccl"
    backend: str = "cpu:gloo,cuda:nccl"
    pins: bool = True

    @property
    def device(self) -> torch.device:
        """Where the tensors of the rank are."""
        return torch.device(CUDA, self.index)

    @property
    def capacity(self) -> float | None:
        """Bytes of the GPU."""
        return float(torch.cuda.get_device_properties(self.index).total_memory)

    @property
    def timer(self) -> Timer:
        """The host's clock around all that the GPU does."""
        return CudaTimer()

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """One kernel for several parameters."""
        return {"fused": True}

    def begin(self, ranks: int) -> None:
        """Make the GPU the current one, and share the cores of the host among its ranks: some optimizers step there."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by `settle`, before cuBLAS is loaded
        torch.cuda.set_device(self.index)
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))

    def settle(self, *, exact: bool) -> None:
        """Keep TF32 off in every case: what a scenario calls fp32 has 24 digits."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(exact, warn_only=True)

    def synchronise(self) -> None:
        """Return when all streams of the GPU are done."""
        torch.cuda.synchronize(self.index)

    def reset_peak(self) -> None:
        """Begin a new peak from what is held now, with nothing reserved besides."""
        self.synchronise()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)

    def held(self) -> Held | None:
        """Return what torch's caching allocator says."""
        now, peak = torch.cuda.memory_allocated(self.index), torch.cuda.max_memory_allocated(self.index)
        return Held(now, peak, torch.cuda.max_memory_reserved(self.index))

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Return page-locked memory, which goes back to torch's pool of it."""
        pinned: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def copier(self) -> Copier:
        """Return what copies beside the stream that computes."""
        return Streams(self.device)

    def profiler(self, *, timed: bool, shapes: bool, memory: bool) -> profile:
        """Return a profiler of the host, and where it is ``timed`` of the kernels and copies of the GPU."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if timed else [])]
        return profile(activities=activities, profile_memory=memory, record_shapes=shapes)

    def events(self, profiler: profile, *, timed: bool) -> list[TraceEvent]:
        """Return what the profiler saw of the host that names others, and all of the GPU."""
        return gpu_trace.of_profiler(profiler) if timed else trace_events(profiler)

    def allocations(self, profiler: profile) -> list[Allocation]:
        """Return what torch's caching allocator gave out and took back."""
        return allocations(profiler, CUDA)

    def rows(self, records: Sequence[Record], events: Sequence[TraceEvent]) -> list[Row]:
        """Return spans by what the GPU was seen to do."""
        return gpu_trace.rows(records, events)


CORE = Core()


def accelerator_of(device: str, environment: Callable[[str, str], str] = os.environ.get) -> Accelerator:
    """Return what this rank computes on: a core, or the GPU whose number is that of the rank on its host."""
    return Gpu(int(environment("LOCAL_RANK", "0"))) if device == CUDA else CORE
