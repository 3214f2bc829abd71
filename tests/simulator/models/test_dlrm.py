"""DLRM against a plain torch module written here: parameters and FLOP."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from meshwise.simulator.models.dlrm import Dlrm  # noqa: E402

from .graphs import count, graph_of  # noqa: E402


def test_dlrm_multiplies_as_torch_does() -> None:
    spec = Dlrm(
        (50, 7), (3, 1), embedding=16, dense=5, bottom=(32, 16), top=(24, 1), interaction="cross", crosses=2, rank=8
    )
    bottom = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    bags = [nn.EmbeddingBag(50, 16, mode="sum"), nn.EmbeddingBag(7, 16, mode="sum")]
    crosses = [(nn.Linear(48, 8, bias=False), nn.Linear(8, 48)) for _ in range(2)]
    top = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
    with FlopCounterMode(display=False) as counter:
        looked_up = [bags[0](torch.tensor([[0, 1, 2]])), bags[1](torch.tensor([[3]]))]
        first = x = torch.cat([bottom(torch.ones(1, 5)), *looked_up], dim=1)
        for down, up in crosses:
            x = x + first * up(down(x))
        top(x)
    graph = graph_of(spec)
    assert graph.num_parameters == count(bottom, *bags, *(layer for pair in crosses for layer in pair), top)
    assert graph.flops == counter.get_total_flops()
