"""Errors of a calibration on publishers that were left out of the fit, and disagreement among publishers.

The result is written as the JSON file that the catalogue reads; `meshwise.scenarios.calibration` prints it as tables.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from math import isfinite
from typing import Any

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.calibration.accelerator_fits import (
    Calibration,
    Errors,
    calibrate,
    errors,
    predicted,
    sustained_factors,
    sustained_of,
)
from meshwise.simulator.calibration.kernel_rows import SIXTEEN_BITS, Row, Skipped
from meshwise.simulator.calibration.kernels import FusedAttention, Product, Stream
from meshwise.simulator.calibration.noise import ITSELF, Compared, Floor, Sizes, Times, floor, repeats
from meshwise.simulator.machine.accelerator import Accelerator


def kernel_floors(
    left_out: Sequence[Row], others: Iterable[Row], predicted: Callable[[Row], float] | None = None
) -> list[Floor]:
    """Return the distances of one publisher's rows of an accelerator from each other publisher's and from its own.

    Parameters
    ----------
    tested
        The publisher's rows, at least one, all of one accelerator.
    predicted
        Returns the seconds that the model fitted without the publisher predicts for a row.
    """
    first = left_out[0]
    publishers: dict[str, list[Row]] = defaultdict(list)
    for row in others:
        if row.device == first.device and row.publisher != first.publisher:
            publishers[row.publisher].append(row)
    found = []
    for other, rows in sorted(publishers.items()):
        times = Times((*what(row), row.seconds) for row in rows)
        groups: dict[str, list[Compared]] = defaultdict(list)
        for row in left_out:
            compared = times.compared(*what(row), row.seconds, predicted(row) if predicted else None)
            if compared is not None:
                groups[group(row)].append(compared)
        found += [floor(first.device, name, first.publisher, other, each) for name, each in sorted(groups.items())]
    return found + _own(left_out)


def _own(rows: Sequence[Row]) -> list[Floor]:
    """Return the distances of a publisher from itself, where it timed a kernel more than once."""
    groups: dict[str, list[tuple[Hashable, Sizes, float]]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append((*what(row), row.seconds))
    several = {name: repeats(each) for name, each in sorted(groups.items())}
    first = rows[0]
    return [floor(first.device, name, first.publisher, ITSELF, each) for name, each in several.items() if each]


def group(row: Row) -> str:
    """Return the group under which a row's kernel is reported."""
    kernel = row.kernel
    if isinstance(kernel, FusedAttention):
        return "attention"
    if not isinstance(kernel, Product):
        return "memory-bound"
    if kernel.grouped:
        return "experts"
    return "products" if kernel.dtype in SIXTEEN_BITS else f"products {kernel.dtype}"


def what(row: Row) -> tuple[Hashable, Sizes]:
    """Return the properties that must be equal to compare two rows, and the sizes that can be interpolated."""
    kernel = row.kernel
    if isinstance(kernel, Product):
        dtype = "16 bits" if kernel.dtype in SIXTEEN_BITS else kernel.dtype
        product = kernel.matmul
        return (kernel.grouped, kernel.gradient, dtype), (product.count, product.m, product.n, product.k)
    if isinstance(kernel, FusedAttention):
        shape = kernel.shape
        mask = shape.seen / shape.keys
        return (kernel.passes, mask, shape.queries / shape.keys), (shape.heads, shape.keys, shape.width, shape.padded)
    return (kernel.name, row.bandwidth), (kernel.traffic,)


