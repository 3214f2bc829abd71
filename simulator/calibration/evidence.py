"""How well a calibration holds for publishers that had no part in it, and how well publishers agree themselves."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from simulator.accelerator import Accelerator
from simulator.brief import brief
from simulator.calibration.calibrate import (
    Calibration,
    Errors,
    calibrate,
    errors,
    predicted,
    sustained_factors,
    sustained_of,
)
from simulator.calibration.kernel_noise import kernel_floors
from simulator.calibration.kernels import FusedAttention, Product, Stream
from simulator.calibration.noise import Floor
from simulator.calibration.rows import SIXTEEN_BITS, Row


@dataclass(frozen=True, slots=True)
class Held:
    """Errors on one publisher's kernels of a family.

    Parameters
    ----------
    fitted
        With its rows in the fit; ``None`` where they were left out of all.
    left_out
        With none of its rows in any fit; ``None`` where no other publisher has such kernels.
    """

    publisher: str
    family: str
    fitted: Errors | None
    left_out: Errors | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A calibration with what became of it without each publisher.

    Parameters
    ----------
    ranges
        Least and largest value of each parameter among the fits that leave one publisher out.
    floors
        How far each publisher is from each other one, beside the model without it.
    """

    name: str
    calibration: Calibration
    rows: tuple[Row, ...]
    held: tuple[Held, ...]
    ranges: Mapping[str, tuple[float, float]]
    floors: tuple[Floor, ...]

    __repr__ = brief()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Times of one publisher over those of another, on the very same kernels: no model is nearer to both.

    Parameters
    ----------
    low, median, high
        10 %, 50 % and 90 % quantiles of the ratios.
    """

    device: str
    family: str
    publishers: tuple[str, str]
    kernels: int
    low: float
    median: float
    high: float


class Devices:
    """The accelerators that rows are of, as data sheets have them."""

    def __init__(self, sheets: Mapping[str, Accelerator]) -> None:
        self.sheets = sheets

    def calibrated(self, name: str, rows: Sequence[Row]) -> Calibration:
        """Return one accelerator fitted to those of ``rows`` that are its own."""
        known = {device: (self.sheets[device], factor) for device, factor in sustained_factors(rows).items()}
        sustained = sustained_of(self.sheets[name], known, name)
        return calibrate(self.sheets[name], [row for row in rows if row.device == name], sustained)

    def evidence(self, name: str, rows: Sequence[Row], left_out: Sequence[str] = ()) -> Evidence:
        """Return one accelerator fitted to ``rows``, and its errors on each publisher with and without it.

        Parameters
        ----------
        left_out
            Publishers or sources that take part in no fit.
        """
        kept = [row for row in rows if not {row.publisher, row.source} & set(left_out)]
        own = tuple(row for row in kept if row.device == name)
        apart = [row for row in rows if row.device == name and row not in own] if left_out else []
        if not own:
            raise ValueError(f"{name} has rows that are not left out, met none")
        whole = self.calibrated(name, kept)
        fits, held, noise = [whole], _held(apart, kept, None, whole), list[Floor]()
        for publisher in sorted({row.publisher for row in own}):
            others = [row for row in kept if row.publisher != publisher]
            tested = [row for row in own if row.publisher == publisher]
            without = self.calibrated(name, others) if any(row.device == name for row in others) else None
            held += _held(tested, others, whole, without)
            noise += kernel_floors(tested, others, partial(predicted, without.device) if without else None)
            fits += [without] if without else []
        ranges = {name: _range(fit.parameters.get(name) for fit in fits) for name in whole.parameters}
        return Evidence(name, whole, own, tuple(held), ranges, tuple(noise))


def agreements(rows: Iterable[Row]) -> list[Agreement]:
    """Return how publishers agree on the kernels that more than one of them timed."""
    times: dict[tuple[str, str, object], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        times[row.device, row.family, _shape(row)][row.publisher].append(row.seconds)
    ratios: dict[tuple[str, str, tuple[str, str]], list[float]] = defaultdict(list)
    for (device, family, _), publishers in times.items():
        for one, other in combinations(sorted(publishers), 2):
            ratio = float(np.median(publishers[other]) / np.median(publishers[one]))
            ratios[device, family, (one, other)].append(ratio)
    return [
        Agreement(*key, len(found), *(float(value) for value in np.quantile(found, (0.1, 0.5, 0.9))))
        for key, found in sorted(ratios.items())
    ]


def _shape(row: Row) -> object:
    """Return what makes two publishers' kernels the same."""
    kernel = row.kernel
    if isinstance(kernel, Product):
        return kernel.matmul, "16 bits" if kernel.dtype in SIXTEEN_BITS else kernel.dtype
    if isinstance(kernel, FusedAttention):
        return kernel.shape
    return kernel.kind, kernel.traffic


def _range(values: Iterable[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    return min(known), max(known)


def _held(
    tested: Sequence[Row], others: Sequence[Row], whole: Calibration | None, without: Calibration | None
) -> list[Held]:
    families: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in tested:
        families[row.publisher, row.family].append(row)
    found = []
    for (publisher, family), rows in sorted(families.items()):
        fitted = errors(whole.device, rows) if whole else None
        known = without is not None and _known(rows[0], others)
        found.append(Held(publisher, family, fitted, errors(without.device, rows) if without and known else None))
    return found


def _known(row: Row, others: Sequence[Row]) -> bool:
    """Return whether other publishers have kernels that fix the parameters a row is predicted with."""
    own = [other.kernel for other in others if other.device == row.device]
    if isinstance(row.kernel, Stream):
        return any(isinstance(kernel, Stream) and kernel.name == row.kernel.name for kernel in own)
    return any(type(kernel) is type(row.kernel) for kernel in own)
