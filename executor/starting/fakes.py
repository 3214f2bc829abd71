"""A copy of a module whose parameters and buffers have shapes and no values, on which its forward and backward run."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

FakeMode = FakeTensorMode
"""The context in which such a copy runs; what needs values raises there."""


def make_fake_mode() -> FakeMode:
    """Return a context in which tensors have shapes and no values, and those with values are taken for such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def copy_without_values(module: nn.Module, mode: FakeMode, device: torch.device) -> nn.Module:
    """Return a copy of a module whose parameters and buffers belong to a mode, as if they were on a device."""

    def make_empty(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    copies: dict[int, Tensor] = {id(buffer): make_empty(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        copies[id(parameter)] = nn.Parameter(make_empty(parameter), requires_grad=parameter.requires_grad)
    return deepcopy(module, dict(copies))
