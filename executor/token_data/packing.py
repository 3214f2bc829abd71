"""Tokens as samples of equal length: one stream, cut into pieces; and text, in which every file ends with a mark.

The stream of texts is made once, and kept in a file that all ranks map into memory.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwise.executor.token_data.parts import Numbers, TokenError, TokenPart, TokenStream, require_numbers

PIECE = 1_000_000
"""Characters that are tokenised at once; a longer file is cut at ends of lines."""
VERSION = 1
DTYPE = "int32"
"""Numbers of tokens that are written."""
Tokenise = Callable[[str], Sequence[int]]
"""Returns the tokens of a text, without marks of its begin and end."""
_HEADER = {"descr": np.lib.format.dtype_to_descr(np.dtype(DTYPE)), "fortran_order": False}


class TextError(TokenError):
    """A text that cannot be read, or has too few tokens."""


class PackedTokens(Dataset[Any]):
    """Samples of ``sequence`` tokens of a stream, without the rest at the end.

    A sample has ``input_ids`` and ``labels``, which are equal, as models of transformers take them.

    Parameters
    ----------
    is_paired
        Whether a sample is ``(inputs, targets)`` instead, with the token after each input as its target.
    vocabulary
        Tokens are below it, where it is known.
    """

    def __init__(
        self,
        parts: Iterable[TokenPart],
        sequence: int,
        *,
        is_paired: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        self.tokens, self.sequence = TokenStream(parts), sequence
        self.is_paired, self.vocabulary = is_paired, vocabulary

    def __len__(self) -> int:
        return max(len(self.tokens) - self.is_paired, 0) // self.sequence

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"samples are 0 to {len(self) - 1}, met {number}")
        first = number % len(self) * self.sequence
        tokens = self.tokens.read(first, first + self.sequence + self.is_paired)
        require_numbers(self.tokens, first, tokens, self.vocabulary)
        ids: Tensor = torch.from_numpy(tokens)
        return (ids[:-1], ids[1:]) if self.is_paired else {"input_ids": ids, "labels": ids}


def write_tokens(target: Path, pieces: Iterable[Numbers | Sequence[int]], facts: dict[str, Any]) -> TokenPart:
    """Write tokens into a file of NumPy, a piece at a time, unless it is there; of several processes one does.

    Parameters
    ----------
    facts
        What is written beside the tokens, for the reader.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial, count = target.with_suffix(".partial"), 0
            with partial.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, _HEADER | {"shape": (0,)})
                for piece in pieces:
                    file.write(_to_numbers(piece, facts).tobytes())
                    count += len(piece)
                file.seek(0)  # NumPy leaves room for any number
                np.lib.format.write_array_header_1_0(file, _HEADER | {"shape": (count,)})
            partial.rename(target)
            target.with_suffix(".json").write_text(json.dumps(facts | {"tokens": count}, indent=1) + "\n")
    return read_array(target)


def _to_numbers(piece: Numbers | Sequence[int], facts: Mapping[str, Any]) -> Numbers:
    """Return tokens as they are written; `TokenError` where one is below 0 or needs more bytes."""
    numbers = np.asarray(piece, np.int64)
    most = np.iinfo(DTYPE).max
    strange = numbers[(numbers < 0) | (numbers > most)]
    if len(strange):
        raise TokenError(f"{facts.get('table', 'a tokenizer')}: tokens are 0 to {most}, met {strange[0]}")
    return numbers.astype(DTYPE)


def read_array(path: Path) -> TokenPart:
    """Return the tokens of a file that ``numpy.save`` wrote; `TokenError` where it has no row of whole numbers."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TokenError(f"{path}: an array of numpy.save, met {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
        raise TokenError(f"{path}: one row of whole numbers, met {array.dtype} of shape {array.shape}")
    return TokenPart(str(path.resolve()), str(array.dtype), getattr(array, "offset", 0), len(array))


def pack_texts(texts: Sequence[Path], tokenise: Tokenise, end: int, tokenizer: str, folder: Path) -> TokenPart:
    """Write the tokens of text files into a folder, unless they are there, and return where they are.

    Parameters
    ----------
    end
        The token after every file.
    tokenizer
        Words that tell the tokenizer from others.

    Raises
    ------
    TextError
        Where a file cannot be read as UTF-8.
    """
    digest = hashlib.sha256(f"{VERSION} {PIECE} {end} {tokenizer}".encode())
    for path in texts:
        digest.update(_read_bytes(path))
        digest.update(b"\0end\0")
    pieces = (tokens for path in texts for tokens in (*_tokenise_file(path, tokenise), [end]))
    facts = {"version": VERSION, "texts": [str(path) for path in texts]}
    return write_tokens(folder / f"{digest.hexdigest()[:16]}.npy", pieces, facts)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"--text: a text file, met {path}: {error.strerror}") from error


def _tokenise_file(path: Path, tokenise: Tokenise) -> Iterator[Sequence[int]]:
    try:
        text = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"--text: a text file in UTF-8, met {path} with other bytes at {error.start}") from error
    first = 0
    while first < len(text):
        end = text.find("\n", first + PIECE) + 1 or len(text)
        yield tokenise(text[first:end])
        first = end
