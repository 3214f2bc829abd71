"""Text files as samples of equal length: one stream of tokens in which every file ends with a mark, cut into pieces.

The stream is made once, and kept in a file that all ranks map into memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwise.executor.recording.rank_files import UserError

PIECE = 1_000_000
"""Characters that are tokenised at once; a longer file is cut at ends of lines."""
VERSION = 1
Tokenise = Callable[[str], Sequence[int]]
"""Returns the tokens of a text, without marks of its begin and end."""


class TextError(UserError):
    """A text that cannot be read, or has too few tokens."""


class PackedText(Dataset[dict[str, Tensor]]):
    """Samples of ``sequence`` tokens from a file of tokens, each its own labels, without the rest at the end."""

    def __init__(self, tokens: Path, sequence: int) -> None:
        self.tokens = np.load(tokens, mmap_mode="r")
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        first = number * self.sequence
        ids = torch.from_numpy(self.tokens[first : first + self.sequence].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def pack_texts(texts: Sequence[Path], tokenise: Tokenise, end: int, tokenizer: str, folder: Path) -> Path:
    """Write the tokens of text files into a folder, unless they are there, and return their file.

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
    target = folder / f"{digest.hexdigest()[:16]}.npy"
    if target.exists():
        return target
    pieces = (tokens for path in texts for tokens in (*_tokenise_file(path, tokenise), [end]))
    parts = [np.asarray(tokens, dtype=np.int32) for tokens in pieces]
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, np.concatenate(parts))
    partial.rename(target)
    facts = {"version": VERSION, "texts": [str(path) for path in texts], "tokens": sum(map(len, parts))}
    target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    return target


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
