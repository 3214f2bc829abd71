"""Datasets of the library ``datasets`` and streams of samples give every rank what lists of the same rows would."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from meshwise.executor.token_data.reading import read_tokens
from meshwise.executor.user_training.data import iterate_batches
from meshwise.executor.user_training.evaluation import iterate_evaluation
from meshwise.executor.user_training.training import next_batch
from meshwise.executor.user_training.user_file import UserFile, UserFileError

ROWS = [{"input_ids": [number, number + 1, number + 2], "name": str(number)} for number in range(12)]
OPTIONS: dict[str, Any] = {"is_own": False, "batch": None, "rank": 0, "num_ranks": 1, "seed": 0, "first_step": 0}


def read(data: Any, count: int, **changes: Any) -> list[Any]:
    batches = islice(iterate_batches(data, **(OPTIONS | changes)), count)
    return [(batch["input_ids"].tolist(), list(batch["name"])) for batch in batches]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> Any:
        return {"input_ids": torch.tensor(ROWS[number]["input_ids"]), "name": ROWS[number]["name"]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Rows()[number] for number in range(len(ROWS)))


def expect(numbers: list[int]) -> tuple[list[Any], list[str]]:
    return [ROWS[number]["input_ids"] for number in numbers], [str(number) for number in numbers]


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_a_dataset_of_datasets_is_read_as_one_of_torch(kind: str | None) -> None:
    rows = pytest.importorskip("datasets").Dataset.from_list(ROWS).with_format(kind)
    for changes in ({"batch": 4}, {"batch": 4, "rank": 1, "num_ranks": 2, "first_step": 2}):
        assert read(rows, 4, **changes) == read(Rows(), 4, **changes)
    loader = DataLoader(rows, batch_size=2, num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    assert read(loader, 2) == [expect([0, 1]), expect([2, 3])]
    evaluated = list(iterate_evaluation(rows, is_own=False, batch=8, rank=1, num_ranks=2))
    assert [item.batch["input_ids"].tolist() for item in evaluated] == [expect([4, 5, 6, 7])[0], expect([10, 11])[0]]


def test_a_stream_of_samples_makes_batches_of_which_ranks_take_parts() -> None:
    streams: list[Any] = [Stream(), DataLoader(Stream(), batch_size=5, drop_last=True)]
    try:
        import datasets
    except ImportError:
        pass
    else:
        rows = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
        streams += [rows, rows.with_format("torch"), DataLoader(rows, batch_size=5, drop_last=True)]
    for stream in streams:
        assert read(stream, 3, batch=5) == [expect([0, 1, 2, 3, 4]), expect([5, 6, 7, 8, 9]), expect([0, 1, 2, 3, 4])]
    for stream in (Stream(), *streams[2:4]):
        assert read(stream, 2, batch=4, rank=1, num_ranks=2) == [expect([2, 3]), expect([6, 7])]
        assert read(stream, 1, batch=4, is_own=True, num_ranks=2) == [expect([0, 1])]
        evaluated = list(iterate_evaluation(stream, is_own=False, batch=8, rank=1, num_ranks=2))
        assert [item.batch["input_ids"].tolist() for item in evaluated] == [
            expect([4, 5, 6, 7])[0],
            expect([10, 11])[0],
        ]


def test_a_stream_that_may_have_batches_is_refused() -> None:
    with pytest.raises(
        UserFileError, match=r"samples, of which 3 make a batch, met one with 3 in dim 0; nearest: Data"
    ):
        read(Stream(), 1, batch=3)
    assert read(DataLoader(Stream(), batch_size=3), 1, batch=3) == [expect([0, 1, 2])]


def test_a_loader_keeps_its_workers() -> None:
    loader = DataLoader(Rows(), 2, num_workers=1, prefetch_factor=5, persistent_workers=True, timeout=60)
    batches: Any = iterate_batches(loader, **OPTIONS)
    assert batches._prefetch_factor == 5 and batches._num_workers == 1 and batches._timeout == 60
    assert batches._persistent_workers and len(next(batches)["name"]) == 2


def test_an_error_of_a_worker_is_told_as_one_of_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    np.array([1, 2, 3, 90], "uint16").tofile(path)
    dataset = read_tokens(path, 2, dtype="uint16")
    dataset.vocabulary = 50
    loader = DataLoader(dataset, 1, num_workers=1, collate_fn=default_collate, multiprocessing_context="fork")
    batches = iterate_batches(loader, **OPTIONS)
    user_file = UserFile(tmp_path / "mine.py", torch.nn.Identity, list)
    next_batch(batches, user_file, 0)
    with pytest.raises(ValueError, match=rf"^{path}: tokens are below vocabulary\(50\), met 90 at token 3 \([^\n]*$"):
        next_batch(batches, user_file, 1)
