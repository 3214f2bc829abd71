"""Samples packed into sequences of one length, in which no token attends to another sample.

Packing takes samples by falling length and puts each into the first sequence that has room for it (first-fit
decreasing). It needs at most 11/9 of the least number of sequences, and 6/9 of one more [1]_. Packing lengths by
histogram, for language models, is that of [2]_.

References
----------
.. [1] Dosa 2007, "The tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9".
.. [2] Krell et al. 2021, "Efficient sequence packing without cross-contamination" (arXiv 2107.02027), section 3.
"""

from math import ceil
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.loads.lengths import FloatArray, count_pairs


class Sequences(NamedTuple):
    """Sequences that ranks compute: their tokens of samples, and the pairs of tokens that attention computes."""

    tokens: IntArray
    pairs: FloatArray


def pack_first_fit(lengths: IntArray, sequence: int, window: int | None = None) -> Sequences:
    """Return the sequences of ``sequence`` tokens into which samples go by first-fit decreasing.

    Samples of one length are placed together: they fill what is left of one sequence after another.

    Parameters
    ----------
    lengths
        Tokens of each sample, at most ``sequence``.
    window
        Tokens that one sees; None for all of its sample before it.

    >>> pack_first_fit(np.array([3, 5, 2, 4, 2]), 8).tokens.tolist()
    [8, 8]
    """
    values, counts = np.unique(lengths, return_counts=True)
    tokens, pairs = np.zeros(0, dtype=np.int64), np.zeros(0)
    for length, count, own_pairs in zip(
        values[::-1].tolist(), counts[::-1].tolist(), count_pairs(values, window)[::-1].tolist(), strict=True
    ):
        places = (sequence - tokens) // length
        placed = np.clip(count - (np.cumsum(places) - places), 0, places)
        num_left, most = count - int(placed.sum()), sequence // length
        new_placed = np.full(ceil(num_left / most), most)
        new_placed[-1:] -= most * len(new_placed) - num_left
        placed = np.concatenate([placed, new_placed])
        tokens, pairs = (np.concatenate([column, np.zeros(len(new_placed))]) for column in (tokens, pairs))
        tokens, pairs = tokens.astype(np.int64) + placed * length, pairs + placed * own_pairs
    return Sequences(tokens, pairs)


def fill_sequences(lengths: IntArray, sequence: int, count: int, window: int | None = None) -> Sequences:
    """Return ``count`` packed sequences of as many of the first samples as go into them.

    ``lengths`` are those of a stream of samples, longer than a step needs. Where the last sample that still goes in
    leaves a sequence empty, that one has padding alone.
    """
    # with `least` samples the step is not full yet, or just so; samples of more tokens than all sequences never go in
    least, most = 0, int(np.searchsorted(np.cumsum(lengths), count * sequence, side="right"))
    while least < most:
        middle = (least + most + 1) // 2
        if len(pack_first_fit(lengths[:middle], sequence).tokens) <= count:
            least = middle
        else:
            most = middle - 1
    packed = pack_first_fit(lengths[:least], sequence, window)
    num_empty = count - len(packed.tokens)
    return Sequences(*(np.concatenate([column, np.zeros(num_empty, column.dtype)]) for column in packed))
