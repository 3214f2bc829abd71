"""Rounded operators are those of the format, and leave what is no value of the module as it is."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.plain_training import RoundValues, train_plainly

ATTENTION = """
import torch
from torch import nn

BATCH = 4

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(8, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.words(x)
        return self.attention(x, x, x)[0].square().mean()

def model():
    return Attention()

def data():
    words = torch.randint(7, (16, 3), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(words)
"""


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


def test_biases_of_keys_have_gradients_of_rounding(tmp_path: Path) -> None:
    """A softmax does not change where all its logits do: the bias of keys, the second of three parts, moves nothing."""
    path = tmp_path / "attention.py"
    path.write_text(ATTENTION)
    run = train_plainly(TrainJob(str(path), ModuleLayout(1), steps=2, precision="fp64"))
    assert run.noisy_names == frozenset()
    assert list(run.noisy_elements) == ["attention.in_proj_bias"]
    assert run.noisy_elements["attention.in_proj_bias"].tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert run.steps[-1].weights["words.weight"][7].any()  # a row that no sample has: its gradients are no rounding
