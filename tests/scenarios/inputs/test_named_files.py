"""Scenarios that name a preset of any family or a Hugging Face configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.simulator.models.presets import MODELS

QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}


def scenario(folder: Path, model: str, sequence: int = 32) -> Path:
    file = folder / "s.yaml"
    file.write_text(
        f"model: {model}\n"
        f"training: {{global_batch: 8, sequence: {sequence}, precision: bf16}}\n"
        "cluster: {preset: dgx-a100-80gb, nodes: 1}\n"
        "plan: {data: 8}\n"
    )
    return file


def faults(folder: Path, model: str, sequence: int = 32) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(scenario(folder, model, sequence))
    return str(caught.value)


def test_a_configuration_is_found_beside_the_scenario_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    file = scenario(tmp_path, "{hf_config: ./config.json}")
    monkeypatch.chdir("/")
    found = load(file)
    # 256 * 64 twice; a layer: attention 64 * 128 + 2 * 64 * 64 + 128 * 64, router 64 * 8, experts 8 * 3 * 64 * 32,
    # norms 2 * 64 + 2 * 32; the last norm
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 64 * 8 + 8 * 3 * 64 * 32 + 2 * 64 + 2 * 32
    assert found.problem.graph.num_parameters == 2 * 256 * 64 + 4 * layer + 64
    assert found.simulate().step_time > 0
    (line,) = [line for line in found.assumptions if line.startswith("model.hf_config ./config.json means layers 4")]
    assert "experts (count 8, top_k 2, ffn 32" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps({**QWEN3, "hidden_size": -1}),
            ":1:29: hidden_size: holds a whole number from 1 to 10000000, met -1",
        ),
        (json.dumps({**QWEN3, "model_type": "qwen3moe"}), ":1:2: model_type: holds one of qwen3_moe, "),
        ('{"hidden_size": 1, "hidden_size": 2}', ": hidden_size: a name occurs once, met it twice"),
        ("model_type: llama", ":1:1: this is not JSON: "),
        ("[1]", ": a configuration is a mapping, met [1]"),
        ('{"hidden_size": NaN}', ": a number is finite, met NaN"),
        ("[" * 100_000, ": values nest at most 64 deep, met more"),
        ('{"hidden_size": ' + "9" * 5000 + "}", ": a number has at most 100 characters, met 5000"),
        ('"\udcff"'.encode("utf-8", "surrogatepass"), ":1:2: a file is UTF-8 text, met the byte 0xed"),
        (b" " * (4 * 2**20 + 1), ": a file has at most 4194304 bytes, met more"),
    ],
)
def test_a_bad_configuration_is_one_message_of_its_file(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert faults(tmp_path, "{hf_config: config.json}").startswith(f"{file}{message}")


def test_a_configuration_that_is_missing_or_a_folder_is_a_message(tmp_path: Path) -> None:
    assert "config.json: the file cannot be read: No such file" in faults(tmp_path, "{hf_config: config.json}")
    assert "the file cannot be read: Is a directory" in faults(tmp_path, "{hf_config: .}")


@pytest.mark.parametrize(
    ("model", "sequence", "message"),
    [
        ("{}", 32, "1:1: model: holds one of preset, transformer, dlrm, hf_config and graph, met none"),
        ("{preset: resnet-50}", 32, "training.sequence: sequence is 1 for samples of resnet-50, met 32; nearest: 1"),
        ("{preset: vit-b-16}", 32, "sequence is 197 for samples of vit-b-16, met 32; nearest: 197"),
        ("{preset: bert-large}", 513, "training.sequence: bert-large has 512 positions, met a sequence of 513"),
        ("{preset: mixtral-8x7}", 32, "model.preset: holds one of"),
        (
            "{transformer: {layers: 2, hidden: 64, heads: 4, ffn: 64, vocab: 99, "
            "experts: {count: 4, top_k: 5, ffn: 8}, latent: {kv_rank: 8, nope_dim: 8, rope_dim: 0, value_dim: 8}}}",
            32,
            "model.transformer.latent.rope_dim: is at least 1, met 0",
        ),
        (
            "{transformer: {layers: 2, hidden: 8, heads: 4, ffn: 64, vocab: 9, experts: {count: 4, top_k: 5, ffn: 8}}}",
            32,
            "model.transformer.experts.top_k: top_k is at most count(4), met 5; nearest: 4",
        ),
        (
            "{transformer: {layers: 2, hidden: 64, heads: 4, ffn: 64, vocab: 99, experts: {count: 4}}}",
            32,
            "model.transformer.experts.top_k: this field is required",
        ),
    ],
)
def test_a_wrong_model_is_one_message_at_its_field(tmp_path: Path, model: str, sequence: int, message: str) -> None:
    assert message in faults(tmp_path, model, sequence)


def test_written_experts_are_the_models(tmp_path: Path) -> None:
    written = "{layers: 2, hidden: 64, heads: 4, ffn: 64, vocab: 99, experts: {count: 4, top_k: 2, ffn: 8, shared: 1}}"
    found = load(scenario(tmp_path, f"{{transformer: {written}}}"))
    names = [operator.name for operator in found.problem.graph.blocks[1].operators]
    assert {"router", "top_k", "dispatch", "expert_up", "expert_down", "combine", "shared_up"} <= set(names)
    assert "model.transformer.experts.imbalance is 1.0 (default)" in found.assumptions


@pytest.mark.parametrize(("name", "sequence"), [("t5-small", 64), ("resnet-50", 1), ("dlrm-dcnv2", 1)])
def test_presets_of_other_families_are_simulated_and_refused_by_the_executor(
    tmp_path: Path, name: str, sequence: int
) -> None:
    found = load(scenario(tmp_path, f"{{preset: {name}}}", sequence))
    assert found.simulate().step_time > 0
    with pytest.raises(ValueError, match=f"model: the executor's model is a decoder transformer, met {name}"):
        found.check_executable()


def test_every_model_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(MODELS) and all(row["description"] for row in rows)
