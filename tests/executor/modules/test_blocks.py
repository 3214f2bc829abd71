"""Blocks are the members of lists of equal modules, and computing them again changes nothing."""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.modules.blocks import list_blocks, recompute_blocks


def make_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


def test_blocks_are_members_of_lists_in_order() -> None:
    module = nn.ModuleDict({"head": nn.Linear(3, 3), "layers": nn.ModuleList(make_layer() for _ in range(3))})
    assert list_blocks(module) == list(module["layers"])
    assert list_blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == []  # operators of a chain
    stages = nn.ModuleList(nn.ModuleList(make_layer() for _ in range(2)) for _ in range(2))
    assert len(list_blocks(stages)) == 4


def test_blocks_that_are_computed_again_have_equal_gradients_and_statistics() -> None:
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(make_layer() for _ in range(3)))
        if recomputes:
            assert recompute_blocks(module) == 3
        module(torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        results.append([*gradients, *module.buffers()])
    assert all(map(torch.equal, *results))
