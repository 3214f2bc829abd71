"""The training data, bytes as tokens: the documentation topics that ship with Python, or text files in UTF-8.

Text files are memory-mapped. All files together are one text, cut into windows of one sequence each. An epoch visits
every window once, in an order that the seed decides. Of ``n`` windows, sample ``i`` is number ``i mod n`` of epoch
``i // n``: one number is a position in the data, and neither the plan nor the batch changes what it means.
"""

import codecs
import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

STRIDE = 1_000_003
"""Bytes between the starts of two samples, modulo the corpus: a prime, so that samples do not repeat soon."""


@lru_cache(maxsize=1)
def load_corpus() -> NDArray[np.int64]:
    """Return every topic of ``pydoc_data.topics``, sorted by name, as one array of byte values."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


class Topics:
    """The topics of ``pydoc_data.topics``, which differ between versions of Python."""

    name = "pydoc_data.topics"

    @property
    def num_bytes(self) -> int:
        """The size of the text in bytes."""
        return len(load_corpus())

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes."""
        return sha256(load_corpus().astype(np.uint8).tobytes()).hexdigest()

    def read_rows(self, samples: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
        """Return byte values ``(samples, sequence + 1)``."""
        text = load_corpus()
        starts = samples * STRIDE % (len(text) - sequence)
        rows: NDArray[np.int64] = text[starts[:, None] + np.arange(sequence + 1)]
        return rows


TOPICS = Topics()
Text: TypeAlias = "Topics | TextFiles"
"""Numbered samples of a text, the same for any plan, and the facts that identify the text."""


def load_batch(
    step: int, global_batch: int, sequence: int, text: Text = TOPICS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens and targets of a step, both ``(global_batch, sequence)``: the same for any plan."""
    return load_share(step, global_batch, sequence, 0, (global_batch,), text)


def load_share(
    step: int, global_batch: int, sequence: int, rank: int, sizes: Sequence[int], text: Text = TOPICS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens and targets of one data rank in a step: its contiguous share of the global batch.

    ``sizes`` are the sequences of a microbatch on every data rank; all ranks run equally many microbatches.
    """
    microbatches, remainder = divmod(global_batch, sum(sizes))
    if remainder:
        raise ValueError(f"sum(microbatch) = {sum(sizes)} divides global_batch({global_batch})")
    start = step * global_batch + sum(sizes[:rank]) * microbatches
    rows = text.read_rows(start + np.arange(sizes[rank] * microbatches), sequence)
    return rows[:, :-1], rows[:, 1:]


_BLOCK = 2**22
_ROUNDS = 6


class TextFiles:
    """The text in a file, or in all files below a folder, one after the other in the order of their names.

    Files and folders whose names begin with a dot are left out. ``ValueError`` where there is no text, or something
    else.
    """

    def __init__(self, place: str | Path, seed: int) -> None:
        self.place, self.seed = Path(place), seed
        file_sizes = [(str(path), _read_size(path)) for path in _list_files(self.place)]
        self.paths = [path for path, size in file_sizes if size]
        self.ends = np.cumsum([0, *(size for _, size in file_sizes if size)])
        if not self.paths:
            raise ValueError(f"{self.place}: data is at least one file with text, met none")

    @property
    def name(self) -> str:
        """The name of the file or folder."""
        return self.place.resolve().name

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return int(self.ends[-1])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all bytes; ``ValueError`` where a file is not UTF-8."""
        hasher = sha256()
        for path in self.paths:
            decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
            for block in _read_blocks(path):
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    place = start - len(decoder.getstate()[0]) + error.start
                    raise ValueError(f"{path}: data is text in UTF-8, met {error.reason} near byte {place}") from None
                hasher.update(block)
                start += len(block)
        return hasher.hexdigest()

    def check(self, sequence: int) -> None:
        """Raise ``ValueError`` where the text is not UTF-8, or shorter than one sequence and the byte after it."""
        if self.num_bytes <= sequence:
            rule = f"data has at least the {sequence + 1} bytes of a sequence({sequence}) and its last target"
            raise ValueError(f"{self.place}: {rule}, met {self.num_bytes}")
        self.digest  # noqa: B018 - reads all of it

    def read_rows(self, samples: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
        """Return byte values ``(samples, sequence + 1)``."""
        num_windows = (self.num_bytes - 1) // sequence
        result = np.empty((len(samples), sequence + 1), dtype=np.int64)
        for row, sample in zip(result, samples.tolist(), strict=True):
            epoch, place = divmod(sample, num_windows)
            self._read(permute_index(place, num_windows, f"{self.seed} {epoch}") * sequence, row)
        return result

    def _read(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill ``row`` with the bytes of the text from ``start`` on."""
        num_filled = 0
        file = int(np.searchsorted(self.ends, start, side="right")) - 1
        while num_filled < len(row):
            offset = start + num_filled - int(self.ends[file])
            part = _map_file(self.paths[file])[offset : offset + len(row) - num_filled]
            row[num_filled : num_filled + len(part)] = part
            num_filled += len(part)
            file += 1


def open_text(data: str | None, seed: int) -> Text:
    """Return the text in a file or folder, or with ``None`` Python's topics, whose order no seed changes."""
    return TOPICS if data is None else TextFiles(data, seed)


def permute_index(index: int, count: int, key: str) -> int:
    """Return the image of ``index`` under a permutation of ``range(count)`` that ``key`` decides; nothing is stored.

    A Feistel network permutes the numbers of the next even number of bits (Luby and Rackoff 1988, "How to construct
    pseudorandom permutations from pseudorandom functions"). It is applied until the result is below ``count`` (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3, cycle walking).

    >>> sorted(permute_index(index, 10, "0 0") for index in range(10)) == list(range(10))
    True
    """
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left_half, right_half = index >> half, index & mask
        for turn in range(_ROUNDS):
            digest = sha256(f"{key} {turn} {right_half}".encode()).digest()
            left_half, right_half = right_half, left_half ^ int.from_bytes(digest[:8]) & mask
        index = left_half << half | right_half
        if index < count:
            return index


def _list_files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _read_size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: data is a text file or a folder of them: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: data is a text file or a folder of them, met neither")
    return status.st_size


def _read_blocks(path: str) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks; the last block is empty."""
    try:
        with open(path, "rb") as file:
            block = b"-"
            while block:
                block = file.read(_BLOCK)
                yield block
    except OSError as error:
        raise ValueError(f"{path}: the text cannot be read: {error.strerror}") from None


@lru_cache(maxsize=64)  # each holds a file open
def _map_file(path: str) -> NDArray[np.uint8]:
    return np.memmap(path, dtype=np.uint8, mode="r")
