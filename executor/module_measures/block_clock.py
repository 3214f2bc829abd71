"""When the blocks of a module run in forward and backward, and what backward reads of each."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.executor.modules.batches import list_tensors


class BlockClock:
    """Notes the passes of blocks and the bytes that they save, while `watch` runs.

    A backward pass of a block begins when the gradient of its result is there. What runs between two blocks counts
    with the earlier one of the pass.

    Parameters
    ----------
    wait
        Returns when the device has run what was launched, so that a time is that of the device and not of the launch.

    Attributes
    ----------
    order
        Places of the blocks as forward first ran them.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], wait: Callable[[], None] = lambda: None) -> None:
        self.blocks, self._wait = blocks, wait
        self.own_storages = {_find_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.order: list[int] = []
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.forward = [0.0] * len(self.blocks)
        self.gradients: dict[int, float] = {}
        self.saved: dict[int, tuple[int, int]] = {}  # storage -> place of the block, bytes
        self.results: dict[int, tuple[int, int]] = {}  # place -> storage and bytes of its first result
        self._running: list[int] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what runs in the body."""
        self.clear()
        handles = []
        for place, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(partial(self._begin, place)))
            handles.append(block.register_forward_hook(partial(self._end, place)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, place: int, module: nn.Module, arguments: Any) -> None:
        self._wait()
        self._begun = time.perf_counter()
        if place not in self.starts:
            self.order.append(place)
            self.starts[place] = self._begun
        self._running.append(place)

    def _end(self, place: int, module: nn.Module, arguments: Any, result: Any) -> None:
        self._wait()
        self.ends[place] = time.perf_counter()
        self.forward[place] += self.ends[place] - self._begun
        self._running.pop()
        outputs = [tensor for tensor in list_tensors(result) if tensor.requires_grad]
        if outputs:
            self.results[place] = _find_storage(outputs[0]), outputs[0].numel() * outputs[0].element_size()
            outputs[0].register_hook(partial(self._note_gradient, place))  # type: ignore[no-untyped-call]

    def _note_gradient(self, place: int, gradient: Tensor) -> None:
        self._wait()
        self.gradients.setdefault(place, time.perf_counter())

    def _save(self, tensor: Tensor) -> Tensor:
        storage = _find_storage(tensor)
        if storage not in self.own_storages:
            place = self._running[-1] if self._running else -1
            self.saved.setdefault(storage, (place, tensor.untyped_storage().nbytes()))
        return tensor.detach()


def _find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
