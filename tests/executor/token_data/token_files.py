"""Files of tokens for tests, as other programs write them."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwise.executor.token_data.packing import PackedTokens

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
