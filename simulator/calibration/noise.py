"""Distances between publishers on the same work: a model fitted to the others cannot have a smaller error."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, expm1, log

import numpy as np

MOST_APART = 4.0
"""Largest ratio of two sizes between which a third one is interpolated."""

ITSELF = "itself"
"""Name of the reference where a publisher is compared with its own repeated measurements."""

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Floor:
    """Distance of one publisher's times from another's, relative to the first one's.

    Parameters
    ----------
    hardware, group
        The accelerator or link, and the group of kernels or collectives.
    predicted_publisher, reference_publisher
        The publisher whose times are predicted, and the one whose times predict them (`REPEATS` for its own).
    num_pairs, num_same_sizes
        Times compared, and how many of them the reference has for exactly the same sizes; the others are interpolated.
    factor
        Median ratio of the reference's time to the predicted publisher's.
    raw_error
        Mean error of the reference's times as predictions: that of a model that knows the reference exactly.
    scaled_error
        The same after division by ``factor``: that of a model that also knows clocks and power.
    model_error
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
    """A publisher's time beside the reference's and, where known, the model's, in s."""

    seconds: float
    other: float
    same: bool
    model: float | None = None


class Times:
    """Times of one publisher, interpolated between the sizes it measured.

    Parameters
    ----------
    measured
        Properties that must be equal to be comparable (a kind), sizes, and seconds.
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
        """Return another publisher's ``seconds`` beside this one's; ``None`` where this one's are not known."""
        other = self.at(kind, sizes)
        return Compared(seconds, other, (kind, sizes) in self._known, model) if other is not None else None

    def at(self, kind: Hashable, sizes: Sizes) -> float | None:
        """Return the publisher's seconds at some sizes, ``None`` where they are not known.

        Where measurements differ in one size only, one smaller and one larger, at most `MAX_SIZE_RATIO` apart, the log
        of the time is interpolated over the log of that size; among several such sizes the closest pair counts.
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
    """Return the times of everything that one publisher measured repeatedly, each beside the median of its repeats."""
    count = Counter((kind, sizes) for kind, sizes, _ in measured)
    several = [each for each in measured if count[each[:2]] > 1]
    times = Times(several)
    found = (times.compared(*each) for each in several)
    return [each for each in found if each is not None]


def floor(on: str, group: str, left_out: str, other: str, compared: Sequence[Compared]) -> Floor:
    """Return the distance of two publishers over ``pairs``, at least one."""
    ratios = [log(each.other / each.seconds) for each in compared]
    models = [log(each.model / each.seconds) for each in compared if each.model is not None]
    middle = float(np.median(ratios))  # of logarithms: the one factor, such as of clocks, that explains most
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
