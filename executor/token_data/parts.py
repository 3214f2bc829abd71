"""Tokens in files, as the parts of one stream, of which only what is read is mapped into memory."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.executor.recording.rank_files import UserError

Numbers = NDArray[Any]
"""An array of whole numbers."""
BLOCK = 2**22
"""Tokens that are looked at together."""


MOST_FILES = 128
"""Files that are mapped at a time."""


class TokenError(UserError):
    """A file without tokens as its form says, or with others than a model has."""


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens that lie one after the other in a file.

    Parameters
    ----------
    dtype
        NumPy's name of the numbers, which are little-endian.
    start
        Byte of the first token.
    count
        Tokens.
    """

    path: str
    dtype: str
    start: int
    count: int

    def read_from(self, content: Numbers) -> Numbers:
        """Return the tokens in the bytes of their file, which are read where they are looked at."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        end = self.start + self.count * dtype.itemsize
        if end > len(content):
            raise TokenError(f"{self.path}: a file of {self.count} tokens, met {len(content)} bytes")
        return content[self.start : end].view(dtype)


def map_file(path: str) -> Numbers:
    """Return the bytes of a file, which are read where they are looked at; `TokenError` where it cannot be mapped."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise TokenError(f"{path}: a file of tokens, met {error}") from error


def write_parts(path: Path, parts: Sequence[TokenPart]) -> None:
    """Write where tokens lie into a file that `read_parts` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(part) for part in parts], indent=1) + "\n")


def read_parts(path: Path) -> tuple[TokenPart, ...]:
    """Return what `write_parts` wrote."""
    return tuple(TokenPart(**row) for row in json.loads(path.read_text()))


class TokenStream:
    """The tokens of several parts, one after the other; workers of a loader map the files themselves."""

    def __init__(self, parts: Iterable[TokenPart]) -> None:
        self.parts = tuple(parts)
        self._ends = np.array([0, *accumulate(part.count for part in self.parts)])
        self._files: OrderedDict[str, Numbers] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": OrderedDict()}

    def read(self, first: int, end: int) -> Numbers:
        """Return the tokens from ``first`` to ``end``, which is not among them, as 64-bit numbers."""
        rows = []
        place = int(np.searchsorted(self._ends, first, side="right")) - 1
        while first < end:
            start, stop = self._ends[place], min(self._ends[place + 1], end)
            rows.append(self._map(place)[first - start : stop - start])
            first, place = max(first, stop), place + 1
        return np.concatenate(rows, dtype=np.int64) if rows else np.zeros(0, np.int64)

    def require_range(self, first: int, end: int, vocabulary: int | None) -> None:
        """Raise `TokenError` where a token from ``first`` to ``end`` is below 0, or not below ``vocabulary``."""
        for start in range(first, end, BLOCK):
            require_numbers(self, start, self.read(start, min(start + BLOCK, end)), vocabulary)

    def find_part(self, place: int) -> TokenPart:
        """Return the part that has the token at a place."""
        return self.parts[int(np.searchsorted(self._ends, place, side="right")) - 1]

    def _map(self, place: int) -> Numbers:
        part = self.parts[place]
        if part.path not in self._files:
            if len(self._files) == MOST_FILES:
                self._files.popitem(last=False)
            self._files[part.path] = map_file(part.path)
        self._files.move_to_end(part.path)
        return part.read_from(self._files[part.path])


def require_numbers(stream: TokenStream, first: int, tokens: Numbers, vocabulary: int | None) -> None:
    """Raise `TokenError` where tokens of a stream, from place ``first`` on, are below 0 or not in a vocabulary."""
    if not len(tokens):
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least >= 0 and (vocabulary is None or most < vocabulary):
        return
    strange = least if least < 0 else most
    place = first + int(np.argmax(tokens == strange))
    part = stream.find_part(place)
    rule = "tokens are 0 or more" if least < 0 else f"tokens are below vocabulary({vocabulary})"
    raise TokenError(f"{part.path}: {rule}, met {strange} at token {place} (read as {part.dtype})")
