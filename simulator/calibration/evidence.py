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

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.accelerator_fits import (
    Calibration,
    Errors,
    calibrate,
    find_sustained_factors,
    measure_errors,
    nearest_sustained,
    predict_seconds,
)
from meshwise.simulator.calibration.kernel_rows import SIXTEEN_BITS, Row, Skipped
from meshwise.simulator.calibration.kernels import FusedAttention, Product, Stream
from meshwise.simulator.calibration.noise import NoiseFloor, PublisherTimes, Sizes, TimedWork, measure_floors
from meshwise.simulator.machine.accelerator import Accelerator


def kernel_floors(
    tested: Sequence[Row], other_rows: Iterable[Row], predicted: Callable[[Row], float] | None = None
) -> list[NoiseFloor]:
    """Return the distances of one publisher's rows of an accelerator from each other publisher's and from its own.

    Parameters
    ----------
    tested
        The publisher's rows, at least one, all of one accelerator.
    predicted
        Returns the seconds that the model fitted without the publisher predicts for a row.
    """
    first_row = tested[0]
    publishers: dict[str, list[Row]] = defaultdict(list)
    for row in other_rows:
        if row.device == first_row.device and row.publisher != first_row.publisher:
            publishers[row.publisher].append(row)
    times = {
        publisher: PublisherTimes((*comparison_key(row), row.seconds) for row in rows)
        for publisher, rows in sorted(publishers.items())
    }
    work = [
        TimedWork(
            row.device, kernel_group(row), *comparison_key(row), row.seconds, predicted(row) if predicted else None
        )
        for row in sorted(tested, key=kernel_group)
    ]
    return measure_floors(first_row.publisher, work, times)


def kernel_group(row: Row) -> str:
    """Return the group under which a row's kernel is reported."""
    kernel = row.kernel
    if isinstance(kernel, FusedAttention):
        return "attention"
    if not isinstance(kernel, Product):
        return "memory-bound"
    if kernel.grouped:
        return "experts"
    return "products" if kernel.dtype in SIXTEEN_BITS else f"products {kernel.dtype}"


def comparison_key(row: Row) -> tuple[Hashable, Sizes]:
    """Return the properties that must be equal to compare two rows, and the sizes that can be interpolated."""
    kernel = row.kernel
    if isinstance(kernel, Product):
        dtype = "16 bits" if kernel.dtype in SIXTEEN_BITS else kernel.dtype
        product = kernel.matmul
        return (kernel.grouped, kernel.gradient, dtype), (product.count, product.m, product.n, product.k)
    if isinstance(kernel, FusedAttention):
        shape = kernel.shape
        mask = shape.mean_keys / shape.keys
        return (kernel.passes, mask, shape.queries / shape.keys), (
            shape.heads,
            shape.keys,
            shape.width,
            shape.padded_width,
        )
    return (kernel.name, row.bandwidth), (kernel.traffic,)


@dataclass(frozen=True, slots=True)
class HoldOut:
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
    fitted_errors: Errors | None
    left_out_errors: Errors | None


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
    hold_outs: tuple[HoldOut, ...]
    ranges: Mapping[str, tuple[float, float]]
    floors: tuple[NoiseFloor, ...]

    __repr__ = brief_repr()


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


