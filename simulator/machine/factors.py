"""Factors on the times of a machine, and what measured steps told about them.

A machine of which nothing but its parts is known differs from the catalogue in a few ways that a measured step can
tell: the clock that it holds, the bandwidth that kernels reach, its host, its links, and what slows all of it, such as
stragglers or input. Each is one factor on times. Fits take its logarithm, in which half as long weighs the same as
twice as long.
"""

from dataclasses import dataclass, fields
from math import hypot, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr

MAX_FACTOR = 16.0
"""Largest factor on a time, and the inverse of the smallest: a machine further off is not the one that is named."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the times of a machine: 1 for what the catalogue says, 2 for twice as long.

    Parameters
    ----------
    compute
        Arithmetic of matrix products and attention.
    memory
        Memory traffic of kernels.
    host
        Launches of kernels, by the host and on the device.
    intra_rate, intra_latency
        Bytes on links inside a node; latency and launch of these links.
    inter_rate, inter_latency
        The same for links between nodes.
    other
        The whole step, on top of these: stragglers, input, logging.
    """

    compute: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    intra_rate: float = 1.0
    intra_latency: float = 1.0
    inter_rate: float = 1.0
    inter_latency: float = 1.0
    other: float = 1.0

    def __post_init__(self) -> None:
        for name in FACTORS:
            if not 1 / MAX_FACTOR <= getattr(self, name) <= MAX_FACTOR:
                raise ValueError(f"{name} lies in [1/{MAX_FACTOR:g}, {MAX_FACTOR:g}], met {getattr(self, name)}")

    @property
    def logarithms(self) -> NDArray[np.float64]:
        """Natural logarithms in the order of `FACTORS`, shape [factors]."""
        return np.array([log(getattr(self, name)) for name in FACTORS])

    @classmethod
    def from_logarithms(cls, logarithms: NDArray[np.float64]) -> "Factors":
        """Return the factors of natural logarithms in the order of `FACTORS`, kept within `MAX_FACTOR`.

        >>> Factors.from_logarithms(np.array([-99.0] + [0.0] * 7)).compute
        0.0625
        """
        return cls(*np.clip(np.exp(logarithms), 1 / MAX_FACTOR, MAX_FACTOR).tolist())


FACTORS = tuple(field.name for field in fields(Factors))
"""Names of the factors, in the order of vectors and matrices."""


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """What measured steps told about a machine whose figures have the factors already.

    Parameters
    ----------
    date
        Day of the fit, as ``2026-11-28``.
    runs
        Number of plans that were measured.
    residual
        Standard deviation of ln(measured / predicted) of a run about its prediction, were the factors known exactly.
    spread
        Standard deviation of ln(predicted) that is left because they are not.
    factors, deviations
        The factors on times by name, and the standard deviations of their logarithms.
    """

    date: str
    runs: int
    residual: float
    spread: float
    factors: tuple[tuple[str, float], ...]
    deviations: tuple[tuple[str, float], ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if min(self.residual, self.spread) < 0 or self.runs < 1:
            raise ValueError(f"a calibration has runs >= 1, residual >= 0 and spread >= 0, met {self}")
        Factors(**dict(self.factors))

    def find_half_width(self, coverage: float) -> float:
        """Return the half width, in natural logarithms, of the interval that holds a fraction of measured step times.

        With a residual of 0.03 and a spread of 0.04 the deviation is 0.05, and 90 % of a normal distribution lie
        within 1.645 deviations:

        >>> round(RunCalibration("2026-11-28", 3, 0.03, 0.04, (), ()).find_half_width(0.9), 5)
        0.08224
        """
        return hypot(self.residual, self.spread) * NormalDist().inv_cdf((1 + coverage) / 2)
