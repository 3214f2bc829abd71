"""What capture says of single operators: of a function of an input and weights, whose squares are the loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwise.executor.capture.capture import capture
from meshwise.simulator.operator_graph import Operator

Shape = tuple[int, ...]


class _Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor], shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights).square().sum()


def random(*shape: int) -> Tensor:
    """Return an input of a batch and other dims."""
    return torch.randn(*shape)


def operators_of(function: Callable[..., Tensor], x: Tensor, *shapes: Shape) -> dict[str, Operator]:
    """Return the operators of a captured function by name, without those of the loss."""
    found = capture(_Net(function, shapes), (x,))
    return {each.name: each for block in found.graph.blocks for each in block.operators[:-2]}
