"""The samples of an evaluation: each once over all ranks, which have equally many batches."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from meshwise.executor.user_training.evaluation import iterate_evaluation, list_parts
from meshwise.executor.user_training.user_file import UserFileError


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_every_sample_is_counted_once(num_samples: int, batch: int, num_ranks: int) -> None:
    ranks = [list_parts(num_samples, batch, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(parts) for parts in ranks}) == 1 and all(numbers for parts in ranks for numbers, _ in parts)
    counted = [number for parts in ranks for numbers, is_counted in parts if is_counted for number in numbers]
    assert sorted(counted) == list(range(num_samples))


def read(data: Any, **changes: Any) -> list[tuple[list[int], bool]]:
    options: dict[str, Any] = {"is_own": False, "batch": 4, "rank": 0, "num_ranks": 1} | changes
    return [(item.batch.tolist(), item.is_counted) for item in iterate_evaluation(data, **options)]


def test_an_iterable_ends_and_is_divided_unevenly() -> None:
    batches = [torch.arange(3), torch.arange(3, 4)]
    assert read(iter(batches), num_ranks=2) == [([0], True), ([3], False)]
    assert read(iter(batches), num_ranks=2, rank=1) == [([1, 2], True), ([3], True)]
    assert read(batches, num_ranks=2, is_own=True) == [([0, 1, 2], True), ([3], True)]


def test_a_loader_keeps_its_size_and_collation() -> None:
    loader = torch.utils.data.DataLoader(range(5), batch_size=2, collate_fn=lambda row: torch.tensor(row) * 10)  # type: ignore[arg-type,var-annotated]
    assert read(loader, batch=None) == [([0, 10], True), ([20, 30], True), ([40], True)]
    assert read(loader, batch=None, num_ranks=2, rank=1)[-1] == ([40], True)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(UserFileError, match="a dataset, a DataLoader or an iterable, met int"):
        read(5)
    with pytest.raises(UserFileError, match="no BATCH in the file"):
        read(torch.utils.data.TensorDataset(torch.ones(4)), batch=None)
