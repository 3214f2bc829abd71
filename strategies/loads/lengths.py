"""Lengths of samples as a histogram, and how many pairs of tokens attention computes for one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.models.attention import visible_share
from meshwise.simulator.program import IntArray

FloatArray = NDArray[np.float64]

MAX_LENGTHS = 256
"""Most different lengths of a histogram of samples: more are joined to as many groups of alike lengths."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of the lengths of samples.

    Parameters
    ----------
    lengths
        Different numbers of tokens, at least 1, rising.
    shares
        The share of the samples that have each length; they sum to 1.
    """

    lengths: tuple[int, ...]
    shares: tuple[float, ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.shares):
            raise ValueError(f"a share for every length, met {len(self.lengths)} lengths and {len(self.shares)} shares")
        if self.lengths[0] < 1 or any(np.diff(self.lengths) < 1):
            raise ValueError("lengths are at least 1 and rise")
        if min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError(f"shares are more than 0 and sum to 1, met a sum of {sum(self.shares):g}")

    @classmethod
    def from_weights(cls, weights: Iterable[tuple[int, float]]) -> "Lengths":
        """Return the histogram of pairs (length, weight): weights of equal lengths are added, and scaled to shares.

        >>> Lengths.from_weights([(8, 3), (2, 1), (8, 4)])
        Lengths(lengths=(2, 8), shares=(0.125, 0.875))
        """
        rows: dict[int, float] = {}
        for length, weight in weights:
            rows[length] = rows.get(length, 0.0) + weight
        total = sum(rows.values())
        # a share that is too small for a number beside the others is none
        shares = {length: rows[length] / total for length in sorted(rows) if rows[length] / total > 0}
        return cls(tuple(shares), tuple(shares.values()))

    @classmethod
    def from_counts(cls, counts: Mapping[int, float]) -> "Lengths":
        """Return the histogram of measured lengths with the number of samples of each.

        More than `MAX_LENGTHS` different ones are joined, in order, to groups of about as many samples each; a group
        has the mean length of its samples, rounded, so that the mean of all stays within half a token.
        """
        if len(counts) <= MAX_LENGTHS:
            return cls.from_weights(counts.items())
        lengths, weights = np.array(sorted(counts)), np.array([counts[length] for length in sorted(counts)])
        ends = np.cumsum(weights)
        groups = ((ends - weights / 2) / ends[-1] * MAX_LENGTHS).astype(np.int64)
        sums, tokens = np.bincount(groups, weights), np.bincount(groups, weights * lengths)
        is_used = sums > 0
        means = np.rint(tokens[is_used] / sums[is_used]).astype(np.int64)
        return cls.from_weights(zip(means.tolist(), sums[is_used].tolist(), strict=True))

    @property
    def rows(self) -> Iterator[tuple[int, float]]:
        """Pairs of a length and its share."""
        return zip(self.lengths, self.shares, strict=True)

    @property
    def mean(self) -> float:
        """The mean length in tokens."""
        return float(np.dot(self.lengths, self.shares))

    def cut(self, sequence: int) -> "Lengths":
        """Return the lengths of samples cut to ``sequence`` tokens, as trainers truncate longer ones."""
        return Lengths.from_weights((min(length, sequence), share) for length, share in self.rows)

    def find_share_above(self, sequence: int) -> float:
        """Return the share of the samples that are longer than ``sequence`` tokens."""
        return sum((share for length, share in self.rows if length > sequence), 0.0)

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """Return the lengths of ``count`` samples that are drawn one by one, shape [count]."""
        ends = np.cumsum(self.shares)
        ends[-1] = 1.0  # the sum of shares may lack the last bit
        drawn = np.searchsorted(ends, generator.random(count), side="right")
        return np.array(self.lengths, dtype=np.int64)[drawn]


def count_pairs(lengths: IntArray, window: int | None = None) -> FloatArray:
    """Return, for samples by length, the pairs of tokens whose scores attention has; twice those that causality leaves.

    A ``window`` is the number of tokens that one sees, as in `meshwise.simulator.models.attention.visible_share`.

    >>> count_pairs(np.array([2, 8])).tolist(), count_pairs(np.array([2, 8]), window=4).tolist()
    ([4.0, 64.0], [4.0, 48.0])
    """
    return np.array([length * length * visible_share(length, window) for length in lengths.tolist()])
