"""Tokens in files, as the parts of one stream, of which only what is read is mapped into memory."""

import json
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

    def map(self) -> Numbers:
        """Return the tokens, which are read where they are looked at."""
        if not self.count:
            return np.zeros(0, self.dtype)
        dtype = np.dtype(self.dtype).newbyteorder("<")
        try:
            return np.memmap(self.path, dtype, "r", self.start, (self.count,))
        except (OSError, ValueError) as error:
            raise TokenError(f"{self.path}: a file of {self.count} tokens, met {error}") from error


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
        self._arrays: dict[int, Numbers] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}

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
        if place not in self._arrays:
            self._arrays[place] = self.parts[place].map()
        return self._arrays[place]


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