class DataSheets:
    """The accelerators of rows, with the figures of their data sheets."""

    def __init__(self, sheets: Mapping[str, Accelerator]) -> None:
        self.sheets = sheets

    def calibrate(self, name: str, rows: Sequence[Row]) -> Calibration:
        """Return one accelerator fitted to its rows among ``rows``."""
        factors = {device: (self.sheets[device], factor) for device, factor in find_sustained_factors(rows).items()}
        sustained = nearest_sustained(self.sheets[name], factors, name)
        return calibrate(self.sheets[name], [row for row in rows if row.device == name], sustained)

    def gather_evidence(self, name: str, rows: Sequence[Row], excluded: Sequence[str] = ()) -> Evidence:
        """Return one accelerator fitted to ``rows``, with its errors on each publisher, in the fit and left out.

        Parameters
        ----------
        excluded
            Publishers or sources that take part in no fit.
        """
        included = [row for row in rows if not {row.publisher, row.source} & set(excluded)]
        device_rows = tuple(row for row in included if row.device == name)
        # rows excluded on the command line are predicted too, by the fit to all others
        excluded_rows = [row for row in rows if row.device == name and row not in device_rows] if excluded else []
        if not device_rows:
            raise ValueError(f"{name} has rows that are not left out, met none")
        whole_fit = self.calibrate(name, included)
        fits, hold_outs, noise_floors = (
            [whole_fit],
            _hold_out(excluded_rows, included, None, whole_fit),
            list[NoiseFloor](),
        )
        for publisher in sorted({row.publisher for row in device_rows}):
            other_rows = [row for row in included if row.publisher != publisher]
            publisher_rows = [row for row in device_rows if row.publisher == publisher]
            partial_fit = self.calibrate(name, other_rows) if any(row.device == name for row in other_rows) else None
            hold_outs += _hold_out(publisher_rows, other_rows, whole_fit, partial_fit)
            noise_floors += kernel_floors(
                publisher_rows, other_rows, partial(predict_seconds, partial_fit.device) if partial_fit else None
            )
            fits += [partial_fit] if partial_fit else []
        ranges = {name: _value_range(fit.parameters.get(name) for fit in fits) for name in whole_fit.parameters}
        return Evidence(name, whole_fit, device_rows, tuple(hold_outs), ranges, tuple(noise_floors))


