"""The actions of one pipeline rank as rows of numbers, and how long they take."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
"""The actions of one pipeline rank as rows: stage, number of the kind, microbatch."""

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Numbers of the kinds: a forward; gradients of inputs and weights together, of inputs only, of weights only."""


class PassTimes(NamedTuple):
    """Seconds of one microbatch in one stage: forward, gradients of inputs, gradients of weights."""

    forward: float
    input: float
    weight: float

    @property
    def backward(self) -> float:
        """Seconds of a backward that is not split."""
        return self.input + self.weight

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


Columns = tuple[Order, Order]
"""Stages and microbatches of all actions of one kind, in their order."""


def merged(kinds: Order, columns: dict[int, Columns]) -> Order:
    """Return rows in the order of ``kinds``, each kind's stages and microbatches in turn.

    >>> first = np.array([0, 0]), np.array([0, 1])
    >>> merged(np.array([FORWARD, BACKWARD, FORWARD, BACKWARD]), {FORWARD: first, BACKWARD: first}).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    """
    rows = np.stack([kinds, kinds, kinds], axis=1)
    for kind, (stages, microbatches) in columns.items():
        here = kinds == kind
        rows[here, 0], rows[here, 2] = stages, microbatches
    return rows


def in_turn(stage: int, microbatches: int) -> Columns:
    """Return the columns of a stage that takes the microbatches as they come."""
    return np.full(microbatches, stage), np.arange(microbatches)


def rounds(rank: int, ranks: int, chunks: int, size: int, microbatches: int) -> tuple[Columns, Columns]:
    """Return the columns of forwards and of backwards that take ``size`` microbatches through each chunk in turn.

    Forwards visit the chunks of a looped placement from the first to the last, backwards from the last to the first.
    """
    turn = np.arange(microbatches * chunks)
    chunk, microbatch = turn // size % chunks, turn // (size * chunks) * size + turn % size
    return (chunk * ranks + rank, microbatch), ((chunks - 1 - chunk) * ranks + rank, microbatch)
