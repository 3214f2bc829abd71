"""A function of tensors as a run of its forward pass, or of its backward pass alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor.device_timer import Run


def one_direction(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backward: bool) -> Run:
    """Return a run of ``function(*inputs)`` as training runs it, or of its gradients to all ``inputs``."""
    if not backward:
        return lambda: function(*inputs)
    result = function(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