def find_agreements(rows: Iterable[Row]) -> list[Agreement]:
    """Return the agreement of publishers on kernels that more than one of them timed."""
    times: dict[tuple[str, str, object], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        times[row.device, row.family, _kernel_shape(row)][row.publisher].append(row.seconds)
    ratios: dict[tuple[str, str, tuple[str, str]], list[float]] = defaultdict(list)
    for (device, family, _), publishers in times.items():
        for publisher, other_publisher in combinations(sorted(publishers), 2):
            ratio = float(np.median(publishers[other_publisher]) / np.median(publishers[publisher]))
            ratios[device, family, (publisher, other_publisher)].append(ratio)
    return [
        Agreement(*key, len(values), *(float(value) for value in np.quantile(values, (0.1, 0.5, 0.9))))
        for key, values in sorted(ratios.items())
    ]


def _kernel_shape(row: Row) -> object:
    """Return the key under which kernels of two publishers count as the same."""
    kernel = row.kernel
    if isinstance(kernel, Product):
        return kernel.matmul, "16 bits" if kernel.dtype in SIXTEEN_BITS else kernel.dtype
    if isinstance(kernel, FusedAttention):
        return kernel.shape
    return kernel.kind, kernel.traffic


def _value_range(values: Iterable[float | None]) -> tuple[float, float]:
    values_known = [value for value in values if value is not None]
    return min(values_known), max(values_known)


def _hold_out(
    publisher_rows: Sequence[Row],
    other_rows: Sequence[Row],
    whole_fit: Calibration | None,
    partial_fit: Calibration | None,
) -> list[HoldOut]:
    families: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in publisher_rows:
        families[row.publisher, row.family].append(row)
    hold_outs = []
    for (publisher, family), rows in sorted(families.items()):
        fitted_errors = measure_errors(whole_fit.device, rows) if whole_fit else None
        is_known = partial_fit is not None and _is_known(rows[0], other_rows)
        hold_outs.append(
            HoldOut(
                publisher,
                family,
                fitted_errors,
                measure_errors(partial_fit.device, rows) if partial_fit and is_known else None,
            )
        )
    return hold_outs


def _is_known(row: Row, other_rows: Sequence[Row]) -> bool:
    """Return whether rows of other publishers determine the parameters that predict a row."""
    device_kernels = [other_row.kernel for other_row in other_rows if other_row.device == row.device]
    if isinstance(row.kernel, Stream):
        return any(isinstance(kernel, Stream) and kernel.name == row.kernel.name for kernel in device_kernels)
    return any(type(kernel) is type(row.kernel) for kernel in device_kernels)


Data = dict[str, Any]
DIGITS = 4


def to_document(evidence: Evidence, skipped: Sequence[Skipped], date: str) -> Data:
    """Return a calibration as JSON-ready data.

    ``figures`` and ``source`` are what the catalogue takes; the rest says where they come from: ``rows`` used and
    skipped by source, ``ranges`` of the parameters among fits that leave a publisher out, and ``errors``.
    """
    calibration = evidence.calibration
    return {
        "accelerator": evidence.name,
        "date": date,
        "source": _source_text(evidence),
        "figures": _figure_document(calibration.device, calibration.kinds),
        "sustained": {key: _round(value) for key, value in asdict(calibration.sustained).items()},
        "ranges": {name: [_round(low), _round(high)] for name, (low, high) in evidence.ranges.items()},
        "rows": _row_counts(evidence.rows, [row for row in skipped if row.device == evidence.name]),
        "errors": [
            {
                "publisher": hold_out.publisher,
                "family": hold_out.family,
                **({"fitted": _error_document(hold_out.fitted_errors)} if hold_out.fitted_errors else {}),
                **({"left_out": _error_document(hold_out.left_out_errors)} if hold_out.left_out_errors else {}),
            }
            for hold_out in evidence.hold_outs
        ],
    }


def _source_text(evidence: Evidence) -> str:
    publishers = Counter(row.publisher for row in evidence.rows)
    publisher_text = ", ".join(f"{publisher} {count}" for publisher, count in publishers.most_common())
    sustained = evidence.calibration.sustained
    pairs = f"{sustained.pairs} shapes timed both ways" if sustained.pairs else "the nearest accelerator's"
    return f"fit to published kernel timings ({publisher_text}); sustained over burst time from {pairs}"


def _figure_document(device: Accelerator, kinds: Mapping[str, float]) -> Data:
    matmul, attention = device.matmul, device.attention
    rates = ("fraction", "half_k", "edge", "units", "waves", "sharpness", "data_gradient", "weight_gradient", "batched")
    ramps = ("forward", "backward", "half_sequence", "half_head", "tail", "backward_tail", "block")
    kernel_bandwidth = {"matmul": dict(device.kernel_bandwidth)["matmul"], **kinds}
    return {
        "launch": _format_time(device.launch),
        "matmul": {
            **{name: _round(getattr(matmul, name)) for name in rates},
            "tiles": [list(tile) for tile in matmul.tiles],
            "product_launch": _format_time(matmul.product_launch),
            "fractions": {dtype: _round(share) for dtype, share in matmul.fractions},
        },
        "attention": {
            **{name: _round(getattr(attention, name)) for name in ramps},
            "launch": _format_time(attention.launch),
        },
        "sustained": _round(device.sustained),
        "kernel_bandwidth": {kind: _round(share) for kind, share in kernel_bandwidth.items()},
    }


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e6:.{DIGITS}g} us"


def _round(value: float) -> float:
    return value if isinstance(value, int) or not isfinite(value) else float(f"{value:.{DIGITS}g}")


def _error_document(error_summary: Errors) -> Data:
    return {name: _round(value) for name, value in asdict(error_summary).items()}


def _row_counts(rows: Iterable[Row], skipped: Iterable[Skipped]) -> Data:
    used_counts = Counter(row.source for row in rows)
    reasons: dict[str, Counter[str]] = {}
    for row in skipped:
        reasons.setdefault(row.source, Counter())[row.reason] += 1
    return {
        source: {"used": used_counts[source], "skipped": dict(sorted(reasons.get(source, Counter()).items()))}
        for source in sorted(used_counts.keys() | reasons.keys())
    }
