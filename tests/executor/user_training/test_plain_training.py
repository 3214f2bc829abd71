"""Rounded operators are those of the format, and leave what is no value of the module as it is."""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.user_training.plain_training import RoundValues


def test_results_and_gradients_are_numbers_of_the_format() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    with RoundValues(torch.bfloat16):
        y = module(x).tanh()
    y.sum().backward()
    assert module.weight.grad is not None
    for values in (y, module.weight.grad):
        assert values.dtype is torch.float32 and torch.equal(values, values.bfloat16().float())
    assert not torch.equal(module(x).tanh(), y)


def test_positions_and_views_stay_as_they_are() -> None:
    base = torch.zeros(4, requires_grad=True) * 1.0
    with RoundValues(torch.bfloat16):
        positions = torch.arange(1000.0) + 0.5
        base[:2].copy_(torch.full((2,), 1.001))
    assert positions[-1] == 999.5
    assert base[0] == torch.tensor(1.001)
