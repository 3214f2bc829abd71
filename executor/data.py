"""Bytes to train on: the documentation topics that ship with Python."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

STRIDE = 1_000_003
"""Bytes between the starts of two samples, modulo the corpus: a prime, so that samples do not repeat soon."""


@lru_cache(maxsize=1)
def corpus() -> NDArray[np.int64]:
    """Return every topic of ``pydoc_data.topics``, sorted by name, as one array of byte values."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def batch(step: int, global_batch: int, sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (tokens, targets), both ``(global_batch, sequence)``, of a step: the same for any plan."""
    text = corpus()
    starts = (step * global_batch + np.arange(global_batch)) * STRIDE % (len(text) - sequence)
    rows = text[starts[:, None] + np.arange(sequence + 1)]
    return rows[:, :-1], rows[:, 1:]


def share(
    step: int, global_batch: int, sequence: int, rank: int, sizes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the contiguous part of `batch` that data-parallel ``rank`` works on.

    Parameters
    ----------
    sizes
        Sequences of a microbatch of every rank; all run as many microbatches.
    """
    microbatches, left = divmod(global_batch, sum(sizes))
    if left:
        raise ValueError(f"sum(microbatch) = {sum(sizes)} divides global_batch({global_batch})")
    start = sum(sizes[:rank]) * microbatches
    own = slice(start, start + sizes[rank] * microbatches)
    tokens, targets = batch(step, global_batch, sequence)
    return tokens[own], targets[own]
