"""The bytes of tensors on cores, of which torch has no counter: its profiler tells every allocation and every free."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwise.executor.recording.private_torch import read_allocations
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.recording.trace import Allocation


@dataclass
class TensorPeak:
    """Most bytes above those at the start; known when the body of `record_tensor_peak` has ended."""

    size: int = 0


@contextmanager
def record_tensor_peak() -> Iterator[TensorPeak]:
    """Record the most bytes that the body allocates on cores above those at its start, in any thread and in C++."""
    peak = TensorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    peak.size = find_peak(read_allocations(profiler, "cpu"))


def find_peak(allocations: Sequence[Allocation]) -> int:
    """Return the most bytes at once above those at the start, of which those that are freed have no allocation here.

    >>> find_peak([Allocation(1, 10, 8), Allocation(2, 20, 4), Allocation(3, 10, -8), Allocation(4, 30, 6)])
    12
    """
    size = peak = 0
    for allocation in allocations:
        size += allocation.size
        peak = max(peak, size)
    return peak


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once; of a distributed tensor those of this rank.

    >>> import torch
    >>> weight = torch.zeros(2, 3)
    >>> count_bytes([weight, weight[0], torch.zeros(1)])
    28
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = to_local(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
