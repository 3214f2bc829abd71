"""The batches of a rank, step by step, in an order that depends on the seed and the step alone.

A dataset with a length is drawn anew in every epoch, in an order from the seed; every rank reads its own samples of a
step only. Batches that a user's iterable makes are those of all ranks, of which each takes its part; an iterable of
``data(rank, world)`` makes those of the rank. An `IterableDataset` makes samples.

Datasets of the library ``datasets`` are used as torch's, though they are none.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from meshwise.executor.modules.batches import BatchError, count_samples, list_tensors, split_evenly
from meshwise.executor.user_training.user_file import UserFileError


class StepSampler:
    """The samples of one rank's part of every step, from a step on, as a batch sampler of a `DataLoader`.

    Parameters
    ----------
    num_samples
        Those of the dataset; the last ones of an epoch that fill no step are left out.
    batch
        Samples of a step on all ranks.
    """

    def __init__(
        self, num_samples: int, batch: int, rank: int, num_ranks: int, *, seed: int, first_step: int, shuffle: bool
    ) -> None:
        if batch % num_ranks:
            nearest = max(batch // num_ranks, 1) * num_ranks
            raise BatchError(f"data ranks({num_ranks}) divide the samples of a step, met {batch}; nearest: {nearest}")
        if batch > num_samples:
            raise BatchError(
                f"a step has at most all samples of the dataset({num_samples}), met {batch}; nearest: "
                f"{max(num_samples // num_ranks * num_ranks, num_ranks)}"
            )
        self.num_samples, self.batch, self.rank, self.num_ranks = num_samples, batch, rank, num_ranks
        self.seed, self.first_step, self.shuffle = seed, first_step, shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sample is read at most once."""
        return self.num_samples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        size = self.batch // self.num_ranks
        epoch, place = divmod(self.first_step, self.steps_per_epoch)
        while True:
            order = self._order(epoch)
            for step in range(place, self.steps_per_epoch):
                first = step * self.batch + self.rank * size
                yield order[first : first + size].tolist()
            epoch, place = epoch + 1, 0

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator)


def is_of_datasets(data: Any) -> bool:
    """Return whether data are of the library ``datasets``, which are no datasets of torch by their class."""
    library = sys.modules.get("datasets")
    if library is None or not hasattr(library, "load_from_disk"):  # a user's own package may have the name
        return False
    return isinstance(data, library.Dataset | library.IterableDataset)


def is_stream(data: Any) -> bool:
    """Return whether a dataset has samples in an order of its own."""
    return isinstance(data, IterableDataset) or (is_of_datasets(data) and not hasattr(data, "__len__"))


def has_samples(data: Any) -> bool:
    """Return whether data have samples by number."""
    return (isinstance(data, Dataset) or is_of_datasets(data)) and not is_stream(data)


def collate_rows(rows: list[Any]) -> Any:
    """Return a batch of rows of ``datasets``, in which lists of numbers are tensors.

    >>> collate_rows([{"tokens": [1, 2], "name": "a"}, {"tokens": [3, 4], "name": "b"}])["tokens"].tolist()
    [[1, 2], [3, 4]]
    """
    return default_collate([_to_tensors(row) for row in rows])


def _to_tensors(row: Any) -> Any:
    if isinstance(row, Mapping):
        return {key: _to_tensors(value) for key, value in row.items()}
    is_numbers = isinstance(row, list) and row and not isinstance(row[0], str | Mapping | torch.Tensor)
    return torch.tensor(row) if is_numbers else row


def find_collate(dataset: Any, collate: Any = default_collate) -> Any:
    """Return what makes batches of a dataset: torch's own function would take apart the lists of ``datasets``."""
    return collate_rows if is_of_datasets(dataset) and collate is default_collate else collate


