"""``meshwise train`` on files of tokens: a model of transformers with ``--tokens``, and a user's ``data()``."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwise.scenarios.commands.main import run

FILE = """
import meshwise
import torch
from torch import nn

BATCH = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.head(self.table(inputs)).flatten(0, 1), targets.flatten())


def model():
    return Model()


def data():
    dataset = meshwise.read_tokens("tokens.bin", sequence=8, pairs=True, vocabulary=50)
    return torch.utils.data.DataLoader(dataset, shuffle=True, num_workers=1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is current, with the configuration of a tiny Llama and its tokens, indexed and raw."""
    monkeypatch.chdir(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 50, 400).astype("<u2")
    tokens.tofile("tokens.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    Path("tokens.idx").write_bytes(header + struct.pack("<iqqq", 400, 0, 0, 1))
    tokens.tofile("raw.bin")
    Path("short.bin").write_bytes(b"\x00\x00" * 9)
    (tokens + 30).tofile("large.bin")
    return tmp_path


def write_llama() -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=50, **sizes, max_position_embeddings=16, eos_token_id=0).save_pretrained("tiny")


def test_a_model_without_a_tokenizer_is_trained_on_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    write_llama()
    words = ["--plan", "data=2", "--no-calibrate", "--steps", "2", "--sequence", "8", "--json", "--batch", "4"]
    assert run(["train", "--hf", "tiny", "--tokens", "tokens.bin", *words, "--out", "indexed"]) == 0
    indexed = json.loads(capsys.readouterr().out)
    options = ["--token-dtype", "uint16", "--evaluation-tokens", "short.bin", "--out", "raw"]
    assert run(["train", "--hf", "tiny", "--tokens", "raw.bin", *words, *options]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["loss"] == indexed["loss"] and len(raw["loss"]) == 2
    assert [row["step"] for row in raw["evaluation"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "raw.bin"], "an index of Megatron beside it, raw.idx, or the numbers of a raw file, met neither"),
        (["--tokens", "none.bin"], "none.bin: a file of tokens ("),
        (["--tokens", "short.bin", "--token-dtype", "uint16"], "met 9 tokens; nearest: more text"),
        (["--tokens", "large.bin", "--token-dtype", "uint16"], "large.bin: tokens are below vocabulary(50), met 79"),
        (["--tokens", "raw.bin", "--token-dtype", "float32"], "met float32; nearest: uint16"),
        (["--tokens", "raw.bin", "--text", "a.txt"], "are two forms of the same, met both"),
        (["--text", "a.txt", "--token-dtype", "uint16"], "--token-dtype is of --tokens FILES, met none"),
    ],
)
def test_bad_tokens_are_one_message(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    write_llama()
    assert run(["train", "--hf", "tiny", *arguments, "--steps", "1", "--sequence", "8"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_file_reads_tokens_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(FILE)
    words = ["--plan", "data=2", "--no-calibrate", "--steps", "3"]
    assert run(["train", "mine.py", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_second"] > 0
    for change, message in (
        ("vocabulary=20", "tokens are below vocabulary(20), met 49"),
        ("sequence=800", "a sample of sequence(800) has 801 tokens, met 400; nearest: 399"),
    ):
        option = change.partition("=")[0]
        old = "vocabulary=50" if option == "vocabulary" else "sequence=8"
        Path("mine.py").write_text(FILE.replace(old, change))
        assert run(["train", "mine.py", *words, "--out", option]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
