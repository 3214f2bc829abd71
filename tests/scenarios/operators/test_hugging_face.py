"""Models of Hugging Face from a config are captured as what they are."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwise.executor.capture.capture import capture, run_factory

from ...executor.capture.cutting import arguments

FACTORY = Path(__file__).parents[3] / "scenarios" / "operators" / "hugging_face.py"
SIZES = {"vocab_size": 128, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
WIDE = {"intermediate_size": 96, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "llama": ("LlamaForCausalLM", {**SIZES, **WIDE, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 128, "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "bert": ("BertForMaskedLM", {**SIZES, **WIDE, **NO_DROPOUT}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, **WIDE, "num_key_value_heads": 2, "num_local_experts": 4}),
}


def captured(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    architecture, config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps({"model_type": name, "architectures": [architecture], **config}))
    for key, value in {"HF_CONFIG": str(folder / "config.json"), "BATCH": "4", "SEQUENCE": "16"}.items():
        monkeypatch.setitem(os.environ, key, value)
    torch.manual_seed(0)
    module, inputs = run_factory(f"{FACTORY}:model")
    return capture(module.double(), inputs, name), module, inputs


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_dense_model_is_captured_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, module, inputs = captured(name, tmp_path, monkeypatch)
    assert found.warnings == () and found.graph.sequence == 16
    assert [block.repeat for block in found.graph.blocks] == [1, 3, 1]  # the layers are one block
    assert found.graph.num_parameters == sum(each.numel() for each in module.parameters())
    layer = found.graph.blocks[1]
    dims = {dim for operator in layer.operators for dim, _ in operator.dims}
    assert {"batch", "sequence", "hidden", "heads", "head_dim"} <= dims
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the fused kernel of the CPU is not counted
        loss = module(*inputs)
    assert found.graph.flops * 4 == counter.get_total_flops()
    (mine,) = found.module(*arguments(found, module, inputs))
    assert mine.item() == pytest.approx(loss.item(), abs=1e-6)  # norms are computed in fp32


def test_experts_that_are_sent_to_are_named_and_replicated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, module, _ = captured("mixtral", tmp_path, monkeypatch)
    assert [block.repeat for block in found.graph.blocks] == [1, 3, 1]
    assert found.graph.num_parameters == sum(each.numel() for each in module.parameters())
    told = [line for line in found.warnings if "grouped_mm" in line]
    assert told and all("it is replicated" in line and "mlp.experts" in line for line in told)
