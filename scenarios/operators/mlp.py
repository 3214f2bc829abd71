"""The module from which ``meshwise capture scenarios/operators/mlp.py:mlp --out mlp.json`` makes ``mlp.json``."""

import torch
from torch import Tensor, nn

HIDDEN, WIDE = 2048, 8192


class MLP(nn.Module):
    """Two linear layers with a gelu between them, which learn to give a target."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, WIDE)
        self.gelu = nn.GELU()
        self.down = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean square error."""
        return nn.functional.mse_loss(self.down(self.gelu(self.up(x))), target)


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the module and its inputs, whose dim 0 is the batch."""
    return MLP(), (torch.randn(512, HIDDEN), torch.randn(512, HIDDEN))
