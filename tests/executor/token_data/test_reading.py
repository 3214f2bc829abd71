"""Files of tokens of every form are the same samples, and a file that does not serve is one message."""

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import meshwise
from meshwise.executor.token_data.packing import PackedTokens
from meshwise.executor.token_data.parts import TokenError, TokenStream
from meshwise.executor.token_data.reading import read_tokens

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], list(range(20, 40))]
TOKENS = [token for document in DOCUMENTS for token in document]


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], code: int = 8, **changes: Any) -> Path:
    """Write tokens as Megatron-LM's ``IndexedDatasetBuilder`` does, a sequence a document."""
    dtype = {4: "<i4", 8: "<u2"}.get(code, "<f4")
    lengths = np.array([len(document) for document in documents], "<i4")
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    ends = changes.get("ends", np.arange(len(documents) + 1))
    header = changes.get("magic", b"MMIDIDX\x00\x00") + struct.pack(
        "<QBQQ", changes.get("version", 1), code, len(lengths), len(ends)
    )
    index = header + lengths.tobytes() + changes.get("starts", starts).tobytes() + np.asarray(ends, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index[: len(index) - changes.get("cut", 0)])
    tokens = np.concatenate([np.asarray(document, dtype) for document in documents])
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return prefix.with_suffix(".bin")


def list_tokens(dataset: PackedTokens) -> list[int]:
    return [token for number in range(len(dataset)) for token in dataset[number]["input_ids"].tolist()]


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


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


def test_pairs_are_a_token_apart_and_samples_cross_files(tmp_path: Path) -> None:
    for number, document in enumerate(DOCUMENTS):
        np.array(document, "uint16").tofile(tmp_path / f"{number}.bin")
    dataset = read_tokens(sorted(tmp_path.glob("*.bin")), 7, pairs=True, dtype="uint16")
    assert len(dataset) == (len(TOKENS) - 1) // 7
    for number in range(len(dataset)):
        inputs, targets = dataset[number]
        assert [*inputs.tolist(), int(targets[-1])] == TOKENS[7 * number : 7 * number + 8]
        assert torch.equal(inputs[1:], targets[:-1])


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"magic": b"XMIDIDX\x00\x00"}, "an index of Megatron begins with MMIDIDX, met b'XMIDIDX"),
        ({"version": 2}, "has version 1, met 2"),
        ({"code": 7}, r"whole numbers, one of 1 \(uint8\).*, met code 7 \(float32\)"),
        ({"code": 77}, r"met code 77 \(unknown\)"),
        ({"cut": 3}, "with 4 sequences and 5 ends of documents has 122 bytes, met 119: damaged"),
        ({"starts": np.array([0, 2, 4, 6], "<i8")}, "sequences follow each other in indexed.bin, met others: damaged"),
        ({"ends": [0, 1, 2, 3, 5]}, "made of the sequences 0 to 4, met others: damaged"),
    ],
)
def test_a_damaged_index_is_one_message(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_indexed(tmp_path / "indexed", DOCUMENTS, **changes)
    with pytest.raises(TokenError, match=text):
        read_tokens(path, 4)


def test_an_index_of_another_file_is_one_message(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "indexed", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(TokenError, match="its index tells of 58 bytes as uint16, met 56"):
        read_tokens(path, 4)
    path.unlink()
    with pytest.raises(TokenError, match=r"a file of tokens beside it, met .*indexed.bin: No such file"):
        read_tokens(path.with_suffix(".idx"), 4)


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


def test_a_table_that_does_not_serve_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"words": [1]}, {}, "has a column input_ids or tokens or text, met words"),
        ({"words": [1]}, {"column": "other"}, "has a column other, met words"),
        ({"tokens": [1.5]}, {}, "column tokens has lists of whole numbers, or text, met double"),
        ({"tokens": [[1], None]}, {}, "each row of tokens has a list of tokens, met one without"),
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
