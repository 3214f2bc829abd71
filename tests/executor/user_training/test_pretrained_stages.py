"""Ranks of a pipeline read the weights of their own stages alone, and train as those that begin with the whole."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from meshwise.executor.launch.launcher import launch_ranks

from .pretrained_ranks import PLANS


@pytest.mark.parametrize(("words", "ranks"), list(zip(PLANS, (2, 4), strict=True)))
def test_ranks_read_the_weights_of_their_own_stages(
    words: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=32, **sizes))
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    launch_ranks("pretrained_ranks", [str(tmp_path), str(tmp_path / "model")], tmp_path, ranks, timeout=120)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text())[words] for rank in range(ranks)]
    expected = {name: parameter.numel() for name, parameter in model.named_parameters()}
    elements = dict.fromkeys(expected, 0)
    for row in found:
        begun, whole = row["False"], row["True"]
        assert begun["losses"] == whole["losses"] and begun["losses"][-1] < begun["losses"][0]
        assert begun["counts"].keys() == begun["own"].keys() < expected.keys() and not begun["reason"]
        for name, count in begun["counts"].items():
            elements[name] += count
    assert elements == expected
