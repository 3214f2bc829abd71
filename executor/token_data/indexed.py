"""Megatron's indexed tokens: ``NAME.bin`` with the tokens of all documents, and ``NAME.idx`` that says where they lie.

An index has, little-endian [1]_: ``MMIDIDX\\0\\0``, the version 1 (8 bytes), the code of the numbers (1), how many
sequences (8) and ends of documents (8) there are, the tokens of every sequence (4 each), its first byte in the other
file (8 each), and at which sequence every document begins, with the end of the last one (8 each).

References
----------
.. [1] Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``, ``_IndexWriter``.
"""

import struct
from pathlib import Path

import numpy as np

from meshwise.executor.token_data.parts import Numbers, TokenError, TokenPart

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""The numbers that codes in an index stand for."""
_HEADER = struct.Struct("<9sQBQQ")


def read_index(index: Path) -> TokenPart:
    """Return the tokens of an index's ``NAME.bin``, of which every byte is in a sequence.

    Raises
    ------
    TokenError
        Where the index is damaged, or not of the file beside it.
    """
    data = index.with_suffix(".bin")
    try:
        size = index.stat().st_size
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise TokenError(f"{data}: an index beside it, met {index}: {error.strerror}") from error
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise TokenError(f"{index}: an index of Megatron begins with MMIDIDX, met {header[:9]!r}")
    _, version, code, num_sequences, num_ends = _HEADER.unpack(header)
    if version != VERSION:
        raise TokenError(f"{index}: an index of Megatron has version {VERSION}, met {version}")
    dtype = DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        codes = ", ".join(f"{number} ({name})" for number, name in DTYPES.items() if "float" not in name)
        raise TokenError(f"{index}: tokens are whole numbers, one of {codes}, met code {code} ({dtype or 'unknown'})")
    needed = _HEADER.size + num_sequences * (4 + 8) + num_ends * 8
    if size not in (needed, needed + num_sequences):  # with one byte a sequence of what kind it is
        counts = f"{num_sequences} sequences and {num_ends} ends of documents"
        raise TokenError(f"{index}: an index with {counts} has {needed} bytes, met {size}: damaged")
    lengths = _map(index, "<i4", _HEADER.size, num_sequences)
    starts = _map(index, "<i8", _HEADER.size + lengths.nbytes, num_sequences)
    ends = _map(index, "<i8", _HEADER.size + lengths.nbytes + starts.nbytes, num_ends)
    itemsize = np.dtype(dtype).itemsize
    expected = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64) * itemsize])
    if (len(lengths) and lengths.min() < 0) or not np.array_equal(starts, expected[:-1]):
        raise TokenError(f"{index}: sequences follow each other in {data.name}, met others: damaged")
    if len(ends) and (ends[0] != 0 or ends[-1] != num_sequences or (np.diff(ends) < 0).any()):
        raise TokenError(f"{index}: documents are made of the sequences 0 to {num_sequences}, met others: damaged")
    num_bytes = int(expected[-1])
    try:
        met = data.stat().st_size
    except OSError as error:
        raise TokenError(f"{index}: a file of tokens beside it, met {data}: {error.strerror}") from error
    if met != num_bytes:
        raise TokenError(
            f"{data}: its index tells of {num_bytes} bytes as {dtype}, met {met}: another index or damaged"
        )
    return TokenPart(str(data.resolve()), dtype, 0, num_bytes // itemsize)


def _map(index: Path, dtype: str, start: int, count: int) -> Numbers:
    return np.memmap(index, dtype, "r", start, (count,)) if count else np.zeros(0, dtype)
