"""A checkpoint is whole or not there, and no damage to it goes unseen; nothing here starts a rank or needs torch."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.training.checkpoint import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SEAL,
    Box,
    Checkpoint,
    DamagedError,
    begin_checkpoint,
    commit_checkpoint,
    describe_error,
    find_last_good,
    format_seal,
    sweep_partials,
    write_file,
)

WRITE = """
    from pathlib import Path
    from meshwise.executor.training.checkpoint import begin_checkpoint, commit_checkpoint, write_file

    def write(place, step, keep=2):
        partial = begin_checkpoint(Path(place), step)
        files = {}
        for rank in (0, 1):
            content = bytes(range(step, step + 64)) * 8
            size, digest = write_file(partial / f"rank-{rank}.bin", [memoryview(content)])
            pieces = [["parameter w", [8 * rank, 0], [8, 8], 0]]
            files[f"rank-{rank}.bin"] = {"bytes": size, "sha256": digest, "pieces": pieces}
        tensors = {"parameter w": ["float64", [16, 8]]}
        return commit_checkpoint(partial, {"step": step, "seed": 0, "tensors": tensors, "files": files}, keep)
"""
_space: dict[str, Any] = {}
exec(dedent(WRITE), _space)  # the same text runs in processes that are killed
write = _space["write"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with checkpoints after steps 1 and 2, each of two files of 512 bytes."""
    for step in (1, 2):
        write(tmp_path, step)
    return tmp_path


def test_what_is_written_is_read(place: Path) -> None:
    checkpoint, damaged = find_last_good(place)
    assert (checkpoint.step, damaged) == (2, ())
    assert checkpoint.shapes == {"parameter w": (16, 8)}
    assert bytes(checkpoint.map_file("rank-1.bin")) == bytes(range(2, 66)) * 8
    assert [piece.box.offsets for piece in checkpoint.pieces["parameter w"]] == [(0, 0), (8, 0)]


def test_the_seal_is_what_sha256sum_reads(place: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", SEAL], cwd=place / "step-00000002", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{MANIFEST}: OK\n")


def _damaged_alone(folder: Path) -> bool:
    try:
        Checkpoint.open(folder).verify()
    except DamagedError:
        return True
    return False


def _cases(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, bytes, int]]:
    """Yield files of a checkpoint, their content, and a place in it: every byte of the checkpoint is as likely."""
    files = [(path, path.read_bytes()) for path in sorted(folder.iterdir())]
    generator = random.Random(seed)
    for _ in range(count):
        path, content = generator.choices(files, [len(content) for _, content in files])[0]
        yield path, content, generator.randrange(len(content))


def test_a_thousand_bit_flips_are_all_seen(place: Path) -> None:
    folder = place / "step-00000002"
    for number, (path, content, byte) in enumerate(_cases(folder, 1000, 0)):
        spoilt = bytearray(content)
        spoilt[byte] ^= 1 << number % 8
        path.write_bytes(spoilt)
        assert _damaged_alone(folder), f"bit {number % 8} of byte {byte} of {path.name}"
        path.write_bytes(content)
    assert not _damaged_alone(folder)


def test_two_hundred_truncations_are_all_seen(place: Path) -> None:
    folder = place / "step-00000002"
    for path, content, byte in _cases(folder, 200, 1):
        path.write_bytes(content[:byte])
        assert _damaged_alone(folder), f"{path.name} of {byte} bytes"
        path.write_bytes(content)
    assert not _damaged_alone(folder)


@pytest.mark.parametrize("name", ["rank-0.bin", "rank-1.bin", MANIFEST, SEAL])
def test_a_missing_file_is_seen(name: str, place: Path) -> None:
    (place / "step-00000002" / name).unlink()
    checkpoint, (damage,) = find_last_good(place)
    assert checkpoint.step == 1
    assert damage == f"{place}/step-00000002/{name} cannot be read: No such file or directory"


