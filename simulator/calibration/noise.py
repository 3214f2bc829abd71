"""Distances between publishers on the same work: a model fitted to the others cannot have a smaller error."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, log
from typing import NamedTuple

import numpy as np

MAX_SIZE_RATIO = 4.0
"""Largest ratio of two sizes between which a third one is interpolated."""

REPEATS = "itself"
"""Name of the reference where a publisher is compared with its own repeated measurements."""

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NoiseFloor:
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

    hardware: str
    group: str
    predicted_publisher: str
    reference_publisher: str
    num_pairs: int
    num_same_sizes: int
    factor: float
    raw_error: float
    scaled_error: float
    model_error: float | None = None


@dataclass(frozen=True, slots=True)
class TimePair:
    """A publisher's time beside the reference's and, where known, the model's, in s."""

    seconds: float
    reference_seconds: float
    has_same_size: bool
    model_seconds: float | None = None


class PublisherTimes:
    """Times of one publisher, interpolated between the sizes it measured.

    Parameters
    ----------
    measured
        Properties that must be equal to be comparable (a kind), sizes, and seconds.
    """

    def __init__(self, measured: Iterable[tuple[Hashable, Sizes, float]]) -> None:
        log_times: dict[tuple[Hashable, Sizes], list[float]] = defaultdict(list)
        for kind, sizes, seconds in measured:
            log_times[kind, sizes].append(log(seconds))
        self._log_seconds = {key: float(np.median(logarithms)) for key, logarithms in log_times.items()}
        self._lines: dict[tuple[Hashable, int, Sizes], list[tuple[float, float]]] = defaultdict(list)
        for (kind, sizes), value in self._log_seconds.items():
            for axis, size in enumerate(sizes):
                self._lines[kind, axis, _drop_axis(sizes, axis)].append((size, value))

    def pair_time(
        self, kind: Hashable, sizes: Sizes, seconds: float, model_seconds: float | None = None
    ) -> TimePair | None:
        """Return another publisher's ``seconds`` beside this one's; ``None`` where this one's are not known."""
        reference = self.interpolate_seconds(kind, sizes)
        return (
            TimePair(seconds, reference, (kind, sizes) in self._log_seconds, model_seconds)
            if reference is not None
            else None
        )

    def interpolate_seconds(self, kind: Hashable, sizes: Sizes) -> float | None:
        """Return the publisher's seconds at some sizes, ``None`` where they are not known.

        Where measurements differ in one size only, one smaller and one larger, at most `MAX_SIZE_RATIO` apart, the log
        of the time is interpolated over the log of that size; among several such sizes the closest pair counts.
        """
        if (kind, sizes) in self._log_seconds:
            return exp(self._log_seconds[kind, sizes])
        interpolations = []
        for axis, size in enumerate(sizes):
            line = self._lines.get((kind, axis, _drop_axis(sizes, axis)), [])
            smaller, larger = [point for point in line if point[0] < size], [point for point in line if point[0] > size]
            if smaller and larger and min(larger)[0] <= MAX_SIZE_RATIO * max(smaller)[0]:
                (low, low_value), (high, high_value) = max(smaller), min(larger)
                part = log(size / low) / log(high / low)
                interpolations.append((high / low, exp(low_value + part * (high_value - low_value))))
        return min(interpolations)[1] if interpolations else None


def pair_repeats(measured: Sequence[tuple[Hashable, Sizes, float]]) -> list[TimePair]:
    """Return the times of everything that one publisher measured repeatedly, each beside the median of its repeats."""
    count = Counter((kind, sizes) for kind, sizes, _ in measured)
    repeated = [entry for entry in measured if count[entry[:2]] > 1]
    times = PublisherTimes(repeated)
    pairs = (times.pair_time(*entry) for entry in repeated)
    return [entry for entry in pairs if entry is not None]


class TimedWork(NamedTuple):
    """Work that a publisher timed: its hardware and group, kind and sizes as `PublisherTimes` has them, and seconds."""

    hardware: str
    group: str
    kind: Hashable
    sizes: Sizes
    seconds: float
    model_seconds: float | None = None


def measure_floors(
    publisher: str, work: Sequence[TimedWork], references: Mapping[str, PublisherTimes]
) -> list[NoiseFloor]:
    """Return the distances of a publisher's times from those of each reference and from its own, by group."""
    floors = []
    for name, times in references.items():
        pairs_by_group = defaultdict(list)
        for item in work:
            pair = times.pair_time(item.kind, item.sizes, item.seconds, item.model_seconds)
            if pair is not None:
                pairs_by_group[item.hardware, item.group].append(pair)
        floors += [_measure_floor(*group, publisher, name, pairs) for group, pairs in pairs_by_group.items()]
    measured = defaultdict(list)
    for item in work:
        measured[item.hardware, item.group].append((item.kind, item.sizes, item.seconds))
    for group, entries in measured.items():
        pairs = pair_repeats(entries)
        floors += [_measure_floor(*group, publisher, REPEATS, pairs)] if pairs else []
    return floors


def _measure_floor(
    hardware: str, group: str, predicted_publisher: str, reference_publisher: str, pairs: Sequence[TimePair]
) -> NoiseFloor:
    """Return the distance of two publishers over ``pairs``, at least one."""
    ratios = [log(pair.reference_seconds / pair.seconds) for pair in pairs]
    models = [log(pair.model_seconds / pair.seconds) for pair in pairs if pair.model_seconds is not None]
    middle = float(np.median(ratios))  # of logarithms: the one factor, such as of clocks, that explains most
    return NoiseFloor(
        hardware,
        group,
        predicted_publisher,
        reference_publisher,
        len(pairs),
        sum(pair.has_same_size for pair in pairs),
        exp(middle),
        _mean_error(ratios),
        _mean_error([ratio - middle for ratio in ratios]),
        _mean_error(models) if models else None,
    )


def _mean_error(ratios: Iterable[float]) -> float:
    return float(np.mean([abs(expm1(ratio)) for ratio in ratios]))


def _drop_axis(sizes: Sizes, axis: int) -> Sizes:
    return sizes[:axis] + sizes[axis + 1 :]
