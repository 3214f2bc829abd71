"""An index that is damaged, or of another file, is one message."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from token_files import DOCUMENTS, write_indexed

from meshwise.executor.token_data.parts import TokenError
from meshwise.executor.token_data.reading import read_tokens


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
