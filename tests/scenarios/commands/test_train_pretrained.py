"""``meshwise train --hf``: a folder of transformers and text files, and one message for every fault."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from meshwise.executor.user_training import pretrained
from meshwise.scenarios.commands.main import run

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is current, with the configuration and tokenizer of a tiny Llama in ``tiny`` and two texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: place for place, word in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained("tiny")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=len(vocabulary), **sizes, max_position_embeddings=32, eos_token_id=0).save_pretrained("tiny")
    Path("a.txt").write_text(TEXT)
    Path("b.txt").write_text(TEXT[:200])
    return tmp_path


def test_a_model_is_trained_on_text_and_goes_on_from_its_export(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ["--evaluation-text", "b.txt", "--json", "--learning-rate", "0.01", "--batch", "4"]
    command = ["train", "--hf", "tiny", "--text", "a.txt", "b.txt", *options]
    assert run([*command, "--plan", "data=2,zero=3,num_microbatches=2", "--steps", "6", "--out", "first"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["loss"][-1] < first["loss"][0] and first["tokens_per_second"] > 0
    text = Path("b.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained("first/weights", local_files_only=True)
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert ids == [*tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)), 0] and len(ids) == 201
    samples = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    model = AutoModelForCausalLM.from_pretrained("first/weights", local_files_only=True).eval()
    with torch.no_grad():
        loss = float(model(input_ids=samples, labels=samples).loss)
    assert first["evaluation"] == [{"step": 5, "loss": pytest.approx(loss, rel=1e-5)}]
    begin = ["train", "--hf", "first/weights", "--text", "a.txt", *options, "--learning-rate", "1e-9"]
    assert run([*begin, "--steps", "1", "--out", "second"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["evaluation"][0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hf", "tiny"], "--hf: a model is trained on --text FILES or --tokens FILES, met none"),
        (["--text", "a.txt"], "are of a model, met no --hf FOLDER"),
        ([], "one FILE.py, or --hf FOLDER --text FILES, met 0 files"),
        (["--hf", "someone/nothing", "--text", "a.txt"], "met someone/nothing; nothing is downloaded"),
        (["--hf", ".", "--text", "a.txt"], "a folder with config.json"),
        (["--hf", "tiny", "--text", "none.txt"], "a text file, met none.txt"),
        (
            ["--hf", "tiny", "--text", "b.txt"],
            "8 samples of 32 tokens, met 201 tokens; nearest: --sequence 25",
        ),
        (["--hf", "tiny", "--text", "a.txt", "--sequence", "64"], "at most 32, the positions of the model, met 64"),
        (
            ["--hf", "tiny", "--text", "a.txt", "--evaluate-every", "2"],
            "evaluated on --evaluation-text FILES, met none",
        ),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *arguments, "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("tokenizer.json", None, "a folder with a tokenizer, as tokenizer.json, met none that loads in"),
        (None, "pytorch_model.bin", "weights are safetensors, met pytorch_model.bin"),
        (None, "model.safetensors", "a causal language model, met"),
    ],
)
def test_a_folder_that_does_not_serve_is_refused(
    removed: str | None, added: str | None, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if removed is not None:
        Path("tiny", removed).unlink()
        Path("tiny", "tokenizer_config.json").unlink()
    if added is not None:
        Path("tiny", added).write_bytes(b"broken")
    assert run(["train", "--hf", "tiny", "--text", "a.txt", "--steps", "1"]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_of_another_kind_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import T5Config

    T5Config(vocab_size=300).save_pretrained("tiny")
    assert run(["train", "--hf", "tiny", "--text", "a.txt", "--steps", "1"]) == 2
    assert "a causal language model, met" in capsys.readouterr().err


def test_without_transformers_the_remedy_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    assert run(["train", "--hf", "tiny", "--text", "a.txt"]) == 2
    assert "pip install 'meshwise[exec,hf]'" in capsys.readouterr().err


def test_a_name_in_the_local_cache_is_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = folder / "hub" / "models--someone--tiny"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    Path("tiny").rename(snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    assert pretrained.find_folder("someone/tiny") == snapshot
