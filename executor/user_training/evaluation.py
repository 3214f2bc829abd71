"""The batches of an evaluation: every sample once, in order, each rank its own, the last batch of an uneven size."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from meshwise.executor.modules.batches import count_samples, select_part, select_samples
from meshwise.executor.modules.evaluation import EvaluationBatch
from meshwise.executor.user_training.data import (
    find_batch,
    has_samples,
    make_loader,
    open_stream,
    require_known_sampler,
)
from meshwise.executor.user_training.user_file import UserFileError


def list_parts(num_samples: int, batch: int, rank: int, num_ranks: int) -> list[tuple[list[int], bool]]:
    """Return the samples of a rank in every batch, and whether they are counted.

    A rank without samples in the last batch takes the first one of the batch, uncounted.

    >>> list_parts(5, 4, 1, 2)
    [([2, 3], True), ([4], True)]
    >>> list_parts(5, 4, 0, 2)
    [([0, 1], True), ([4], False)]
    """
    parts = []
    for first in range(0, num_samples, batch):
        size = min(batch, num_samples - first)
        start, end = first + size * rank // num_ranks, first + size * (rank + 1) // num_ranks
        parts.append((list(range(start, end)), True) if end > start else ([first], False))
    return parts


def iterate_evaluation(
    data: Any, *, is_own: bool, batch: int | None, rank: int, num_ranks: int
) -> Iterator[EvaluationBatch]:
    """Yield the batches of this rank.

    Parameters
    ----------
    data
        A dataset with a length, a `DataLoader`, or an iterable of batches that ends.
    is_own
        Whether they are this rank's alone.
    batch
        Samples of a batch on all ranks; ``None`` for those of the loader.

    Raises
    ------
    UserFileError
        Where ``data`` is none of these, or says no size of batches.
    """
    loader = data if isinstance(data, DataLoader) else None
    dataset = data.dataset if loader is not None else data
    if has_samples(dataset) and hasattr(dataset, "__len__"):
        if loader is not None:
            require_known_sampler(loader)
        size = find_batch(batch, None if loader is None else getattr(loader.batch_sampler, "batch_size", None))
        num_samples = len(dataset) // size * size if loader is not None and loader.drop_last else len(dataset)
        if is_own:  # the user has divided the samples himself
            size, rank, num_ranks = max(size // num_ranks, 1), 0, 1
        parts = list_parts(num_samples, size, rank, num_ranks)
        batches = make_loader(dataset, [numbers for numbers, _ in parts], loader)
        for item, (_, is_counted) in zip(batches, parts, strict=True):
            yield EvaluationBatch(item, is_counted)
        return
    if not isinstance(data, Iterable):
        rule = "evaluation_data() returns a dataset, a DataLoader or an iterable"
        raise UserFileError(f"{rule}, met {type(data).__name__}")
    own_batch = max(batch // num_ranks, 1) if batch is not None and is_own else batch
    for item in open_stream(data, own_batch, is_whole=False):
        part = item if is_own else select_part(item, rank, num_ranks)
        is_counted = count_samples(part) > 0
        yield EvaluationBatch(part if is_counted else select_samples(item, 0, 1), is_counted)
