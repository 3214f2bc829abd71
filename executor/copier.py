"""Copies between device and host while the device computes on."""

from typing import Any, Protocol

import torch
from torch import Tensor


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
