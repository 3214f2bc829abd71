"""Packed text is the tokens of all files in order, each with its end, cut into samples of equal length."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwise.executor.token_data import packing
from meshwise.executor.token_data.packing import PackedTokens, TextError, pack_texts

END = 256


def tokenise(text: str) -> list[int]:
    return list(text.encode())


@given(st.lists(st.text(max_size=60), min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 30))
def test_samples_in_order_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], sequence: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"{place}.txt" for place in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PIECE", piece)
        dataset = PackedTokens([pack_texts(paths, tokenise, END, "bytes", folder / "tokens")], sequence)
    expected = [token for text in texts for token in (*text.encode(), END)]
    samples = [dataset[number] for number in range(len(dataset))]
    tokens = [token for sample in samples for token in sample["input_ids"].tolist()]
    assert tokens == expected[: len(dataset) * sequence]
    assert all(sample["labels"].tolist() == sample["input_ids"].tolist() for sample in samples)
    assert len(expected) - len(dataset) * sequence < sequence


def test_a_text_is_tokenised_once_until_it_changes(tmp_path: Path) -> None:
    path, calls = tmp_path / "a.txt", []

    def count(text: str) -> list[int]:
        calls.append(text)
        return tokenise(text)

    path.write_text("one")
    first = pack_texts([path], count, END, "bytes", tmp_path)
    assert pack_texts([path], count, END, "bytes", tmp_path) == first and calls == ["one"]
    path.write_text("two")
    assert pack_texts([path], count, END, "bytes", tmp_path) != first and calls == ["one", "two"]
    assert pack_texts([path], count, END, "other", tmp_path) != first and len(calls) == 3


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"ok\xff\xfe")
    with pytest.raises(TextError, match=r"in UTF-8, met .*picture with other bytes at 2"):
        pack_texts([tmp_path / "picture"], tokenise, END, "bytes", tmp_path)
    with pytest.raises(TextError, match=r"--text: a text file, met .*none: No such file"):
        pack_texts([tmp_path / "none"], tokenise, END, "bytes", tmp_path)