def iterate_batches(
    data: Any, *, is_own: bool, batch: int | None, rank: int, num_ranks: int, seed: int, first_step: int
) -> Iterator[Any]:
    """Yield the batch of this rank for every step from ``first_step`` on.

    Parameters
    ----------
    data
        A dataset with a length, a `DataLoader`, an `IterableDataset` of samples, or an iterable of batches.
    is_own
        Whether an iterable makes this rank's batches alone.
    batch
        Samples of a step on all ranks; ``None`` for those of the loader.

    Raises
    ------
    UserFileError
        Where ``data`` is none of these, or says no size of batches.
    BatchError
        Where the samples of a step do not divide among ranks.
    """
    sampler_options = {"seed": seed, "first_step": first_step}
    dataset = data.dataset if isinstance(data, DataLoader) else data
    has_numbers = isinstance(data, DataLoader) or has_samples(data)
    has_length = has_numbers and not is_stream(dataset) and hasattr(dataset, "__len__")
    if has_length and is_own:  # the user has divided the samples himself
        batch = batch // num_ranks if batch is not None else None
        rank, num_ranks = 0, 1
    if isinstance(data, DataLoader) and not is_stream(dataset):
        require_known_sampler(data)
        sampler = StepSampler(
            len(data.dataset),  # type: ignore[arg-type]
            find_batch(batch, getattr(data.batch_sampler, "batch_size", None)),
            rank,
            num_ranks,
            shuffle=not isinstance(data.sampler, SequentialSampler),
            **sampler_options,
        )
        return iter(make_loader(data.dataset, sampler, data))
    if has_samples(data):
        if not has_length:
            raise UserFileError(f"a dataset has a length, met {type(data).__name__} without; nearest: IterableDataset")
        num_samples = len(data)
        sampler = StepSampler(num_samples, find_batch(batch, None), rank, num_ranks, shuffle=True, **sampler_options)
        return iter(make_loader(data, sampler, None))
    if not isinstance(data, Iterable):
        raise UserFileError(f"data() returns a dataset, a DataLoader or an iterable, met {type(data).__name__}")
    data = open_stream(data, batch // num_ranks if batch is not None and is_own else batch)
    return _iterate_stream(data, is_own=is_own, batch=batch, rank=rank, num_ranks=num_ranks, first_step=first_step)


def require_known_sampler(loader: DataLoader[Any]) -> None:
    """Raise `UserFileError` where a loader's own order of samples would be lost."""
    batch_sampler = loader.batch_sampler
    own_sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler
    if not isinstance(own_sampler, SequentialSampler | RandomSampler):
        raise UserFileError(
            f"ranks draw samples of a loader in order or at random, met {type(own_sampler).__name__}; nearest: an "
            "iterable of batches"
        )


def find_batch(batch: int | None, loader_batch: int | None) -> int:
    """Return the samples of a step; `UserFileError` where neither the user nor his loader says them."""
    if batch is None and loader_batch is None:
        raise UserFileError("a dataset needs the samples of a step, met no BATCH in the file; nearest: --batch N")
    return batch or loader_batch or 1


class SampleStream:
    """Batches of an `IterableDataset`, as often as it is gone through.

    Parameters
    ----------
    batch
        Samples of a batch.
    is_whole
        Whether the last samples are left out where they are fewer.
    """

    def __init__(self, samples: Iterable[Any], batch: int, *, is_whole: bool = True) -> None:
        self.samples, self.batch, self.is_whole = samples, batch, is_whole

    def __iter__(self) -> Iterator[Any]:
        iterator, is_first = iter(self.samples), not is_of_datasets(self.samples)
        while len(rows := list(islice(iterator, self.batch))) == self.batch or (rows and not self.is_whole):
            if is_first:
                self._require_sample(rows[0])
            is_first = False
            yield find_collate(self.samples)(rows)

    def _require_sample(self, row: Any) -> None:
        """Raise `UserFileError` for what may be a batch: iterables of other kinds have batches."""
        tensors = list_tensors(row)
        if tensors and all(tensor.dim() and len(tensor) == self.batch for tensor in tensors):
            raise UserFileError(
                f"an IterableDataset has samples, of which {self.batch} make a batch, met one with {self.batch} in dim "
                f"0; nearest: DataLoader(dataset, batch_size=None) if it has batches, else batch_size={self.batch}"
            )


def open_stream(data: Iterable[Any], batch: int | None, *, is_whole: bool = True) -> Iterable[Any]:
    """Return the batches of an iterable: it has batches, or samples where it is an `IterableDataset`."""
    if is_stream(data) and (batch is not None or is_of_datasets(data)):
        return SampleStream(data, find_batch(batch, None), is_whole=is_whole)
    if isinstance(data, DataLoader):
        loader = copy(data)
        loader.collate_fn = find_collate(data.dataset, data.collate_fn)
        return loader
    return data


def make_loader(dataset: Any, sampler: Iterable[list[int]], loader: DataLoader[Any] | None) -> DataLoader[Any]:
    """Return a loader of one rank's samples, with the workers and the collation of the user's."""
    if loader is None:
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=find_collate(dataset))
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=find_collate(dataset, loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        generator=loader.generator,
    )


def _iterate_stream(
    data: Iterable[Any], *, is_own: bool, batch: int | None, rank: int, num_ranks: int, first_step: int
) -> Iterator[Any]:
    """Yield this rank's part of the batches of an iterable, from its start again where it ends."""
    expected = batch // num_ranks if batch is not None and is_own else batch
    batches = chain.from_iterable(_repeat(data))
    for item in islice(batches, first_step, None):
        if expected is not None and count_samples(item) != expected:
            raise BatchError(
                f"a batch of data() has {expected} samples, as BATCH says, met {count_samples(item)}; nearest: "
                f"BATCH = {count_samples(item) * (num_ranks if is_own else 1)}"
            )
        yield item if is_own else split_evenly(item, num_ranks, "data ranks")[rank]


def _repeat(data: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Yield an iterable again and again, until it has nothing: a generator runs once."""
    while True:
        iterator = iter(data)
        first = next(iterator, None)
        if first is None:
            return
        yield chain((first,), iterator)
