"""Operators are divided into blocks: runs that repeat, and what lies between them."""

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from meshwise.executor.capture.capture import capture
from meshwise.simulator.operator_graph import BATCH, OperatorKind

from .test_capture import captured


def test_layers_are_one_block_that_repeats() -> None:
    found, _, _ = captured("gpt")
    layers = found.graph.blocks[1]
    assert (layers.name, layers.repeat, layers.layer) == ("layers", 2, True)
    assert [name for name, _ in found.graph.occurrences] == ["token", "layers.0", "layers.1", "final_norm", "logits"]
    assert found.parameters[found.parameter_names["layers", 1, "attention.query.weight"]] == (
        "layers.1.attention.query.weight"
    )
    (query,) = [each for each in layers.operators if each.name == "attention_query"]
    assert query.dims == ((BATCH, 1), ("sequence", 8), ("heads", 4), ("head_dim", 4), ("hidden", 16))
    assert query.uncut == ()  # of a product any part of a torch dim is a part, its inner dims too
    (core,) = [each for each in layers.operators if each.kind is OperatorKind.ATTENTION]
    assert core.executed_fraction == 0.5 and set(core.uncut) == {"key"}


def test_a_deep_mlp_without_residuals_does_not_repeat() -> None:
    """Its layers hand hidden dims of their own to each other: one sharding for all would forbid Megatron's pattern."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().sum()

    graph = capture(Deep(), (torch.randn(2, 8),)).graph
    assert [block.repeat for block in graph.blocks] == [1, 1, 1, 1]
    assert all(block.layer for block in graph.blocks)


def test_skips_are_carried_through_the_blocks_between() -> None:
    graph = captured("unet")[0].graph
    middle = next(block for block in graph.blocks if block.name == "middle")
    assert len(middle.inputs) == 3 and middle.inputs[:2] == middle.outputs[:2]
    read = {name for operator in middle.operators for name in operator.inputs}
    assert not read & set(middle.inputs[:2])


def test_two_runs_of_layers_may_follow_each_other() -> None:
    """A tower over one input, and right behind it another over the other: nothing lies between the two runs."""

    class Residual(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, size)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x))

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 16)
            self.first = nn.ModuleList([Residual(8) for _ in range(3)])
            self.second = nn.ModuleList([Residual(16) for _ in range(4)])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = self.left(x), self.right(y)
            for layer in self.first:
                x = layer(x)
            for layer in self.second:
                y = layer(y)
            return x.square().mean() + y.square().mean()

    graph = capture(Towers(), (torch.randn(2, 4), torch.randn(2, 4))).graph
    assert [(block.name, block.repeat) for block in graph.blocks][2:4] == [("first", 3), ("second", 4)]
