"""The steps of a plan under loads that vary: quantiles of their times, what they wait for, and padding."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwise.simulator.brief import brief_repr

LENGTHS, EXPERTS, DEVICES = "other ranks' longer sequences", "experts with more tokens", "slow devices"
"""What a step waits for."""


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Step times of a plan under drawn loads, in seconds and bytes.

    Parameters
    ----------
    quantile
        The quantile asked for.
    step_times
        The step time of every draw, in the order of the draws.
    num_simulated
        Draws that differ from one another.
    waiting, high_waiting
        Seconds of the median draw, and of the draw at the quantile, by what they are waited for.
    padding
        The share of the tokens of all sequences that belong to no sample; None where sequences are full.
    cut
        The share of the samples that are cut to the sequence.
    tokens_per_second
        Tokens of samples in all draws over the seconds of all.
    peak_memory
        Of the fullest device, were all microbatches as large as the largest of all draws.
    engine
        What simulated the draws.
    """

    quantile: float
    step_times: tuple[float, ...]
    num_simulated: int
    waiting: tuple[tuple[str, float], ...]
    high_waiting: tuple[tuple[str, float], ...]
    padding: float | None
    cut: float
    tokens_per_second: float
    peak_memory: float
    engine: str

    __repr__ = brief_repr("mean", "median", "high", "waiting", "padding", "peak_memory")

    @property
    def mean(self) -> float:
        """The mean step time."""
        return float(np.mean(self.step_times))

    @property
    def median(self) -> float:
        """The median step time, that of one of the draws."""
        return self.find_quantile(0.5)

    @property
    def high(self) -> float:
        """The step time at the quantile asked for."""
        return self.find_quantile(self.quantile)

    def find_quantile(self, share: float) -> float:
        """Return the step time of the draw below which a share of the draws lies, or is that itself.

        >>> LoadedStep(0.95, (3.0, 1.0, 2.0, 4.0), 4, (), (), None, 0.0, 1.0, 0.0, "").find_quantile(0.5)
        2.0
        """
        return float(np.quantile(self.step_times, share, method="inverted_cdf"))

    def to_json(self) -> dict[str, Any]:
        """Return the step times as JSON-ready data."""
        summary = {"mean": self.mean, "median": self.median, "high": self.high}
        return summary | asdict(self) | {"waiting": dict(self.waiting), "high_waiting": dict(self.high_waiting)}
