"""Fits of an accelerator to rows of measured kernels: memory-bound kernels, then products, then attention."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.kernel_rows import HOST_TIMED_PUBLISHERS, RUNS_IN_A_ROW, SIXTEEN_BITS, Row
from meshwise.simulator.calibration.kernels import FusedAttention, Product, Stream
from meshwise.simulator.calibration.least_squares import fit_parameters
from meshwise.simulator.calibration.parameters import (
    Apply,
    Parameter,
    Values,
    attention_parameters,
    exponential_head_dim,
    fraction_parameter,
    has_waves,
    matmul_parameters,
    sustained_parameter,
    with_attention,
    with_matmul,
)
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.kernels import Matmul

FULL_WEIGHT = 50
"""A publisher with at least this many rows weighs as much as any other."""

HOST_TIMED_WEIGHT = 0.1
"""Weight of a row that was timed from the host: publishers of both kinds differ by 1.3 on the same shapes."""

MAX_FITTED_ROWS = 300
"""Most rows of a publisher and family that take part in a fit; errors are those of all rows."""

COMPUTE_BOUND = 1e11
"""FLOP of a product above which only clocks, not libraries or launches, make sustained work slower than a burst.

Above it publishers agree (A100: factors 1.11 and 1.13); above 1e10 they do not (1.12 and 1.04).
"""


@dataclass(frozen=True, slots=True)
class Sustained:
    """Ratio of the time in sustained work to the time in a short burst, on the same shapes.

    Parameters
    ----------
    low, high
        10 % and 90 % quantiles of the shapes' ratios.
    pairs
        Number of shapes that were timed both ways; 0 where the factor is another accelerator's.
    """

    factor: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """An accelerator fitted to its rows.

    Parameters
    ----------
    parameters
        Every fitted value by name.
    kinds
        Fitted fractions of the memory bandwidth, by kind of memory-bound kernel.
    """

    device: Accelerator
    parameters: Mapping[str, float]
    kinds: Mapping[str, float]
    sustained: Sustained

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted times: mean, median and 90 % quantile of their size, and their median as bias."""

    rows: int
    median: float
    mean: float
    high: float
    bias: float


def calibrate(device: Accelerator, rows: Sequence[Row], sustained: Sustained) -> Calibration:
    """Return ``device`` with parameters fitted to ``rows``, all of which are of this device.

    Rows of publishers that time sustained work are predicted with ``sustained``, the others without it, so that
    the parameters are those of a burst. Where no shape was timed both ways, but some shapes each way, the factor is
    one more parameter of the fit, which starts at ``sustained``.
    """
    # in this order: products are predicted with fitted bandwidths, and attention is relative to fitted products
    kinds = _fit_bandwidths(device, rows)
    bandwidths = dict(device.kernel_bandwidth) | kinds
    device = replace(device, sustained=sustained.factor, kernel_bandwidth=tuple(bandwidths.items()))
    products = [row for row in rows if isinstance(row.kernel, Product)]
    sixteen_bit = [row for row in products if _dtype(row) in SIXTEEN_BITS]
    parameters = matmul_parameters(waves=has_waves(device))
    if not sustained.pairs and len({row.burst for row in sixteen_bit}) == 2:
        parameters += (sustained_parameter(sustained.factor),)
    values = _fit_parameters(device, sixteen_bit, parameters, with_matmul)
    sustained = replace(sustained, factor=values.get("sustained", sustained.factor))

    def with_fraction(device: Accelerator, fraction: Values) -> Accelerator:
        return with_matmul(device, {**values, **fraction})

    for dtype in sorted({_dtype(row) for row in products} - set(SIXTEEN_BITS)):
        dtype_rows = [row for row in products if _dtype(row) == dtype]
        values |= _fit_parameters(device, dtype_rows, (fraction_parameter(dtype),), with_fraction)
    device = with_matmul(device, values)
    attention_rows = [row for row in rows if isinstance(row.kernel, FusedAttention)]
    parameters_of_attention = attention_parameters(device.matmul.fraction, exponential_head_dim(device))
    attention = _fit_parameters(device, attention_rows, parameters_of_attention, with_attention)
    return Calibration(with_attention(device, attention), values | attention, kinds, sustained)


def predict_seconds(device: Accelerator, row: Row) -> float:
    """Return the predicted seconds of a row's kernel, on the variant of ``device`` that was measured."""
    return row.kernel.seconds(_measured_variant(device, row))


def measure_errors(device: Accelerator, rows: Iterable[Row]) -> Errors | None:
    """Return the errors of ``device`` on ``rows``; ``None`` where there are none."""
    deviations = np.array([predict_seconds(device, row) / row.seconds - 1.0 for row in rows])
    if not len(deviations):
        return None
    size = np.abs(deviations)
    spread = float(np.median(size)), float(size.mean()), float(np.quantile(size, 0.9))
    return Errors(len(deviations), *spread, float(np.median(deviations)))


