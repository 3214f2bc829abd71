"""How far publishers are from each other on the same kernels: the error below which no model of the others comes."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, expm1, log

import numpy as np

from simulator.calibration.kernels import FusedAttention, Product
from simulator.calibration.rows import SIXTEEN_BITS, Row

MOST_APART = 4.0
"""How many times as large as the smaller the larger of two sizes is, at most, between which a third is interpolated."""

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Floor:
    """How far one publisher's times are from another's, as parts of the first one's.

    Parameters
    ----------
    left_out, other
        The publisher whose times are predicted, and the one whose times predict them.
    kernels, same
        Kernels compared, and how many of them the other timed too; between others its times are interpolated.
    factor
        Median of the other's time over that of the one left out.
    raw
        Mean error of the other's times as predictions: what a model makes that knows the other without error.
    scatter
        The same after division by ``factor``: what is left to a model that also knows clocks and power.
    model
        Mean error of the model without the publisher, on these kernels; ``None`` where nothing was fitted.
    """

    device: str
    group: str
    left_out: str
    other: str
    kernels: int
    same: int
    factor: float
    raw: float
    scatter: float
    model: float | None = None


class Times:
    """What one publisher timed on one accelerator, read between the sizes it timed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        found: dict[tuple[Hashable, Sizes], list[float]] = defaultdict(list)
        for row in rows:
            found[_what(row)].append(log(row.seconds))
        self._known = {key: float(np.median(each)) for key, each in found.items()}
        self._lines: dict[tuple[Hashable, int, Sizes], list[tuple[float, float]]] = defaultdict(list)
        for (kind, sizes), value in self._known.items():
            for axis, size in enumerate(sizes):
                self._lines[kind, axis, _without(sizes, axis)].append((size, value))

    def same(self, row: Row) -> bool:
        """Return whether the very kernel of a row was timed."""
        return _what(row) in self._known

    def at(self, row: Row) -> float | None:
        """Return the seconds of a row's kernel, ``None`` where they are not known.

        Where another size alone is smaller and larger, by at most `MOST_APART` between them, the logarithm of the
        time is interpolated along the size's logarithm; of several such sizes, along the one whose ends are nearest.
        """
        kind, sizes = _what(row)
        if (kind, sizes) in self._known:
            return exp(self._known[kind, sizes])
        found = []
        for axis, size in enumerate(sizes):
            line = self._lines.get((kind, axis, _without(sizes, axis)), [])
            below, above = [each for each in line if each[0] < size], [each for each in line if each[0] > size]
            if below and above and min(above)[0] <= MOST_APART * max(below)[0]:
                (low, first), (high, last) = max(below), min(above)
                part = log(size / low) / log(high / low)
                found.append((high / low, exp(first + part * (last - first))))
        return min(found)[1] if found else None


def group(row: Row) -> str:
    """Return what a row's kernel is reported among."""
    kernel = row.kernel
    if isinstance(kernel, FusedAttention):
        return "attention"
    if not isinstance(kernel, Product):
        return "memory-bound"
    if kernel.grouped:
        return "experts"
    return "products" if kernel.dtype in SIXTEEN_BITS else f"products {kernel.dtype}"


def floors(
    left_out: Sequence[Row], others: Iterable[Row], predicted: Callable[[Row], float] | None = None
) -> list[Floor]:
    """Return how far the rows of one publisher and accelerator are from those of each other publisher.

    Parameters
    ----------
    predicted
        Seconds that the model without the publisher predicts for a row.
    """
    publishers: dict[str, list[Row]] = defaultdict(list)
    for row in others:
        if row.device == left_out[0].device and row.publisher != left_out[0].publisher:
            publishers[row.publisher].append(row)
    found = []
    for other, rows in sorted(publishers.items()):
        times = Times(rows)
        groups: dict[str, list[tuple[Row, float]]] = defaultdict(list)
        for row in left_out:
            seconds = times.at(row)
            if seconds is not None:
                groups[group(row)].append((row, seconds))
        found += [_floor(name, other, times, compared, predicted) for name, compared in sorted(groups.items())]
    return found


def _floor(
    name: str,
    other: str,
    times: Times,
    compared: Sequence[tuple[Row, float]],
    predicted: Callable[[Row], float] | None,
) -> Floor:
    first = compared[0][0]
    ratios = [log(seconds / row.seconds) for row, seconds in compared]
    middle = float(np.median(ratios))
    return Floor(
        first.device,
        name,
        first.publisher,
        other,
        len(compared),
        sum(times.same(row) for row, _ in compared),
        exp(middle),
        _mean_error(ratios),
        _mean_error([ratio - middle for ratio in ratios]),
        _mean_error([log(predicted(row) / row.seconds) for row, _ in compared]) if predicted else None,
    )


def _mean_error(ratios: Iterable[float]) -> float:
    return float(np.mean([abs(expm1(ratio)) for ratio in ratios]))


def _what(row: Row) -> tuple[Hashable, Sizes]:
    """Return what no size can stand in for, and the sizes."""
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


def _without(sizes: Sizes, axis: int) -> Sizes:
    return sizes[:axis] + sizes[axis + 1 :]
