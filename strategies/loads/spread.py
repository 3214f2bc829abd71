"""How a load differs from step to step: as a lognormal distribution, or as measured values."""

from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import Protocol

import numpy as np

from meshwise.simulator.brief import brief_repr


class Spread(Protocol):
    """The distribution of one number."""

    def find_quantile(self, share: float) -> float:
        """Return the value below which a share of the values lies, a share between 0 and 1."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A lognormal distribution, whose logarithm is normal, by its median and its 95 % quantile.

    The standard deviation of the logarithm is ln(p95 / median) over the 95 % quantile of the normal distribution,
    1.645.

    >>> spread = LogNormal(1.2, 1.8)
    >>> round(spread.find_quantile(0.5), 6), round(spread.find_quantile(0.95), 6)
    (1.2, 1.8)
    """

    median: float
    p95: float

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p95:
            raise ValueError(f"p95 is at least median({self.median:g}), met {self.p95:g}; nearest: {self.median:g}")

    def find_quantile(self, share: float) -> float:
        """Return the value below which a share of the values lies."""
        deviation = log(self.p95 / self.median) / NormalDist().inv_cdf(0.95)
        return self.median * exp(deviation * NormalDist().inv_cdf(share))


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured values, each as likely as another.

    >>> [Measured((3.0, 1.0, 2.0)).find_quantile(share) for share in (0.1, 0.5, 0.9)]
    [1.0, 2.0, 3.0]
    """

    values: tuple[float, ...]

    __repr__ = brief_repr()

    def find_quantile(self, share: float) -> float:
        """Return the value below which a share of the values lies."""
        return sorted(self.values)[min(int(share * len(self.values)), len(self.values) - 1)]


def draw_spread(spread: Spread, generator: np.random.Generator, count: int) -> list[float]:
    """Return ``count`` values of a spread in random order: one from the middle of each of ``count`` equal shares.

    So few values have the quantiles of the spread (stratified sampling; McKay, Beckman and Conover 1979).
    """
    return [spread.find_quantile((place + 0.5) / count) for place in generator.permutation(count).tolist()]
