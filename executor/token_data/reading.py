"""`read_tokens`: files of tokens of the usual forms as samples, in one line of a user's ``data()``."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.executor.token_data.indexed import read_index
from meshwise.executor.token_data.packing import VERSION, PackedTokens, Tokenise, read_array, write_tokens
from meshwise.executor.token_data.parts import TokenError, TokenPart, TokenStream
from meshwise.executor.token_data.tables import Table, list_arrow_files
from meshwise.simulator.engine.compiled import find_cache_folder

RAW_DTYPES = ("uint16", "uint32", "int32", "int64", "uint8")
"""Numbers of raw files."""
FORMS = "NAME.bin with NAME.idx, a raw .bin, .npy, .parquet, .arrow, or a folder of datasets.save_to_disk"
PROBE = 200
"""Rows by whose tokens a tokenizer that is a function is told from others."""
CHECKED = 2**24
"""Tokens at the beginning that are compared with the vocabulary at once; others are when they are read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How files of tokens are read.

    Parameters
    ----------
    dtype
        Numbers of raw ``.bin`` files, such as ``uint16``; ``None`` where ``.bin`` have an index.
    column
        That of a table; by default ``input_ids``, ``tokens`` or ``text``.
    tokenise, end
        A function from a text to its tokens, and the token that is put after every text.
    tokenizer
        Words that tell the tokenizer from others; empty for what it makes of the first texts.
    folder
        Where tokens are written that cannot be mapped as they are; ``None`` for the user's cache.
    """

    dtype: str | None = None
    column: str | None = None
    tokenise: Tokenise | None = None
    end: int | None = None
    tokenizer: str = ""
    folder: Path | None = None

    def find_parts(self, paths: Iterable[Path]) -> list[TokenPart]:
        """Return where the tokens of files lie; what cannot be mapped as it is has been written anew.

        Raises
        ------
        TokenError
            Where a file is of no known form, damaged, or not there.
        """
        return [part for path in paths for part in self._open(path)]

    def _open(self, path: Path) -> list[TokenPart]:
        if path.is_dir():
            return [part for file in list_arrow_files(path) for part in self._open_table(file)]
        prefix = path.with_name(path.name + ".bin")  # Megatron names both files without their suffixes
        if not path.exists() and prefix.is_file():
            path = prefix
        if path.suffix == ".idx":
            return [read_index(path)]
        if not path.is_file():
            raise TokenError(f"{path}: a file of tokens ({FORMS}), met no such file")
        if path.suffix in (".parquet", ".arrow"):
            return self._open_table(path)
        if path.suffix == ".npy":
            return [read_array(path)]
        if path.suffix != ".bin":
            raise TokenError(f"{path}: tokens are {FORMS}, met {path.suffix or 'no suffix'}")
        index = path.with_suffix(".idx")
        if self.dtype is None and not index.exists():
            raise TokenError(
                f"{path}: an index of Megatron beside it, {index.name}, or the numbers of a raw file, met neither; "
                "nearest: uint16 (dtype= or --token-dtype)"
            )
        return [read_index(index)] if self.dtype is None else [_read_raw(path, self.dtype)]

    def _open_table(self, path: Path) -> list[TokenPart]:
        table = Table(path, self.column)
        parts = table.find_parts()
        if parts is not None:
            return parts
        facts = path.stat()
        words = f"{VERSION} {path.resolve()} {facts.st_size} {facts.st_mtime_ns} {table.column}"
        pieces: Iterable[Any] = table.iterate_tokens()
        if table.is_text:
            if self.tokenise is None or self.end is None:
                met = "no tokenizer" if self.tokenise is None else "no token that ends a text"
                raise TokenError(f"{path}: column {table.column} is text, which a tokenizer makes tokens, met {met}")
            tokens = table.iterate_texts(self.tokenise, self.end)
            words += f" {self.end} {self.tokenizer or _probe(table, self.tokenise)}"
            pieces = tokens
        folder = self.folder or find_cache_folder() / "tokens"
        target = folder / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.npy"
        return [write_tokens(target, pieces, {"version": VERSION, "table": str(path), "column": table.column})]


def _probe(table: Table, tokenise: Tokenise) -> str:
    rows = [list(tokens) for _, tokens in zip(range(PROBE), table.iterate_texts(tokenise, -1), strict=False)]
    code = getattr(tokenise, "__code__", None)
    words = "" if code is None else f"{code.co_code.hex()} {code.co_names} {code.co_consts}"
    return f"{getattr(tokenise, '__module__', '')} {getattr(tokenise, '__qualname__', '')} {words} {rows}"


def _read_raw(path: Path, dtype: str) -> TokenPart:
    if dtype not in RAW_DTYPES:
        raise TokenError(f"numbers of raw tokens are {', '.join(RAW_DTYPES)}, met {dtype}; nearest: uint16")
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise TokenError(f"{path}: tokens of {dtype} have {itemsize} bytes each, met {size} bytes; nearest: uint8")
    return TokenPart(str(path.resolve()), dtype, 0, size // itemsize)


def require_samples(parts: Sequence[TokenPart], sequence: int, *, is_paired: bool = False) -> None:
    """Raise `TokenError` where there is not one sample."""
    num_tokens, needed = sum(part.count for part in parts), sequence + is_paired
    if num_tokens < needed:
        place = parts[0].path if parts else "tokens"
        nearest = f"; nearest: {num_tokens - is_paired}" if num_tokens - is_paired >= 1 else ""
        raise TokenError(f"{place}: a sample of sequence({sequence}) has {needed} tokens, met {num_tokens}{nearest}")


def read_tokens(
    paths: str | Path | Iterable[str | Path],
    sequence: int,
    *,
    pairs: bool = False,
    dtype: str | None = None,
    column: str | None = None,
    tokenizer: Any = None,
    end: int | None = None,
    vocabulary: int | None = None,
    cache: str | Path | None = None,
) -> PackedTokens:
    """Return files of tokens as a dataset of samples of equal length; a rank reads those that it is asked for.

    The tokens of all files follow each other in one stream, which is cut across the ends of documents. Files are mapped
    into memory; parquet, and text, are turned into a file of plain numbers once.

    Parameters
    ----------
    paths
        One or several of: Megatron's ``NAME.bin`` with ``NAME.idx``, or ``NAME``; raw ``.bin`` of ``dtype``; ``.npy``;
        ``.parquet`` and ``.arrow``; folders of ``datasets.Dataset.save_to_disk``.
    sequence
        Tokens of a sample.
    pairs
        Whether a sample is ``(inputs, targets)``, the targets one token on; else a dict of ``input_ids`` and
        ``labels``, which are equal, as models of transformers take it.
    dtype
        Numbers of raw ``.bin`` files: ``uint16`` or ``uint32``, for example.
    column
        That of tables; by default ``input_ids``, ``tokens`` or ``text``.
    tokenizer
        Of columns of text: a tokenizer of transformers, or a function from a text to its tokens.
    end
        The token after every text; by default the tokenizer's ``eos_token_id``.
    vocabulary
        Tokens that the model has: others are refused.
    cache
        The folder in which tokens that cannot be mapped are kept; by default the user's cache. A function that makes
        tokens is known again by its code and the first rows: after a change of what it calls, name another folder.

    Raises
    ------
    TokenError
        Where a file is damaged, of no known form, shorter than a sample, or has tokens that the model has not.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    if not isinstance(sequence, int) or sequence < 1:
        raise TokenError(f"sequence is 1 token or more, met {sequence!r}; nearest: 1")
    if not names:
        raise TokenError(f"read_tokens(paths): at least one file of tokens ({FORMS}), met none")
    end = getattr(tokenizer, "eos_token_id", None) if end is None else end
    tokenise = None if tokenizer is None else find_tokenise(tokenizer)
    reading = Reading(
        dtype, column, tokenise, end, describe_tokenizer(tokenizer), None if cache is None else Path(cache)
    )
    parts = reading.find_parts(Path(name) for name in names)
    require_samples(parts, sequence, is_paired=pairs)
    stream = TokenStream(parts)
    if vocabulary is not None:
        stream.require_range(0, min(len(stream), CHECKED), vocabulary)
    return PackedTokens(parts, sequence, is_paired=pairs, vocabulary=vocabulary)


def find_tokenise(tokenizer: Any) -> Tokenise:
    """Return the function from a text to its tokens that a tokenizer of transformers is, or the function itself."""
    if not hasattr(tokenizer, "eos_token_id"):
        function: Tokenise = tokenizer
        return function

    def tokenise(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return tokenise


def describe_tokenizer(tokenizer: Any) -> str:
    """Return words that tell a tokenizer of transformers from others; empty where there are none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    return f"{type(tokenizer).__name__} {len(tokenizer)} {hashlib.sha256(backend.to_str().encode()).hexdigest()}"
