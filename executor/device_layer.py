"""A transformer layer so small that only its launches count."""

from dataclasses import dataclass
from typing import Any

import torch

from executor.calibration_sizes import TINY
from executor.device_timer import Run
from executor.model import Layer


@dataclass(frozen=True, slots=True)
class TinyLayer:
    """Forward and backward of a layer of hidden size 8, as the host launches it."""

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {
            "kernel": "layer_fwd_bwd",
            "dtype": "bf16",
            "batch": 1,
            "seq_q": 2,
            "hidden": TINY.hidden,
            "impl": HOST_BOUND,
        }

    def prepare(self, device: str) -> Run:
        """Return both passes."""
        layer = Layer(TINY).to(device=device, dtype=torch.bfloat16)
        x = torch.randn(1, 2, TINY.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        inputs = (x, *layer.parameters())
        gradient = torch.ones_like(x)
        return lambda: torch.autograd.grad(layer(x), inputs, gradient)


HOST_BOUND = "torch eager, bound by the host's launches"
"""What rows of layers say whose time is that of their launches."""
