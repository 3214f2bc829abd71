"""The samples of ranks: every one once an epoch, the same steps on any number of ranks, from any step on."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from meshwise.executor.modules.batches import BatchError
from meshwise.executor.user_training.data import StepSampler, iterate_batches
from meshwise.executor.user_training.user_file import UserFileError


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, int]:
    """Draw a dataset, and steps of it on some ranks."""
    num_ranks, samples_of_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = num_ranks * samples_of_rank
    num_samples = draw(st.integers(batch, 40))
    return {"num_samples": num_samples, "batch": batch, "num_ranks": num_ranks, "seed": draw(st.integers(0, 9))}


def list_steps(sampling: dict[str, int], count: int, first_step: int = 0, num_ranks: int | None = None) -> list[Any]:
    """Return the samples of every step, those of all ranks in order."""
    options = sampling | {"num_ranks": num_ranks or sampling["num_ranks"], "first_step": first_step, "shuffle": True}
    ranks = [islice(StepSampler(rank=rank, **options), count) for rank in range(options["num_ranks"])]  # type: ignore[arg-type]
    return [[number for part in parts for number in part] for parts in zip(*ranks, strict=True)]


@given(samplings(), st.integers(0, 30))
def test_an_epoch_has_every_sample_at_most_once_and_goes_on_from_any_step(
    sampling: dict[str, int], first_step: int
) -> None:
    steps_per_epoch = sampling["num_samples"] // sampling["batch"]
    steps = list_steps(sampling, first_step + 3)
    epoch = [number for step in list_steps(sampling, steps_per_epoch) for number in step]
    assert len(set(epoch)) == len(epoch) == steps_per_epoch * sampling["batch"]
    assert list_steps(sampling, 3, first_step) == steps[first_step:]
    assert list_steps(sampling, 3, first_step, num_ranks=1) == steps[first_step:]


def read(data: Any, count: int, **changes: Any) -> list[Any]:
    options: dict[str, Any] = {
        "is_own": False, "batch": None, "rank": 0, "num_ranks": 1, "seed": 0, "first_step": 0
    } | changes  # fmt: skip
    return [batch.tolist() for batch in islice(iterate_batches(data, **options), count)]


def test_an_iterable_of_global_batches_is_divided_and_begins_again() -> None:
    batches = [torch.arange(4), torch.arange(4, 8)]
    assert read(batches, 3, num_ranks=2, rank=1) == [[2, 3], [6, 7], [2, 3]]
    assert read(batches, 2, first_step=1) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert read(batches, 1, is_own=True, num_ranks=2, rank=1, batch=8) == [[0, 1, 2, 3]]


def test_a_generator_ends() -> None:
    def generate() -> Iterator[torch.Tensor]:
        yield torch.arange(2)

    assert read(generate(), 5) == [[0, 1]]


def test_a_loader_keeps_its_collation_and_its_order() -> None:
    loader = torch.utils.data.DataLoader(range(6), batch_size=2, collate_fn=lambda row: torch.tensor(row) * 10)  # type: ignore[arg-type,var-annotated]
    assert read(loader, 4) == [[0, 10], [20, 30], [40, 50], [0, 10]]
    assert read(loader, 1, batch=6, num_ranks=3, rank=2) == [[40, 50]]


@pytest.mark.parametrize(
    ("data", "changes", "text"),
    [
        (5, {}, "a dataset, a DataLoader or an iterable, met int"),
        (torch.utils.data.TensorDataset(torch.ones(4)), {}, "no BATCH in the file"),
        (
            [torch.ones(3)],
            {"num_ranks": 2},
            r"data ranks\(2\) divide .*, met 3 samples; nearest: data ranks\(1\), or 2 samples",
        ),
        ([torch.ones(3)], {"batch": 4}, "has 4 samples, as BATCH says, met 3; nearest: BATCH = 3"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises((BatchError, UserFileError), match=text):
        read(data, 1, **changes)


def test_a_loader_with_an_order_of_its_own_is_refused() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = torch.utils.data.SubsetRandomSampler(range(4))
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=True)
    for loader in (
        torch.utils.data.DataLoader(dataset, 2, sampler=sampler),
        torch.utils.data.DataLoader(dataset, batch_sampler=batches),
    ):
        with pytest.raises(UserFileError, match="in order or at random, met SubsetRandomSampler"):
            read(loader, 1)


def test_a_dataset_of_one_rank_is_not_divided_again() -> None:
    loader = torch.utils.data.DataLoader(range(4), batch_size=2, collate_fn=torch.tensor)  # type: ignore[arg-type,var-annotated]
    assert read(loader, 2, is_own=True, num_ranks=2, rank=1) == [[0, 1], [2, 3]]


def test_a_step_of_more_samples_than_there_are_is_refused() -> None:
    with pytest.raises(BatchError, match=r"all samples of the dataset\(7\), met 8; nearest: 6"):
        StepSampler(7, 8, 0, 2, seed=0, first_step=0, shuffle=True)
