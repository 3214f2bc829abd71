"""What to train on, as bytes: the documentation topics that ship with Python, or text files (`executor.text`)."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

STRIDE = 1_000_003
"""Bytes between the starts of two samples, modulo the corpus: a prime, so that samples do not repeat soon."""


class Text(Protocol):
    """Samples by number, the same for any plan, and what names them."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes."""
        ...

    def rows(self, samples: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
        """Return byte values ``(samples, sequence + 1)``."""
        ...


@lru_cache(maxsize=1)
def corpus() -> NDArray[np.int64]:
    """Return every topic of ``pydoc_data.topics``, sorted by name, as one array of byte values."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


class Topics:
    """The topics of ``pydoc_data.topics``, which differ between versions of Python."""

    name = "pydoc_data.topics"

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return len(corpus())

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes."""
        return sha256(corpus().astype(np.uint8).tobytes()).hexdigest()

    def rows(self, samples: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
        """Return byte values ``(samples, sequence + 1)``."""
        text = corpus()
        starts = samples * STRIDE % (len(text) - sequence)
        rows: NDArray[np.int64] = text[starts[:, None] + np.arange(sequence + 1)]
        return rows


TOPICS = Topics()


def batch(
    step: int, global_batch: int, sequence: int, text: Text = TOPICS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (tokens, targets), both ``(global_batch, sequence)``, of a step: the same for any plan."""
    return share(step, global_batch, sequence, 0, (global_batch,), text)


def share(
    step: int, global_batch: int, sequence: int, rank: int, sizes: Sequence[int], text: Text = TOPICS
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
    start = step * global_batch + sum(sizes[:rank]) * microbatches
    rows = text.rows(start + np.arange(sizes[rank] * microbatches), sequence)
    return rows[:, :-1], rows[:, 1:]