@dataclass(frozen=True, slots=True)
class Held:
    """Errors on one publisher's kernels of a family.

    Parameters
    ----------
    fitted_errors
        With its rows in the fit; ``None`` where they take part in no fit.
    left_out_errors
        With its rows left out; ``None`` where no other publisher has such kernels.
    """

    publisher: str
    family: str
    fitted: Errors | None
    left_out: Errors | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A calibration with its errors on each publisher, with and without that publisher in the fit.

    Parameters
    ----------
    ranges
        Smallest and largest value of each parameter among the fits that leave one publisher out.
    floors
        Distances of each publisher from every other, beside the error of the model without it.
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
    """Ratios of one publisher's times to another's on the same kernels; no model can be closer to both.

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
    """The accelerators of rows, with the figures of their data sheets."""

    def __init__(self, sheets: Mapping[str, Accelerator]) -> None:
        self.sheets = sheets

    def calibrated(self, name: str, rows: Sequence[Row]) -> Calibration:
        """Return one accelerator fitted to its rows among ``rows``."""
        known = {device: (self.sheets[device], factor) for device, factor in sustained_factors(rows).items()}
        sustained = sustained_of(self.sheets[name], known, name)
        return calibrate(self.sheets[name], [row for row in rows if row.device == name], sustained)

    def evidence(self, name: str, rows: Sequence[Row], left_out: Sequence[str] = ()) -> Evidence:
        """Return one accelerator fitted to ``rows``, with its errors on each publisher, in the fit and left out.

        Parameters
        ----------
        excluded
            Publishers or sources that take part in no fit.
        """
        kept = [row for row in rows if not {row.publisher, row.source} & set(left_out)]
        own = tuple(row for row in kept if row.device == name)
        # rows excluded on the command line are predicted too, by the fit to all others
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
    """Return the agreement of publishers on kernels that more than one of them timed."""
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
    """Return the key under which kernels of two publishers count as the same."""
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
    """Return whether rows of other publishers determine the parameters that predict a row."""
    own = [other.kernel for other in others if other.device == row.device]
    if isinstance(row.kernel, Stream):
        return any(isinstance(kernel, Stream) and kernel.name == row.kernel.name for kernel in own)
    return any(type(kernel) is type(row.kernel) for kernel in own)


Data = dict[str, Any]
DIGITS = 4


def to_document(found: Evidence, skipped: Sequence[Skipped], date: str) -> Data:
    """Return a calibration as JSON-ready data.

    ``figures`` and ``source`` are what the catalogue takes; the rest says where they come from: ``rows`` used and
    skipped by source, ``ranges`` of the parameters among fits that leave a publisher out, and ``errors``.
    """
    calibration = found.calibration
    return {
        "accelerator": found.name,
        "date": date,
        "source": _source(found),
        "figures": _figures(calibration.device, calibration.kinds),
        "sustained": {key: _round(value) for key, value in asdict(calibration.sustained).items()},
        "ranges": {name: [_round(low), _round(high)] for name, (low, high) in found.ranges.items()},
        "rows": _used(found.rows, [row for row in skipped if row.device == found.name]),
        "errors": [
            {
                "publisher": held.publisher,
                "family": held.family,
                **({"fitted": _errors(held.fitted)} if held.fitted else {}),
                **({"left_out": _errors(held.left_out)} if held.left_out else {}),
            }
            for held in found.held
        ],
    }


def _source(found: Evidence) -> str:
    publishers = Counter(row.publisher for row in found.rows)
    named = ", ".join(f"{publisher} {count}" for publisher, count in publishers.most_common())
    sustained = found.calibration.sustained
    pairs = f"{sustained.pairs} shapes timed both ways" if sustained.pairs else "the nearest accelerator's"
    return f"fit to published kernel timings ({named}); sustained over burst time from {pairs}"


def _figures(device: Accelerator, kinds: Mapping[str, float]) -> Data:
    matmul, attention = device.matmul, device.attention
    rates = ("fraction", "half_k", "edge", "units", "waves", "sharpness", "data_gradient", "weight_gradient", "batched")
    ramps = ("forward", "backward", "half_sequence", "half_head", "tail", "backward_tail", "block")
    kernel_bandwidth = {"matmul": dict(device.kernel_bandwidth)["matmul"], **kinds}
    return {
        "launch": _time(device.launch),
        "matmul": {
            **{name: _round(getattr(matmul, name)) for name in rates},
            "tiles": [list(tile) for tile in matmul.tiles],
            "product_launch": _time(matmul.product_launch),
            "fractions": {dtype: _round(share) for dtype, share in matmul.fractions},
        },
        "attention": {
            **{name: _round(getattr(attention, name)) for name in ramps},
            "launch": _time(attention.launch),
        },
        "sustained": _round(device.sustained),
        "kernel_bandwidth": {kind: _round(share) for kind, share in kernel_bandwidth.items()},
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.{DIGITS}g} us"


def _round(value: float) -> float:
    return value if isinstance(value, int) or not isfinite(value) else float(f"{value:.{DIGITS}g}")


def _errors(found: Errors) -> Data:
    return {name: _round(value) for name, value in asdict(found).items()}


def _used(rows: Iterable[Row], skipped: Iterable[Skipped]) -> Data:
    used = Counter(row.source for row in rows)
    reasons: dict[str, Counter[str]] = {}
    for row in skipped:
        reasons.setdefault(row.source, Counter())[row.reason] += 1
    return {
        source: {"used": used[source], "skipped": dict(sorted(reasons.get(source, Counter()).items()))}
        for source in sorted(used.keys() | reasons.keys())
    }
