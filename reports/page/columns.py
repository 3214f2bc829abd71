"""Numbers of a page as columns of bytes, concatenated and compressed together."""

import zlib
from base64 import b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8  # bytes: the widest number of a column, so that each can be read in place
Reference = dict[str, Any]
"""Location of a column: its type, its first byte, and its count of numbers."""


class Columns:
    """Columns of numbers that are embedded in a page; `add` returns a reference to each."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Any, kind: str) -> Reference:
        """Add a column of little-endian numbers of ``kind`` (such as ``u4``), and return its reference.

        Raises
        ------
        ValueError
            Where a number does not fit into ``kind``.
        """
        numbers = np.asarray(values)
        column = numbers.astype(f"<{kind}")
        if not np.array_equal(column, numbers):
            raise ValueError(f"numbers of a page fit into {kind}, met {numbers.min()} to {numbers.max()}")
        return self._append(column, kind)

    def add_steps(self, values: NDArray[np.int64]) -> Reference:
        """Add whole numbers in [0, 2**32) as differences between neighbours, modulo 2**32.

        The differences in a schedule repeat, and so compress, while the moments themselves do not.
        """
        if len(values) and not 0 <= values.min() <= values.max() < 2**32:
            raise ValueError(f"moments of a page lie in [0, 2**32), met {values.min()} to {values.max()}")
        return self._append((np.diff(values, prepend=0) % 2**32).astype("<u4"), "u4")

    def to_text(self) -> str:
        """Return all columns as zlib data in base 64."""
        return b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")

    def _append(self, column: NDArray[Any], kind: str) -> Reference:
        data = column.tobytes()
        reference = {"type": kind, "at": self._size, "count": len(column)}
        self._parts += [data, bytes(-len(data) % _ALIGNMENT)]
        self._size += len(data) + len(self._parts[-1])
        return reference
