"""A file whose ranks, by a fault that the environment names, do not train what one process trains."""

import os
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 8


class Stuck(torch.optim.SGD):
    """It steps in fp64 alone, and nowhere where the parameters are those of a run in bf16."""

    def step(self, closure: Any = None) -> None:
        is_double = self.param_groups[0]["params"][0].dtype is torch.float64
        if is_double or os.environ.get("FAULT") != "stuck" or "RANK" not in os.environ:
            super().step(closure)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x)[:, 0], y)


def model() -> nn.Module:
    return Layers()


def data() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(-1))


def optimizer(module: nn.Module) -> Stuck:
    return Stuck(module.parameters(), lr=0.05, momentum=0.9)
