"""Copies between host and device, inside the device, and what a launch takes."""

from dataclasses import dataclass
from typing import Any

import torch

from executor.device_timer import Run


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of ``nbytes`` between host and device.

    Parameters
    ----------
    to_device
        From the host to the device, or back.
    pinned
        Whether the host's memory is page-locked; else the driver copies it through a buffer of its own.
    """

    nbytes: int
    to_device: bool = True
    pinned: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        name = "copy_h2d" if self.to_device else "copy_d2h"
        return {
            "kernel": name,
            "dtype": "bytes",
            "bytes": self.nbytes,
            "impl": "pinned" if self.pinned else "pageable",
        }

    def prepare(self, device: str) -> Run:
        """Return the copy; memory can be pinned for CUDA alone."""
        pin = self.pinned and device == "cuda"
        host = torch.ones(self.nbytes, dtype=torch.uint8, pin_memory=pin)
        far = torch.ones(self.nbytes, dtype=torch.uint8, device=device)
        source, target = (host, far) if self.to_device else (far, host)
        return lambda: target.copy_(source, non_blocking=pin)


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy of ``nbytes`` inside the memory of the device, which reads and writes each."""

    nbytes: int

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {"kernel": "memcpy", "dtype": "bytes", "bytes": self.nbytes, "note": "each byte is read and written"}

    def prepare(self, device: str) -> Run:
        """Return the copy."""
        source = torch.ones(self.nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on one element: what is left of its time are launches, by the device's clock."""

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {"kernel": "launch", "dtype": "fp32", "elements": 1, "impl": "torch eager"}

    def prepare(self, device: str) -> Run:
        """Return the kernel."""
        element = torch.zeros(1, device=device)
        return lambda: element.add_(1.0)
