"""Checkpoints on disk: folders that appear only when they are complete, and are verified before they are read.

A run keeps them in ``checkpoints/step-00000020`` and so on, 20 being the steps done::

    rank-0.bin        pieces of tensors, one after the other, as this rank had them
    manifest.json     step, seed, what was trained and how, and the size, SHA-256 and pieces of every file
    manifest.sha256   SHA-256 of the manifest, as ``sha256sum -c`` reads it

Files are written into ``step-00000020.partial``, the manifest last, and synced to the disk before the folder is
renamed: a folder without that suffix is complete. Nothing in a checkpoint is code, and nothing is unpickled. A manifest
is checked against the files before it is trusted, so a forged one cannot name a file outside its folder or make a
rank allocate more than the model needs. The digests find damage; they do not prove who wrote a checkpoint.

``torch.distributed.checkpoint`` is not used: its ``.metadata`` file is a pickle, which runs code when it is read (torch
2.13, ``FileSystemReader.read_metadata``), its files have no digests, and the states of `ZeroRedundancyOptimizer` and
of the executor's own optimizers would have to be gathered for it.
"""

import errno
import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.files import parse_json

VERSION = 1
MANIFEST, SEAL = "manifest.json", "manifest.sha256"
MAX_MANIFEST_BYTES = 2**24
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
"""Bytes of an element, by torch's name of the dtype; a checkpoint has no other dtypes."""
_FOLDER = re.compile(r"step-(\d{8,15})")
_FILE = re.compile(r"rank-\d{1,7}\.bin")
_PARTIAL = ".partial"
_BLOCK = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class DamagedError(ValueError):
    """A checkpoint differs from what was written."""