def test_without_a_good_one_every_reason_is_said(place: Path) -> None:
    for step in (1, 2):
        (place / f"step-0000000{step}" / "rank-0.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"each is damaged: .*step-00000002.* has 512 bytes, met 5; .*step-00000001"):
        find_last_good(place)
    with pytest.raises(ValueError, match="resuming needs a checkpoint, met none"):
        find_last_good(place / "empty")


def test_the_newest_stay_and_later_ones_of_another_course_go(place: Path) -> None:
    write(place, 9)
    assert sorted(path.name for path in place.iterdir()) == ["step-00000002", "step-00000009"]
    write(place, 5)  # a run that resumed from step 2, for that of step 9 was damaged
    assert sorted(path.name for path in place.iterdir()) == ["step-00000002", "step-00000005"]
    write(place, 5, keep=1)
    assert sorted(path.name for path in place.iterdir()) == ["step-00000005"]


def test_a_renamed_checkpoint_is_not_taken_for_another_step(place: Path) -> None:
    (place / "step-00000002").rename(place / "step-00000007")
    checkpoint, (damage,) = find_last_good(place)
    assert checkpoint.step == 1 and "the checkpoint of its step, met that of step 2" in damage


KILLED = """
    import os, shutil, signal, sys

    left = int(sys.argv[2])

    def counted(function):
        def call(*arguments, **options):
            global left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*arguments, **options)
        return call

    os.fsync, Path.rename, Path.mkdir = counted(os.fsync), counted(Path.rename), counted(Path.mkdir)
    os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)
    write(sys.argv[1], 3)
"""


def test_a_kill_at_any_point_leaves_the_last_good_one(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # two folders are made, four files and the folder forced to the disk, the folder renamed: the first eight calls;
    # then its parent is forced to the disk, the oldest renamed and removed
    code = dedent(WRITE) + dedent(KILLED)
    found, ended = [], False
    while not ended:
        copy = tmp_path_factory.mktemp("killed") / "checkpoints"
        shutil.copytree(place, copy)
        process = subprocess.run(
            [sys.executable, "-c", code, str(copy), str(len(found))], cwd=Path(__file__).parents[3]
        )
        ended = process.returncode == 0
        assert ended or process.returncode == -signal.SIGKILL
        checkpoint, damaged = find_last_good(copy)
        assert damaged == ()
        found.append(checkpoint.step)
        sweep_partials(copy)
        assert len(list(copy.iterdir())) == (3 if len(found) in (9, 10) else 2)  # renamed, and none removed yet
    assert found == [2] * 8 + [3] * (len(found) - 8) and len(found) > 12


def test_a_disk_that_is_full_leaves_the_last_good_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write(place, 3)
    assert describe_error(caught.value) == "the disk is full"
    monkeypatch.undo()
    assert find_last_good(place)[0].step == 2
    assert find_last_good(place)[1] == ()
    write(place, 3)
    assert find_last_good(place)[0].step == 3


def _sealed(folder: Path, text: bytes) -> Path:
    (folder / MANIFEST).write_bytes(text)
    (folder / SEAL).write_bytes(format_seal(text))
    return folder


FILE = "rank-0.bin"
HOSTILE = {
    "a path above": ({"files": {"../../../etc/passwd": {"bytes": 9, "sha256": "0" * 64, "pieces": []}}}, "a file is"),
    "a path from the root": ({"files": {"/etc/passwd": {"bytes": 9, "sha256": "0" * 64, "pieces": []}}}, "a file is"),
    "a huge tensor": ({"tensors": {"parameter w": ["float64", [2**40, 2**20]]}}, "make up every tensor"),
    "too many dims": ({"tensors": {"parameter w": ["float64", [2**60] * 9]}}, "counts in whole numbers"),
    "a negative size": ({"tensors": {"parameter w": ["float64", [-16, -8]]}}, "counts in whole numbers"),
    "a size of true": ({"tensors": {"parameter w": ["float64", [True, 128]]}}, "counts in whole numbers"),
    "a broken size": ({"tensors": {"parameter w": ["float64", [1.5, 8]]}}, "counts in whole numbers"),
    "a dtype of its own": ({"tensors": {"parameter w": ["object", [16, 8]]}}, "a dtype is one of"),
    "another version": ({"version": 2}, "has version 1, met 2"),
    "no tensors": ({"tensors": None}, "is a manifest of this program"),
    "lists for mappings": ({"files": []}, "is a manifest of this program"),
    "no step": ({"step": None}, "counts in whole numbers"),
    "a negative step": ({"step": -1}, "counts in whole numbers"),
    "no seed": ({"seed": "0"}, "counts in whole numbers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_made_to_deceive_is_refused(name: str, place: Path) -> None:
    change, words = HOSTILE[name]
    folder = place / "step-00000002"
    document = json.loads((folder / MANIFEST).read_text())
    _sealed(folder, json.dumps(document | change).encode())
    with pytest.raises(DamagedError, match=words):
        Checkpoint.open(folder)


PIECES = {
    "past the end of the file": ["parameter w", [0, 0], [8, 8], 8],
    "far past it": ["parameter w", [0, 0], [8, 8], 2**62],
    "past the end of the tensor": ["parameter w", [9, 0], [8, 8], 0],
    "of another tensor": ["parameter v", [0, 0], [8, 8], 0],
    "of fewer dims": ["parameter w", [0], [64], 0],
    "of a part": ["parameter w", [0, 0], [7, 8], 0],
    "no piece": "parameter w",
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_lies_in_its_file_and_tensor(name: str, place: Path) -> None:
    folder = place / "step-00000002"
    document = json.loads((folder / MANIFEST).read_text())
    document["files"][FILE]["pieces"] = [PIECES[name]]
    _sealed(folder, json.dumps(document).encode())
    with pytest.raises(DamagedError):
        Checkpoint.open(folder)


def test_a_manifest_without_end_takes_no_memory(place: Path) -> None:
    folder = place / "step-00000002"
    text = b"[" * 2 * MAX_MANIFEST_BYTES
    _sealed(folder, text)
    tracemalloc.start()
    with pytest.raises(DamagedError, match=f"has at most {MAX_MANIFEST_BYTES} bytes"):
        Checkpoint.open(folder)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_MANIFEST_BYTES
    tracemalloc.stop()
    _sealed(folder, b"[" * 100_000)  # deeper than Python reads
    with pytest.raises(DamagedError, match="is a manifest of this program"):
        Checkpoint.open(folder)
    _sealed(folder, b'{"version": ' + b"9" * 5000 + b"}")
    with pytest.raises(DamagedError, match="is a manifest of this program"):
        Checkpoint.open(folder)


def test_a_file_is_not_followed_elsewhere_and_no_pipe(place: Path) -> None:
    folder = place / "step-00000002"
    secret = place / "secret"
    secret.write_bytes((folder / FILE).read_bytes())
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(secret)
    with pytest.raises(DamagedError, match=r"rank-0\.bin cannot be read"):
        Checkpoint.open(folder).verify()
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(DamagedError, match=r"rank-0\.bin is a file, met something else"):
        Checkpoint.open(folder).verify()


def test_any_value_anywhere_in_a_manifest_is_read_or_refused(place: Path) -> None:
    folder = place / "step-00000002"
    text = (folder / MANIFEST).read_text()
    generator = random.Random(0)
    values = [None, True, -1, 0, 2**70, 1.5, "", "x" * 50, [], [[]], {}, {"bytes": 1}, ["parameter w"], [0, 0]]
    refused = 0
    for _ in range(400):
        document: Any = json.loads(text)
        inner = document
        while True:
            key = generator.choice(list(inner)) if isinstance(inner, dict) else generator.randrange(len(inner))
            if not isinstance(inner[key], dict | list) or not inner[key] or generator.random() < 0.3:
                break
            inner = inner[key]
        inner[key] = generator.choice(values)
        _sealed(folder, json.dumps(document).encode())
        refused += _damaged_alone(folder)
    assert refused > 300


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=2, max_size=2).map(
    lambda dims: Box(tuple(start for start, _ in dims), tuple(size for _, size in dims))
)


@given(boxes, boxes)
def test_an_overlap_is_the_indices_that_both_have(one: Box, other: Box) -> None:
    def indices(box: Box) -> set[tuple[int, int]]:
        (a, b), (m, n) = box
        return {(i, j) for i in range(a, a + m) for j in range(b, b + n)}

    both = one.overlap(other)
    assert (indices(both) if both else set()) == indices(one) & indices(other)
    if both:
        rows, columns = both.find_slices(one)
        assert rows.start == both.offsets[0] - one.offsets[0] and rows.stop - rows.start == both.sizes[0]
        assert columns.stop <= one.sizes[1]


def test_files_are_never_written_over(tmp_path: Path) -> None:
    partial = begin_checkpoint(tmp_path, 1)
    write_file(partial / FILE, [memoryview(b"one")])
    with pytest.raises(FileExistsError):
        write_file(partial / FILE, [memoryview(b"two")])
    with pytest.raises(OSError):
        commit_checkpoint(partial.with_name("gone"), {}, 1)
