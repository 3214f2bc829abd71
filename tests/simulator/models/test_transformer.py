"""The transformer graph against published counts: parameters, FLOP, activation bytes."""

import dataclasses

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import Block


def saved_bytes(block: Block) -> int:
    return sum(block.tensor[name].nbytes for name in {name for op in block.operators for name in op.saved})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("megatron-530b", 529.6e9),  # printed by its authors, SC21 table 1
        ("megatron-1t", 1008.0e9),
        ("llama2-7b", 6.738e9),  # 6,738,415,616 in the released weights
        ("llama3-8b", 8.030e9),
        ("llama3-70b", 70.554e9),
        ("llama3-405b", 405.85e9),
    ],
)
def test_parameters_are_those_of_the_published_models(name: str, parameters: float) -> None:
    assert build(PRESETS[name], 2048, "bf16").num_parameters == pytest.approx(parameters, rel=1e-3)


@given(st.integers(1, 4), st.sampled_from([64, 128, 1024]), st.sampled_from([1, 4, 8]))
def test_a_gpt_layer_keeps_the_published_bytes(layers: int, sequence: int, heads: int) -> None:
    # Korthikanti et al., equation 1: s b h (34 + 5 a s / h) bytes a layer
    hidden = 64
    spec = Transformer(layers, hidden, heads, heads, 4 * hidden, 512, attention="unfused", dropout=True)
    layer = build(spec, sequence, "fp16").blocks[1]
    assert saved_bytes(layer) == sequence * (34 * hidden + 5 * heads * sequence)


@given(st.integers(2, 6), st.sampled_from([256, 512]))
def test_flops_follow_the_published_formula(layers: int, hidden: int) -> None:
    # Narayanan et al., SC21, equation 3 without recompute, forward only:
    # 24 s l h^2 (1 + s / 6h + V / 12 l h)
    sequence, vocab = 128, 1024
    spec = Transformer(layers, hidden, 8, 8, 4 * hidden, vocab)
    expected = 24 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    assert build(spec, sequence, "fp16").flops == pytest.approx(expected)


def test_flash_attention_keeps_no_scores() -> None:
    spec = dataclasses.replace(PRESETS["gpt3-1.3b"], attention="unfused")
    flash = saved_bytes(build(PRESETS["gpt3-1.3b"], 2048, "bf16").blocks[1])
    scores = 2 * spec.heads * 2048 * 2048
    assert saved_bytes(build(spec, 2048, "bf16").blocks[1]) > flash + scores // 2


def test_the_graph_is_acyclic_and_connected() -> None:
    spec = dataclasses.replace(PRESETS["llama2-7b"], layers=3)
    graph = build(spec, 128, "bf16").to_networkx()
    assert nx.is_directed_acyclic_graph(graph) and nx.is_weakly_connected(graph)
    assert list(graph.predecessors("layers.1.input_norm")) == ["layers.0.feed_forward_residual"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, r"heads divide hidden\(12288\), met 7"),
        ({"kv_heads": 5}, r"kv_heads divide heads\(96\), met 5"),
        ({"ffn_kind": "relu"}, "ffn_kind is one of gelu, swiglu, geglu, met relu"),
        ({"layers": 0}, "at least 1"),
        ({"window": 0}, "at least 1"),
        ({"norm": "batch"}, "norm is one of layer, rms, met batch"),
    ],
)
def test_nonsense_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["gpt3-175b"], **change)  # type: ignore[arg-type]
