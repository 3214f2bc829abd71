"""The corpus and text files are the same for any plan, visited window by window in an order that a seed decides."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.training.data import (
    TOPICS,
    TextFiles,
    load_batch,
    load_corpus,
    load_share,
    open_text,
    permute_index,
)


def test_targets_are_the_next_byte() -> None:
    tokens, targets = load_batch(5, 8, 16)
    assert tokens.shape == targets.shape == (8, 16)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    assert load_corpus().max() < 256


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1), (3, 1), (1, 2, 1)])
def test_shares_are_the_batch_in_order(sizes: tuple[int, ...]) -> None:
    whole = load_batch(3, 8, 16)
    parts = [load_share(3, 8, 16, rank, sizes) for rank in range(len(sizes))]
    assert [len(part[0]) for part in parts] == [2 * size for size in sizes]  # 8 sequences are two microbatches of 4
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_steps_and_samples_differ() -> None:
    rows = np.concatenate([load_batch(step, 8, 64)[0] for step in range(8)])
    assert len(np.unique(rows, axis=0)) == 64


def test_share_must_divide() -> None:
    with pytest.raises(ValueError, match=r"sum\(microbatch\) = 3 divides global_batch\(8\)"):
        load_share(0, 8, 16, 0, (1, 1, 1))


WORDS = "".join(f"line {number} äöü\n" for number in range(200)).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose files, in order of their names, make up `WORDS`; others do not count."""
    parts = {"a.txt": WORDS[:100], "b/c.txt": WORDS[100:101], "b/d.txt": b"", "e.md": WORDS[101:]}
    for name, content in parts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "text").write_bytes(b"\xff")
    return tmp_path


def test_files_of_a_folder_are_one_text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    one = tmp_path_factory.mktemp("one") / "text"
    # files of a folder come before those of the folders in it
    one.write_bytes(WORDS[:100] + WORDS[101:] + WORDS[100:101])
    many, whole = TextFiles(folder, 7), TextFiles(one, 7)
    assert many.num_bytes == whole.num_bytes == len(WORDS)
    assert many.digest == whole.digest
    samples = np.arange(300)
    assert np.array_equal(many.read_rows(samples, 16), whole.read_rows(samples, 16))


def test_an_epoch_reads_every_window_once(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(WORDS)
    text, sequence = TextFiles(path, 1), 32
    windows = (len(WORDS) - 1) // sequence
    expected = sorted(WORDS[start : start + sequence + 1] for start in range(0, windows * sequence, sequence))
    epochs = [text.read_rows(np.arange(windows) + epoch * windows, sequence) for epoch in (0, 1)]
    for rows in epochs:
        assert sorted(bytes(row.astype(np.uint8)) for row in rows) == expected
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], TextFiles(path, 2).read_rows(np.arange(windows), sequence))
    assert np.array_equal(epochs[0], TextFiles(path, 1).read_rows(np.arange(windows), sequence))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1), (3, 1)])
def test_ranks_share_the_batches_of_any_plan(sizes: tuple[int, ...], folder: Path) -> None:
    text = TextFiles(folder, 3)
    tokens, targets = load_batch(5, 8, 16, text)
    parts = [load_share(5, 8, 16, rank, sizes, text) for rank in range(len(sizes))]
    assert np.array_equal(np.concatenate([part[0] for part in parts]), tokens)
    assert np.array_equal(np.concatenate([part[1] for part in parts]), targets)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    # a position is a number of samples: batches of 8 from step 5 on are batches of 4 from step 10 on
    halves = [load_batch(step, 4, 16, text)[0] for step in (10, 11)]
    assert np.array_equal(np.concatenate(halves), tokens)


@given(st.integers(1, 400), st.integers(0, 5))
def test_a_permutation_takes_every_place_once(count: int, key: int) -> None:
    assert sorted(permute_index(index, count, str(key)) for index in range(count)) == list(range(count))


def test_a_permutation_does_not_keep_neighbours(count: int = 4096) -> None:
    places = [permute_index(index, count, "0 0") for index in range(count)]
    near = sum(abs(a - b) == 1 for a, b in pairwise(places))
    assert near < 12  # a random order has 2 such neighbours on average, and 12 once in a million


def test_text_is_checked_to_its_last_byte(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes("ä".encode() * 2**21 + "ä".encode()[:1])  # a block ends inside the file, the file inside a letter
    with pytest.raises(ValueError, match=r"cut: data is text in UTF-8, met unexpected end of data near byte 4194304"):
        TextFiles(cut, 0).check(16)
    for shift in (0, 1):  # a letter that lies across two blocks is no error
        cut.write_bytes(b"x" * shift + "ä".encode() * 2**21)
        TextFiles(cut, 0).check(16)


def test_what_is_no_text_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data is at least one file with text, met none"):
        TextFiles(tmp_path, 0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: data is a text file or a folder of them, met neither"):
        TextFiles(tmp_path, 0)
    short = tmp_path / "short"
    short.write_bytes(b"x" * 16)
    with pytest.raises(ValueError, match=r"at least the 17 bytes of a sequence\(16\) and its last target, met 16"):
        TextFiles(short, 0).check(16)
    short.write_bytes(b"x" * 17)
    TextFiles(short, 0).check(16)


def test_what_ships_with_python_is_the_default(tmp_path: Path) -> None:
    assert open_text(None, 3) is TOPICS
    assert len(TOPICS.digest) == 64 and TOPICS.num_bytes > 100_000
