"""Tables have the samples of other files, mapped or written once, or are one message."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from token_files import DOCUMENTS, TOKENS, list_tokens, write_table

from meshwise.executor.token_data.parts import TokenError
from meshwise.executor.token_data.reading import read_tokens


def test_tables_have_the_same_samples_and_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = TOKENS[: len(TOKENS) // 4 * 4]
    path = write_table(tmp_path / "tokens.parquet", {"other": [1, 2, 3, 4], "input_ids": DOCUMENTS})
    for _ in range(2):
        assert list_tokens(read_tokens(path, 4)) == expected
    assert len(list((tmp_path / "cache/meshwise/tokens").glob("*.npy"))) == 1
    text = write_table(tmp_path / "text.parquet", {"text": ["ab", "", "c"]})
    dataset = read_tokens(text, 2, tokenizer=lambda text: list(text.encode()), end=0, cache=tmp_path)
    assert list_tokens(dataset) == [97, 98, 0, 0, 99, 0]


def test_arrow_files_are_mapped_where_they_lie(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"name": list("abcd"), "tokens": pyarrow.array(DOCUMENTS, pyarrow.list_(pyarrow.int32()))})
    folder = tmp_path / "saved"
    folder.mkdir()
    for number, compression in enumerate((None, "zstd")):
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_stream(folder / f"data-{number}.arrow", table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}')
    dataset = read_tokens(folder, 4, cache=tmp_path / "cache")
    assert list_tokens(dataset) == (TOKENS + TOKENS)[: 2 * len(TOKENS) // 4 * 4]
    assert [Path(part.path).suffix for part in dataset.tokens.parts] == [".arrow", ".arrow", ".npy"]
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(TokenError, match=r"one dataset, met splits train, test; nearest: .*saved/train"):
        read_tokens(folder, 4)


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).shuffle(seed=1)
    saved.save_to_disk(str(tmp_path / "saved"))
    tokens = [token for row in saved["input_ids"] for token in row]
    assert list_tokens(read_tokens(tmp_path / "saved", 4)) == tokens[: len(tokens) // 4 * 4]


def test_a_table_that_does_not_serve_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"words": [1]}, {}, "has a column input_ids or tokens or text, met words"),
        ({"words": [1]}, {"column": "other"}, "has a column other, met words"),
        ({"tokens": [1.5]}, {}, "column tokens has lists of whole numbers, or text, met double"),
        ({"tokens": [[1], None]}, {}, "each row of tokens has a list of tokens, met one without"),
        ({"tokens": [[1, -7]]}, {}, "table.parquet: tokens are 0 to 2147483647, met -7"),
        ({"text": ["a"]}, {}, "is text, which a tokenizer makes tokens, met no tokenizer"),
        ({"text": ["a"]}, {"tokenizer": list}, "met no token that ends a text"),
    ]
    for columns, options, text in cases:
        path = write_table(tmp_path / "table.parquet", columns)
        with pytest.raises(TokenError, match=text):
            read_tokens(path, 1, cache=tmp_path, **options)
    path.write_bytes(b"none")
    with pytest.raises(TokenError, match="a parquet or Arrow file, met"):
        read_tokens(path, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TokenError, match=r"need pyarrow, which is not installed; pip install 'meshwise\[data\]'"):
        read_tokens(path, 1)
