"""Tokens or text in columns: parquet files, and folders that the library ``datasets`` has saved, in Arrow's format.

Lists of tokens in Arrow files are mapped where they lie. Those of parquet are compressed, so that they are read once,
a group of rows at a time, and written as plain numbers.
"""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.executor.token_data.packing import Tokenise
from meshwise.executor.token_data.parts import Numbers, TokenError, TokenPart

TOKEN_COLUMNS, TEXT_COLUMN = ("input_ids", "tokens"), "text"
"""The columns that are looked for, in this order."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that ``datasets`` has saved, of one dataset and of several."""
ROWS = 1000
"""Rows of text that are read together."""


def require_pyarrow(path: Path) -> None:
    """Raise `TokenError` where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise TokenError(f"{path}: tables need pyarrow, which is not installed; pip install 'meshwise[data]'")


def list_arrow_files(folder: Path) -> list[Path]:
    """Return the files of a folder that ``datasets`` has saved, in order."""
    if (folder / SPLITS).is_file():
        try:
            names = list(json.loads((folder / SPLITS).read_text())["splits"])
        except (ValueError, KeyError, TypeError) as error:
            raise TokenError(f"{folder / SPLITS}: the splits of a dataset, met another document") from error
        raise TokenError(f"{folder}: one dataset, met splits {', '.join(names)}; nearest: {folder / names[0]}")
    if not (folder / STATE).is_file():
        raise TokenError(f"{folder}: a folder that datasets.save_to_disk wrote has {STATE}, met none")
    try:
        paths = [folder / row["filename"] for row in json.loads((folder / STATE).read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenError(f"{folder / STATE}: the files of a dataset, met another document") from error
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise TokenError(f"{missing[0]}: a file that {folder / STATE} names, met none")
    return paths


def choose_column(path: Path, names: Sequence[str], column: str | None) -> str:
    """Return the column of tokens or text, as the user says or as it is usually called."""
    wanted = (*TOKEN_COLUMNS, TEXT_COLUMN) if column is None else (column,)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        raise TokenError(f"{path}: a table has a column {' or '.join(wanted)}, met {', '.join(names) or 'none'}")
    return found


class Table:
    """A column of tokens or text of a parquet file or an Arrow file.

    Parameters
    ----------
    column
        The name of the column; ``None`` for the usual ones.
    """

    def __init__(self, path: Path, column: str | None) -> None:
        require_pyarrow(path)
        import pyarrow

        self.path = path
        try:
            self._open(column)
        except (pyarrow.ArrowException, OSError) as error:
            raise TokenError(f"{path}: a parquet or Arrow file, met {_tell(error)}") from error
        kind, types = self._type, pyarrow.types
        self.is_text = bool(types.is_string(kind) or types.is_large_string(kind))
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not self.is_text and not (is_list and types.is_integer(kind.value_type)):
            raise TokenError(f"{path}: column {self.column} has lists of whole numbers, or text, met {kind}")

    def _open(self, column: str | None) -> None:
        import pyarrow
        from pyarrow import parquet

        self._batches: Any = None
        if self.path.suffix == ".arrow":
            self._base = pyarrow.memory_map(str(self.path)).read_buffer()
            reader: Any = pyarrow.ipc.open_stream(pyarrow.BufferReader(self._base))
            schema, self._batches = reader.schema, list(reader)
        else:
            self._base = None
            with parquet.ParquetFile(self.path) as file:
                schema = file.schema_arrow
        self.column = choose_column(self.path, schema.names, column)
        self._type = schema.field(self.column).type

    def find_parts(self) -> list[TokenPart] | None:
        """Return where lists of tokens lie in the file, as plain numbers; ``None`` where they do not."""
        if self._base is None or self.is_text:
            return None
        parts = []
        for batch in self._batches:
            tokens = self._flatten(batch.column(self.column))
            if not len(tokens):
                continue
            dtype = str(tokens.type)
            buffer, itemsize = tokens.buffers()[1], np.dtype(dtype).itemsize
            start = buffer.address + tokens.offset * itemsize - self._base.address
            if not 0 <= start <= self._base.size - len(tokens) * itemsize:
                return None  # the file is compressed
            parts.append(TokenPart(str(self.path.resolve()), dtype, start, len(tokens)))
        return parts

    def iterate_tokens(self) -> Iterator[Numbers]:
        """Yield the tokens of groups of rows."""
        for rows in self._iterate_rows():
            yield self._flatten(rows).to_numpy(zero_copy_only=False)

    def iterate_texts(self, tokenise: Tokenise, end: int) -> Iterator[Sequence[int]]:
        """Yield the tokens of the text of every row, each with an end."""
        for rows in self._iterate_rows():
            if rows.null_count:
                raise TokenError(f"{self.path}: each row of {self.column} has a text, met one without")
            for text in rows.to_pylist():
                yield tokenise(text)
                yield [end]

    def _iterate_rows(self) -> Iterator[Any]:
        import pyarrow
        from pyarrow import parquet

        try:
            if self._batches is not None:
                yield from (batch.column(self.column) for batch in self._batches)
                return
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(ROWS, columns=[self.column]):
                    yield batch.column(0)
        except (pyarrow.ArrowException, OSError) as error:
            raise TokenError(f"{self.path}: a parquet or Arrow file, met {_tell(error)}") from error

    def _flatten(self, rows: Any) -> Any:
        tokens = rows.flatten()
        if rows.null_count or tokens.null_count:
            raise TokenError(f"{self.path}: each row of {self.column} has a list of tokens, met one without")
        return tokens


def _tell(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
