"""Files of tokens of every form are the same samples, and a file that does not serve is one message."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from token_files import DOCUMENTS, TOKENS, list_tokens, write_indexed

import meshwise
from meshwise.executor.token_data.parts import TokenError
from meshwise.executor.token_data.reading import read_tokens


def test_every_form_has_the_same_samples(tmp_path: Path) -> None:
    expected = TOKENS[: len(TOKENS) // 4 * 4]
    for code in (4, 8):
        path = write_indexed(tmp_path / f"indexed{code}", DOCUMENTS, code)
        for name in (path, path.with_suffix(""), str(path.with_suffix(".idx"))):
            assert list_tokens(read_tokens(name, 4)) == expected
    for dtype in ("uint16", "uint32", "int64"):
        np.array(TOKENS, dtype).tofile(tmp_path / "raw.bin")
        assert list_tokens(read_tokens(tmp_path / "raw.bin", 4, dtype=dtype)) == expected
    np.save(tmp_path / "array.npy", np.array(TOKENS))
    assert list_tokens(meshwise.read_tokens(tmp_path / "array.npy", sequence=4)) == expected


def test_pairs_are_a_token_apart_and_samples_cross_files(tmp_path: Path) -> None:
    for number, document in enumerate(DOCUMENTS):
        np.array(document, "uint16").tofile(tmp_path / f"{number}.bin")
    dataset = read_tokens(sorted(tmp_path.glob("*.bin")), 7, pairs=True, dtype="uint16")
    assert len(dataset) == (len(TOKENS) - 1) // 7
    for number in range(len(dataset)):
        inputs, targets = dataset[number]
        assert [*inputs.tolist(), int(targets[-1])] == TOKENS[7 * number : 7 * number + 8]
        assert torch.equal(inputs[1:], targets[:-1])


def test_what_is_no_file_of_tokens_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(b"abc")
    np.save(tmp_path / "floats.npy", np.ones(3))
    (tmp_path / "text.parquet").write_bytes(b"none")
    (tmp_path / "words.txt").write_text("none")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("none.bin", {}, "a file of tokens .*, met no such file"),
        ("raw.bin", {}, "an index of Megatron beside it, raw.idx, .*, met neither; nearest: uint16"),
        ("raw.bin", {"dtype": "uint16"}, "have 2 bytes each, met 3 bytes"),
        ("raw.bin", {"dtype": "float32"}, "are uint16, uint32, int32, int64, uint8, met float32; nearest: uint16"),
        ("raw.bin", {"dtype": "uint8"}, r"a sample of sequence\(4\) has 4 tokens, met 3; nearest: 3"),
        ("raw.bin", {"dtype": "uint8", "sequence": 0}, "1 token or more, met 0"),
        ("floats.npy", {}, "one row of whole numbers, met float64"),
        ("words.txt", {}, "tokens are .*, met .txt"),
        ("", {}, "has state.json, met none"),
    ]
    for name, options, text in cases:
        with pytest.raises(TokenError, match=text):
            read_tokens(tmp_path / name, **({"sequence": 4} | options))
    with pytest.raises(TokenError, match="at least one file of tokens"):
        read_tokens([], 4)
