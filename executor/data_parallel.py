"""Data parallelism: gradients become the mean over the data axis, on all its ranks or on one that updates for all.

DistributedDataParallel does it where it can. It cannot hold DTensors ("aten.cat.default got
mixed torch.Tensor and DTensor"), so with tensor parallelism, or where the plan wants no
overlap, a stage's gradients are summed as one flat buffer: as soon as its last backward
ended, or after the last backward of the rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that lives on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduces_itself(module: nn.Module) -> bool:
    """Return whether a module's gradients are averaged as backward makes them."""
    return isinstance(module, DistributedDataParallel)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of ``tensors`` as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a vector that `flatten` made back into ``tensors``."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


class GradientReducer:
    """Averages the gradients of whole stages over ``group``.

    Parameters
    ----------
    overlap
        Whether a stage is reduced while earlier ones still run backward.
    server
        Whether the first rank of the group alone gets the mean; the others keep no gradients.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: bool, *, server: bool = False) -> None:
        self.group, self.overlap, self.server = group, overlap, server
        self._waiting: list[Sequence[nn.Parameter]] = []
        self._running: list[tuple[Sequence[nn.Parameter], list[Tensor], Tensor, Any]] = []

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take note that the gradients of ``parameters``, together, are this rank's whole ones."""
        if not parameters or self.group.size() == 1:
            return
        self._waiting.append(parameters)
        if self.overlap:
            self._launch()

    def _launch(self) -> None:
        for parameters in self._waiting:
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            flat = flatten(gradients)
            self._running.append((parameters, gradients, flat, self._reduce(flat)))
        self._waiting.clear()

    def _reduce(self, flat: Tensor) -> Any:
        if self.server:
            return dist.reduce(flat, dist.get_global_rank(self.group, 0), group=self.group, async_op=True)
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Return when every gradient is the mean."""
        self._launch()
        for parameters, gradients, flat, work in self._running:
            work.wait()
            if self.server and self.group.rank():
                for parameter in parameters:
                    parameter.grad = None
            else:
                fill(gradients, flat.div_(self.group.size()))
        self._running.clear()