class Box(NamedTuple):
    """A box of indices of a tensor: along each dim, ``sizes`` indices from ``offsets`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """The number of elements in the box."""
        return prod(self.sizes)

    def overlap(self, box: "Box") -> "Box | None":
        """Return the box of indices that both boxes have; ``None`` where they have none in common.

        >>> Box((0, 4), (2, 4)).overlap(Box((1, 0), (5, 6)))
        Box(offsets=(1, 4), sizes=(1, 2))
        """
        starts = tuple(map(max, self.offsets, box.offsets))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *box, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def find_slices(self, outer_box: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that has the indices of ``outer_box``."""
        starts = (offset - outer_offset for offset, outer_offset in zip(self.offsets, outer_box.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def split_rows(box: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield boxes that make up elements ``start`` to ``stop`` of a box in row-major order, with their first elements.

    An optimizer that cuts a flat parameter has such elements: part of a row, whole rows, part of a row.

    >>> [(place, part.offsets, part.sizes) for place, part in split_rows(Box((0, 4), (3, 5)), 3, 11)]
    [(3, (0, 7), (1, 2)), (5, (1, 4), (1, 5)), (10, (2, 4), (1, 1))]
    """
    if len(box.sizes) == 1:
        yield start, Box((box.offsets[0] + start,), (stop - start,))
        return
    row = Box(box.offsets[1:], box.sizes[1:])
    while start < stop:
        index, remainder = divmod(start, row.volume)
        num_rows = (stop - start) // row.volume if remainder == 0 else 0
        if num_rows:
            yield start, Box((box.offsets[0] + index, *row.offsets), (num_rows, *row.sizes))
            start += num_rows * row.volume
            continue
        end = min(stop, (index + 1) * row.volume)
        for position, part in split_rows(row, remainder, end - index * row.volume):
            yield index * row.volume + position, Box((box.offsets[0] + index, *part.offsets), (1, *part.sizes))
        start = end


class StoredPiece(NamedTuple):
    """A piece of a tensor in a checkpoint: its indices, its file, and its first byte there."""

    box: Box
    file: str
    start: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is consistent; `verify` checks its files too.

    Parameters
    ----------
    facts
        What the manifest says besides tensors and files: step, seed, model, training, learning rate, data.
    shapes, dtypes
        Those of whole tensors, by name.
    pieces
        The stored pieces of every tensor, by name.
    files
        Bytes and SHA-256 of every file, by name.
    """

    folder: Path
    facts: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    pieces: Mapping[str, tuple[StoredPiece, ...]]
    files: Mapping[str, tuple[int, str]]

    __repr__ = brief_repr()

    @property
    def step(self) -> int:
        """The number of steps done."""
        step: int = self.facts["step"]
        return step

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Return the checkpoint in a folder; ``DamagedError`` where its manifest is damaged or inconsistent."""
        text = _read_small(folder / MANIFEST, MAX_MANIFEST_BYTES)
        if _read_small(folder / SEAL, 200) != format_seal(text):
            raise DamagedError(f"{folder / MANIFEST} has the SHA-256 that {SEAL} states, met another")
        return read_manifest(folder, text)

    def verify(self) -> None:
        """Raise ``DamagedError`` unless every file is as it was written."""
        for name in self.files:
            self.map_file(name).close()

    def map_file(self, name: str) -> mmap.mmap:
        """Return the bytes of a file as a private mapping, after comparing their SHA-256.

        The mapping is copy-on-write: a tensor on it never changes the file.
        """
        size, digest = self.files[name]
        path = self.folder / name
        with _open_file(path) as file:
            if (num_bytes := os.fstat(file.fileno()).st_size) != size:
                raise DamagedError(f"{path} has {size} bytes, met {num_bytes}")
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        if compute_digest(memory) != digest:
            memory.close()
            raise DamagedError(f"{path} has the SHA-256 that the manifest states, met another")
        return memory


def read_manifest(folder: Path, text: bytes) -> Checkpoint:
    """Return the checkpoint in a folder whose manifest is ``text``; ``DamagedError`` where it is inconsistent."""
    try:
        return _parse_manifest(folder, parse_json(text))
    except DamagedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MANIFEST} is a manifest of this program, met none: {error!r:.200}") from None


def format_seal(manifest: bytes) -> bytes:
    """Return the content of the digest file beside a manifest."""
    return f"{sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def compute_digest(data: mmap.mmap) -> str:
    """Return the SHA-256 of ``data``, read in blocks."""
    digest = sha256()
    for start in range(0, len(data), _BLOCK):
        digest.update(data[start : start + _BLOCK])
    return digest.hexdigest()


def _open_file(path: Path) -> Any:
    """Return a regular file open for reading; ``DamagedError`` for a link, a pipe or a device."""
    try:  # O_NONBLOCK: opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is a file, met something else")
    return os.fdopen(descriptor, "rb")


def _read_small(path: Path, max_bytes: int) -> bytes:
    with _open_file(path) as file:
        text: bytes = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise DamagedError(f"{path} has at most {max_bytes} bytes, met more")
    return text


def _parse_manifest(folder: Path, document: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint that a manifest describes; ``DamagedError`` where it states what cannot be."""
    if document["version"] != VERSION:
        raise DamagedError(f"{folder / MANIFEST} has version {VERSION}, met {document['version']!r:.40}")
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, (dtype, shape) in document["tensors"].items():
        shapes[name], dtypes[name] = _check_sizes(shape), dtype
        if dtype not in ITEMSIZE:
            raise DamagedError(f"{folder / MANIFEST}: a dtype is one of {', '.join(ITEMSIZE)}, met {dtype!r:.40}")
    files: dict[str, tuple[int, str]] = {}
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in shapes}
    for name, file in document["files"].items():
        size, digest = _check_sizes([file["bytes"]])[0], file["sha256"]
        if not _FILE.fullmatch(name) or not size or not re.fullmatch("[0-9a-f]{64}", digest):
            raise DamagedError(f"{folder / MANIFEST}: a file is rank-N.bin with bytes and SHA-256, met {name!r:.80}")
        files[name] = size, digest
        for tensor, offsets, sizes, start in file["pieces"]:
            box = Box(_check_sizes(offsets), _check_sizes(sizes))
            end = _check_sizes([start])[0] + box.volume * ITEMSIZE[dtypes[tensor]]
            ends = [a + b for a, b in zip(*box, strict=True)]
            if end > size or any(a > b for a, b in zip(ends, shapes[tensor], strict=True)):
                raise DamagedError(f"{folder / MANIFEST}: a piece lies in its file and tensor, met {tensor!r:.80}")
            pieces[tensor].append(StoredPiece(box, name, start))
    for name, shape in shapes.items():
        if sum(piece.box.volume for piece in pieces[name]) != prod(shape):
            raise DamagedError(f"{folder / MANIFEST}: pieces make up every tensor, met {name!r:.80}")
    facts = {key: value for key, value in document.items() if key not in ("tensors", "files")}
    _check_sizes([facts["step"], facts["seed"]])
    return Checkpoint(
        folder, facts, shapes, dtypes, {name: tuple(stored_pieces) for name, stored_pieces in pieces.items()}, files
    )


def _check_sizes(values: list[int]) -> tuple[int, ...]:
    """Return at most 8 counts as a tuple; ``DamagedError`` where they are no whole numbers from 0 on."""
    if len(values) > 8 or any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise DamagedError(f"a manifest counts in whole numbers from 0 on, of 8 dims at most, met {values!r:.80}")
    return tuple(values)


def list_checkpoints(place: Path) -> list[Path]:
    """Return the folders of all checkpoints in a folder, newest first, damaged ones too."""
    paths = [path for path in place.glob("step-*") if _FOLDER.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name[5:]), reverse=True)


def find_last_good(place: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the newest good checkpoint in a folder, verified, and what is wrong with newer ones.

    ``ValueError`` where no checkpoint is good.
    """
    reasons: list[str] = []
    for path in list_checkpoints(place):
        try:
            checkpoint = Checkpoint.open(path)
            if path.name != folder_name(checkpoint.step):
                raise DamagedError(f"{path} is the checkpoint of its step, met that of step {checkpoint.step}")
            checkpoint.verify()
        except DamagedError as error:
            reasons.append(str(error))
        else:
            return checkpoint, tuple(reasons)
    finding = f"each is damaged: {'; '.join(reasons)}" if reasons else "met none"
    raise ValueError(f"{place}: resuming needs a checkpoint, {finding}")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps.

    >>> folder_name(20)
    'step-00000020'
    """
    return f"step-{step:08d}"


def begin_checkpoint(place: Path, step: int) -> Path:
    """Make and return the folder for the files of a checkpoint; partial ones of a killed run are removed first."""
    place.mkdir(parents=True, exist_ok=True)
    sweep_partials(place)
    partial = place / (folder_name(step) + _PARTIAL)
    partial.mkdir()
    return partial


def sweep_partials(place: Path) -> None:
    """Remove half-written and half-removed checkpoints from a folder; no run may be writing there."""
    for partial_folder in place.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(partial_folder)


def write_file(path: Path, chunks: Iterable[memoryview]) -> tuple[int, str]:
    """Write a new file, sync it to the disk, and return its size in bytes and its SHA-256."""
    digest, size = sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def commit_checkpoint(partial: Path, document: Mapping[str, Any], keep: int) -> Path:
    """Write the manifest, give the folder its final name and return it; remove all but the newest ``keep`` checkpoints.

    Checkpoints of later steps go too. They must be damaged: a resumed run begins at the newest good checkpoint.
    """
    text = json.dumps({"version": VERSION, **document}, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, met {len(text)}: too many tensors")
    for name, content in ((MANIFEST, text), (SEAL, format_seal(text))):
        write_file(partial / name, [memoryview(content)])
    sync_folder(partial)  # before the rename: after a power failure a complete name must mean complete content
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    if final.exists():
        _discard(final)
    partial.rename(final)
    sync_folder(final.parent)
    checkpoints = list_checkpoints(final.parent)
    position = checkpoints.index(final)
    for checkpoint in (*checkpoints[:position], *checkpoints[position + keep :]):
        _discard(checkpoint)
    return final


def _discard(folder: Path) -> None:
    """Remove a checkpoint under a partial name, so that a half-removed one is never taken for a complete one."""
    condemned = folder.with_name(f"{folder.name}.old{_PARTIAL}")
    folder.rename(condemned)
    shutil.rmtree(condemned)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_error(error: OSError) -> str:
    """Return the reason of a failed write in words.

    >>> describe_error(OSError(errno.ENOSPC, "No space left on device"))
    'the disk is full'
    """
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full" if is_full else error.strerror or str(error)
