"""Layers of Mixtral and DeepSeek against the layers of torch: attention, router and experts."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from meshwise.simulator.models.attention import LatentAttention  # noqa: E402
from meshwise.simulator.models.experts import Experts  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402

from .graphs import count, graph_of  # noqa: E402


def test_a_layer_of_mixtral_is_attention_router_and_experts() -> None:
    spec = Transformer(
        2, 64, 8, 2, 96, 100, ffn_kind="swiglu", positions="rotary", tied_embeddings=False, experts=Experts(4, 2, 96)
    )
    with torch.device("meta"):
        attention = [nn.Linear(64, width, bias=False) for width in (64, 16, 16, 64)]
        router, norms = nn.Linear(64, 4, bias=False), [nn.RMSNorm(64) for _ in range(2)]
        experts = [nn.Linear(*sizes, bias=False) for _ in range(4) for sizes in ((64, 96), (64, 96), (96, 64))]
        ends = [nn.Embedding(100, 64), nn.RMSNorm(64), nn.Linear(64, 100, bias=False)]
    assert graph_of(spec).num_parameters == 2 * count(*attention, router, *norms, *experts) + count(*ends)


def test_a_layer_of_deepseek_is_latent_attention_with_routed_and_shared_experts() -> None:
    heads, rank, q_rank, nope, rope, value = 4, 24, 40, 16, 8, 12
    latent = LatentAttention(rank, nope, rope, value, q_rank)
    experts = Experts(8, 2, 16, shared=2, dense_layers=1)
    spec = Transformer(
        3, 64, heads, heads, 128, 100, ffn_kind="swiglu", positions="rotary", experts=experts, latent=latent
    )
    with torch.device("meta"):
        attention = [
            nn.Linear(64, q_rank, bias=False),
            nn.RMSNorm(q_rank),
            nn.Linear(q_rank, heads * (nope + rope), bias=False),
            nn.Linear(64, rank + rope, bias=False),
            nn.RMSNorm(rank),
            nn.Linear(rank, heads * (nope + value), bias=False),
            nn.Linear(heads * value, 64, bias=False),
            nn.RMSNorm(64),
            nn.RMSNorm(64),
        ]
        dense = [nn.Linear(64, 3 * 128, bias=False)]
        mixed = [nn.Linear(64, 8, bias=False), *(nn.Linear(64, 3 * 16, bias=False) for _ in range(8 + 2))]
    dense_layer, layer = graph_of(spec).blocks[1:3]
    assert dense_layer.num_parameters == count(*attention, *dense)
    assert layer.num_parameters == count(*attention, *mixed)
