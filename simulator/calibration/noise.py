"""How far publishers are from each other on the same work: the error below which no model of the others comes."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, expm1, log

import numpy as np

MOST_APART = 4.0
"""How many times as large as the smaller the larger of two sizes is, at most, between which a third is interpolated."""

ITSELF = "itself"
"""The other of a publisher that timed more than once what is the same to the model."""

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Floor:
    """How far one publisher's times are from another's, as parts of the first one's.

    Parameters
    ----------
    on, group
        The accelerator or link, and what of the publisher's rows.
    left_out, other
        The publisher whose times are predicted, and the one whose times predict them: ``ITSELF`` by `repeats`.
    number, same
        Times compared, and how many of them the other has for the very same sizes; between others its times are
        interpolated.
    factor
        Median of the other's time over that of the one left out.
    raw
        Mean error of the other's times as predictions: what a model makes that knows the other without error.
    scatter
        The same after division by ``factor``: what is left to a model that also knows clocks and power.
    model
        Mean error of the model without the publisher, on the same rows; ``None`` where nothing was fitted.
    """

    on: str
    group: str
    left_out: str
    other: str
    number: int
    same: int
    factor: float
    raw: float
    scatter: float
    model: float | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """One time of the publisher left out beside the other's and, where known, the model's, in s."""

    seconds: float
    other: float
    same: bool
    model: float | None = None


class Times:
    """What one publisher timed, read between the sizes it timed.

    Parameters
    ----------
    measured
        What was timed that no size can stand in for, its sizes, and seconds.
    """

    def __init__(self, measured: Iterable[tuple[Hashable, Sizes, float]]) -> None:
        found: dict[tuple[Hashable, Sizes], list[float]] = defaultdict(list)
        for kind, sizes, seconds in measured:
            found[kind, sizes].append(log(seconds))
        self._known = {key: float(np.median(each)) for key, each in found.items()}
        self._lines: dict[tuple[Hashable, int, Sizes], list[tuple[float, float]]] = defaultdict(list)
        for (kind, sizes), value in self._known.items():
            for axis, size in enumerate(sizes):
                self._lines[kind, axis, _without(sizes, axis)].append((size, value))

    def compared(self, kind: Hashable, sizes: Sizes, seconds: float, model: float | None = None) -> Compared | None:
        """Return ``seconds`` of the publisher left out beside this one's; ``None`` where they are not known."""
        other = self.at(kind, sizes)
        return Compared(seconds, other, (kind, sizes) in self._known, model) if other is not None else None

    def at(self, kind: Hashable, sizes: Sizes) -> float | None:
        """Return seconds, ``None`` where they are not known.

        Where another size alone is smaller and larger, by at most `MOST_APART` between them, the logarithm of the
        time is interpolated along the size's logarithm; of several such sizes, along the one whose ends are nearest.
        """
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


def repeats(measured: Sequence[tuple[Hashable, Sizes, float]]) -> list[Compared]:
    """Return the times of what one publisher timed more than once, each beside the median of all of the same."""
    count = Counter((kind, sizes) for kind, sizes, _ in measured)
    several = [each for each in measured if count[each[:2]] > 1]
    times = Times(several)
    found = (times.compared(*each) for each in several)
    return [each for each in found if each is not None]


def floor(on: str, group: str, left_out: str, other: str, compared: Sequence[Compared]) -> Floor:
    """Return how far two publishers are from each other on ``compared``, at least one."""
    ratios = [log(each.other / each.seconds) for each in compared]
    models = [log(each.model / each.seconds) for each in compared if each.model is not None]
    middle = float(np.median(ratios))
    return Floor(
        on,
        group,
        left_out,
        other,
        len(compared),
        sum(each.same for each in compared),
        exp(middle),
        _mean_error(ratios),
        _mean_error([ratio - middle for ratio in ratios]),
        _mean_error(models) if models else None,
    )


def _mean_error(ratios: Iterable[float]) -> float:
    return float(np.mean([abs(expm1(ratio)) for ratio in ratios]))


def _without(sizes: Sizes, axis: int) -> Sizes:
    return sizes[:axis] + sizes[axis + 1 :]
