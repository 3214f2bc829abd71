"""The bytes of tensors on cores, of which torch has no counter: its profiler tells allocations and frees.

It tells those of the thread that is recorded. A message's tensor is freed by the thread that sends it, if that drops it
last: such a free is not told, at random.
"""

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
def record_tensor_peak(*, keeps_results: bool = True) -> Iterator[TensorPeak]:
    """Record the most bytes that the body allocates on cores above those at its start, in C++ as well.

    Parameters
    ----------
    keeps_results
        Whether tensors that the body makes may be there when it ends; else those are taken to be freed unseen.
    """
    peak = TensorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    peak.size = find_peak(read_allocations(profiler, "cpu"), keeps_results=keeps_results)


def find_peak(allocations: Sequence[Allocation], *, keeps_results: bool = True) -> int:
    """Return the most bytes at once above those at the start, of which those that are freed have no allocation here.

    An address that is given again was freed unseen; that is taken to have been at once, as a message is short.

    >>> find_peak([Allocation(1, 10, 8), Allocation(2, 20, 4), Allocation(3, 10, -8), Allocation(4, 30, 6)])
    12
    >>> find_peak([Allocation(1, 10, 8), Allocation(2, 20, 4), Allocation(3, 10, 2)])
    8
    >>> find_peak([Allocation(1, 10, 3), Allocation(2, 20, 4), Allocation(3, 20, -4)], keeps_results=False)
    4
    """
    newest: dict[int, int] = {}  # address -> place of its last allocation
    unseen: set[int] = set()
    for place, allocation in enumerate(allocations):
        if allocation.size < 0:
            newest.pop(allocation.address, None)
        else:
            if allocation.address in newest:
                unseen.add(newest[allocation.address])
            newest[allocation.address] = place
    if not keeps_results:
        unseen.update(newest.values())
    size = peak = 0
    for place, allocation in enumerate(allocations):
        peak = max(peak, size + allocation.size)
        size += 0 if place in unseen else allocation.size
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
