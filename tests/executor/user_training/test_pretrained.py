"""A folder of transformers starts with the values that its own reader gives, read by ranks in parts where it can be."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from meshwise.executor.starting.construction import DeferredModule
from meshwise.executor.starting.stored_values import StoredValues
from meshwise.executor.user_training.pretrained import PretrainedError, start_model

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
CONFIGS: dict[str, Any] = {
    "tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32),
    "converted": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2),
}


@pytest.mark.parametrize(("kind", "dtype"), [("tied", "bfloat16"), ("gpt", "float32"), ("converted", "float32")])
def test_a_folder_starts_as_its_own_reader_has_it(kind: str, dtype: str, tmp_path: Path) -> None:
    source = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(getattr(torch, dtype))
    source.generation_config.max_length = 77
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    start = start_model(tmp_path, 0)
    assert isinstance(start, DeferredModule) and start.module.training
    assert isinstance(start.values, StoredValues) == (kind != "converted")
    module: Any = start.build()
    states = dict(module.named_parameters()) | dict(module.named_buffers())
    others = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert states.keys() == others.keys()
    for name, tensor in others.items():
        assert states[name].dtype == tensor.dtype and torch.equal(states[name], tensor), name
    assert module.generation_config.to_dict() == expected.generation_config.to_dict()
    assert module.config.to_dict() == expected.config.to_dict()


def test_a_broken_file_is_one_message(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt"]()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PretrainedError, match="a causal language model, met"):
        start_model(tmp_path, 0)
