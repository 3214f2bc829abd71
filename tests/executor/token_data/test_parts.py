"""A stream reads what it is asked for alone, and tells tokens that a model has not."""

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from token_files import DOCUMENTS, TOKENS, write_indexed

from meshwise.executor.token_data.parts import TokenError, TokenPart, TokenStream
from meshwise.executor.token_data.reading import read_tokens


def test_a_sample_reads_its_own_part_of_the_file(tmp_path: Path) -> None:
    """A file with a hole is larger than memory, and a worker gets no tokens with the dataset."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**41)
        file.seek(2**40)
        file.write(np.array([1, 2, 3, 4], "uint16").tobytes())
    dataset = read_tokens(path, 4, dtype="uint16")
    assert dataset[2**37]["input_ids"].tolist() == [1, 2, 3, 4]
    assert len(pickle.dumps(dataset)) < 2000 and list(pickle.loads(pickle.dumps(dataset))[2**37]["labels"]) == [
        1,
        2,
        3,
        4,
    ]


def test_many_parts_of_many_files_open_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.executor.token_data.parts.MOST_FILES", 2)
    parts = []
    for number in range(5):
        path = tmp_path / f"{number}.bin"
        np.arange(100 * number, 100 * number + 100, dtype="uint16").tofile(path)
        parts += [TokenPart(str(path), "uint16", 2 * first, 10) for first in range(0, 100, 10)]
    stream = TokenStream(parts)
    assert stream.read(0, 500).tolist() == list(range(500))
    assert len(stream._files) == 2


def test_tokens_that_a_model_has_not_are_refused_at_once_or_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_indexed(tmp_path / "indexed", DOCUMENTS)
    with pytest.raises(TokenError, match=r"below vocabulary\(39\), met 39 at token 28 \(read as uint16\)"):
        read_tokens(path, 4, vocabulary=39)
    monkeypatch.setattr("meshwise.executor.token_data.reading.CHECKED", 4)
    dataset = read_tokens(path, 4, vocabulary=30)
    assert dataset[3]["input_ids"].tolist() == TOKENS[12:16]
    with pytest.raises(TokenError, match=r"indexed.bin: tokens are below vocabulary\(30\), met 30 at token 19"):
        dataset[4]
    np.array([1, -2], "int32").tofile(tmp_path / "raw.bin")
    with pytest.raises(TokenError, match="tokens are 0 or more, met -2 at token 1"):
        TokenStream(read_tokens(tmp_path / "raw.bin", 1, dtype="int32").tokens.parts).require_range(0, 2, None)
