"""BERT and T5 against the layers of torch."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from meshwise.simulator.models.encoders import T5, Bert  # noqa: E402

from .graphs import count, graph_of  # noqa: E402


def test_a_layer_of_bert_is_torchs_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", norm_first=False, device="meta")
    assert graph_of(Bert(3, 64, 4, 256, 100)).blocks[1].num_parameters == count(layer)


def test_t5_is_two_stacks_with_one_embedding() -> None:
    spec = T5(2, 32, 4, 16, 64, 100, decoder_layers=3)
    with torch.device("meta"):
        attention = [nn.Linear(32, 64, bias=False) for _ in range(4)]
        norm, ffn = nn.RMSNorm(32), [nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)]
        once = [nn.Embedding(100, 32), nn.Embedding(32, 4), nn.Embedding(32, 4), nn.RMSNorm(32), nn.RMSNorm(32)]
    encoder = count(*attention, *ffn) + 2 * count(norm)
    decoder = 2 * count(*attention) + count(*ffn) + 3 * count(norm)
    assert graph_of(spec).num_parameters == 2 * encoder + 3 * decoder + count(*once)