def find_sustained_factors(rows: Iterable[Row]) -> dict[str, Sustained]:
    """Return by accelerator the factor of sustained work, from products whose shape was timed both ways."""
    times: dict[tuple[str, Matmul], tuple[list[float], dict[str, list[float]]]] = {}
    for row in rows:
        kernel = row.kernel
        if not isinstance(kernel, Product) or kernel.grouped or kernel.matmul.flops < COMPUTE_BOUND:
            continue
        if kernel.dtype not in SIXTEEN_BITS or row.publisher in HOST_TIMED_PUBLISHERS:
            continue
        if row.burst and row.publisher in RUNS_IN_A_ROW:
            continue  # a burst because it was fast
        shape_key = (row.device, kernel.matmul)
        burst_times, sustained_times = times.setdefault(shape_key, ([], defaultdict(list)))
        (burst_times if row.burst else sustained_times[row.publisher]).append(row.seconds)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (device, _), (burst_times, sustained_times) in times.items():
        for publisher, seconds in sustained_times.items() if burst_times else ():
            ratios[device][publisher].append(float(np.median(seconds) / np.median(burst_times)))
    return {device: _mean_factor(list(publishers.values())) for device, publishers in ratios.items()}


def _mean_factor(publishers: list[list[float]]) -> Sustained:
    """Return the mean of publishers' medians, and the quantiles of all."""
    all_ratios = [ratio for ratios in publishers for ratio in ratios]
    low, high = np.quantile(all_ratios, [0.1, 0.9])
    factor = float(np.mean([np.median(ratios) for ratios in publishers]))
    return Sustained(max(factor, 1.0), float(low), float(high), len(all_ratios))


def nearest_sustained(
    device: Accelerator, factors: Mapping[str, tuple[Accelerator, Sustained]], name: str
) -> Sustained:
    """Return the factor of an accelerator, else that of the one with the nearest data sheet; 1 where none is known."""
    if name in factors:
        return factors[name][1]
    if not factors:
        return Sustained(1.0, 1.0, 1.0, 0)
    _, nearest = min(factors.values(), key=lambda candidate: sheet_distance(device, candidate[0]))
    return replace(nearest, pairs=0)


def sheet_distance(device: Accelerator, other_device: Accelerator) -> float:
    """Return the distance of two data sheets: the sum of the log ratios of 16-bit peak and of memory bandwidth."""
    return abs(log(device.peak("fp16") / other_device.peak("fp16"))) + abs(
        log(device.memory_bandwidth / other_device.memory_bandwidth)
    )


def _measured_variant(device: Accelerator, row: Row) -> Accelerator:
    bandwidth = device.memory_bandwidth if row.bandwidth is None else row.bandwidth
    sustained = 1.0 if row.burst else device.sustained
    if bandwidth == device.memory_bandwidth and sustained == device.sustained:
        return device
    return replace(device, memory_bandwidth=bandwidth, sustained=sustained)


def _fit_parameters(
    device: Accelerator, rows: Sequence[Row], parameters: Sequence[Parameter], apply: Apply
) -> dict[str, float]:
    """Return the values of ``parameters`` fitted to ``rows``; the guesses where there are no rows."""
    sample = _sample_rows(rows)
    if not sample:
        return {parameter.name: parameter.guess for parameter in parameters}
    measured = np.log([row.seconds for row in sample])
    # rows of one variant share an accelerator object: to build one per row would dominate the time of a fit
    groups: dict[tuple[float | None, bool], list[int]] = defaultdict(list)
    for index, row in enumerate(sample):
        groups[row.bandwidth, row.burst].append(index)

    names = [parameter.name for parameter in parameters]

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        trial_device = apply(device, dict(zip(names, values.tolist(), strict=True)))
        times = np.empty(len(sample))
        for indices in groups.values():
            variant = _measured_variant(trial_device, sample[indices[0]])
            for index in indices:
                times[index] = sample[index].kernel.seconds(variant)
        return np.log(times) - measured

    values = fit_parameters(parameters, residuals, _row_weights(sample))
    return dict(zip(names, values.tolist(), strict=True))


def _dtype(row: Row) -> str:
    return row.kernel.dtype if isinstance(row.kernel, Product) else ""


def _sample_rows(rows: Sequence[Row]) -> list[Row]:
    """Return at most `MAX_FITTED_ROWS` rows of each publisher and family, evenly spaced."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.publisher, row.family].append(row)
    return [row for group in groups.values() for row in group[:: -(-len(group) // MAX_FITTED_ROWS)]]


def _row_weights(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return the weights of rows: every publisher with at least `FULL_WEIGHT` rows gets the same total."""
    count = Counter(row.publisher for row in rows)
    trust = [HOST_TIMED_WEIGHT if row.publisher in HOST_TIMED_PUBLISHERS else 1.0 for row in rows]
    count_weights = [FULL_WEIGHT / max(count[row.publisher], FULL_WEIGHT) for row in rows]
    return np.array(trust) * count_weights


def _fit_bandwidths(device: Accelerator, rows: Iterable[Row]) -> dict[str, float]:
    """Return the fraction of the memory bandwidth that each kind reaches: the median of publishers' medians."""
    fractions: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if isinstance(row.kernel, Stream):
            bandwidth = row.bandwidth or device.memory_bandwidth
            # at most half of the time is taken for the launch, which is a guess here: it is fitted with products
            fraction = row.kernel.traffic / max(row.seconds - device.launch, row.seconds / 2) / bandwidth
            fractions[row.kernel.name][row.publisher].append(min(fraction, 1.0))
    medians = {
        kind: [float(np.median(values)) for values in by_publisher.values()] for kind, by_publisher in fractions.items()
    }
    return {kind: float(np.median(values)) for kind, values in sorted(medians.items())}
