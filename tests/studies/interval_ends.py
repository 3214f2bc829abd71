"""Ends of prediction intervals for publishers that had no part in their fit: both tails apart, publishers alike.

Errors of one publisher are alike, and those of the next one may all lie on one side. The ends are quantiles of
``ln(measured / predicted)``, in which every publisher of `FEWEST_RUNS` runs or more has the same weight (CDF pooling,
Dunn, Wasserman and Ramdas 2022, arXiv:1809.07441). Quantiles at the promised coverage contain fewer runs of a publisher
that is left out; the level of the quantiles is therefore the least one at which left-out publishers have the promised
coverage in the mean.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import log
from statistics import fmean
from typing import Any, NamedTuple

from meshwise.scenarios.intervals import Category, find_category
from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.vocabulary.publishers import find_publisher
from meshwise.strategies.plan.framework import ENTRIES

COVERAGE = 0.9
"""Fraction of runs that should be inside their intervals."""

LEVELS = tuple(round(0.9 + 0.01 * step, 2) for step in range(11)) + tuple(
    round(1.1 + 0.1 * step, 1) for step in range(20)
)
"""Levels of quantiles that are tried, from the promised coverage to the range of all runs, and above 1 that range times
the level: the runs of few publishers do not reach as far as those of the next."""

FEWEST_RUNS = 10
"""Runs from which a publisher has a voice: fewer tell one plan's error, not a publisher's."""

FEWEST_PUBLISHERS = 3
"""Publishers from which a family of frameworks has ends of its own."""


class Deviation(NamedTuple):
    """``ln(measured / predicted)`` of a run, and its publisher."""

    value: float
    publisher: str


def is_timed(row: Prediction) -> bool:
    """Return whether the step time of a run is judged: of a plan that is stated, and of a model that is wide enough."""
    scenario, publisher = row.run.scenario, find_publisher(row.run.source)
    if not (row.step_time and row.run.step_time and scenario) or row.run.tier not in ("A", "B", ""):
        return False
    width = getattr(scenario.spec, "hidden", 0)
    return width >= publisher.timed_from_width


def find_quantile(deviations: Sequence[Deviation], fraction: float) -> float:
    """Return the least value that deviations with this fraction of the weight do not exceed.

    Two runs of one publisher weigh as much as the one of the other:

    >>> runs = [Deviation(0.1, "a"), Deviation(0.3, "a"), Deviation(0.2, "b")]
    >>> [find_quantile(runs, fraction) for fraction in (0.25, 0.5, 0.75, 1.0)]
    [0.1, 0.2, 0.2, 0.3]
    """
    counts = Counter(deviation.publisher for deviation in deviations)
    weight = 0.0
    for deviation in sorted(deviations):
        weight += 1 / (counts[deviation.publisher] * len(counts))
        if weight >= fraction - 1e-9:  # a sum of 1 / n falls short of a whole fraction by rounding
            return deviation.value
    return max(deviations).value


def find_ends(deviations: Sequence[Deviation], level: float) -> tuple[float, float]:
    """Return the ends between which deviations with ``level`` of the weight lie, as much outside at either end.

    Above 1 they are those of all deviations, each farther out by the level:

    >>> find_ends([Deviation(-0.1, "a"), Deviation(0.2, "b")], 2.0)
    (-0.2, 0.4)
    >>> find_ends([Deviation(0.1, "a"), Deviation(0.2, "b")], 2.0)
    (0.05, 0.4)
    """
    tail = max(1.0 - level, 0.0) / 2
    factor = max(level, 1.0)
    low, high = find_quantile(deviations, max(tail, 1e-9)), find_quantile(deviations, 1.0 - tail)
    return low * factor if low < 0 else low / factor, high * factor if high > 0 else high / factor


def leave_publishers_out(deviations: Sequence[Deviation], level: float) -> dict[str, float]:
    """Return for every publisher the fraction of its runs inside the ends of all others.

    Raises
    ------
    ValueError
        Where there is one publisher alone.
    """
    members: dict[str, list[Deviation]] = defaultdict(list)
    for deviation in deviations:
        members[deviation.publisher].append(deviation)
    if len(members) < 2:
        raise ValueError(f"leaving a publisher out needs two, met {', '.join(members) or 'none'}")
    result = {}
    for name, rows in sorted(members.items()):
        low, high = find_ends([row for row in deviations if row.publisher != name], level)
        result[name] = fmean(low <= row.value <= high for row in rows)
    return result


def choose_level(deviations: Sequence[Deviation]) -> float:
    """Return the least level at which publishers that are left out have the promised coverage in the mean."""
    for level in LEVELS:
        if fmean(leave_publishers_out(deviations, level).values()) >= COVERAGE:
            return level
    return LEVELS[-1]


def drop_small(deviations: Iterable[Deviation]) -> list[Deviation]:
    """Return the deviations of publishers with at least `FEWEST_RUNS` runs; all where no publisher has as many."""
    all_deviations = list(deviations)
    counts = Counter(deviation.publisher for deviation in all_deviations)
    large = [deviation for deviation in all_deviations if counts[deviation.publisher] >= FEWEST_RUNS]
    return large or all_deviations


def list_time_deviations(predictions: Iterable[Prediction]) -> list[Deviation]:
    """Return the deviations of step times that are judged."""
    return [
        Deviation(log(row.run.step_time / row.step_time), find_publisher(row.run.source).name)
        for row in predictions
        if is_timed(row) and row.run.step_time and row.step_time
    ]


def list_peak_deviations(predictions: Iterable[Prediction]) -> list[Deviation]:
    """Return the deviations of peaks, each of the kind that was measured."""
    return [
        Deviation(log(row.run.peak_memory / row.measured_kind_peak), find_publisher(row.run.source).name)
        for row in predictions
        if row.run.peak_memory and row.measured_kind_peak
    ]


def is_known(row: Prediction) -> bool:
    """Return whether a run is understood, and its framework and accelerator are known."""
    scenario = row.run.scenario
    assert scenario is not None
    run_category = find_category(scenario.problem.cluster, scenario.assumptions)
    return run_category not in (Category.UNKNOWN, Category.UNREAD)


def list_known_deviations(predictions: Iterable[Prediction]) -> list[Deviation]:
    """Return the deviations to which the ends of steps that are understood are fitted."""
    return drop_small(list_time_deviations(row for row in predictions if is_timed(row) and is_known(row)))


def measure_left_out_coverage(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return for every publisher the fraction of its steps inside the interval that all others give."""
    deviations = list_known_deviations(predictions)
    if len({deviation.publisher for deviation in deviations}) < 2:
        return {}
    return leave_publishers_out(deviations, choose_level(deviations))


def fit_step_ends(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the ends of step times: of runs that are understood, and of all runs whatever their rows state."""
    every_run = [
        Deviation(log(row.run.step_time / row.step_time), find_publisher(row.run.source).name)
        for row in predictions
        if row.step_time and row.run.step_time and row.run.scenario
    ]
    return {
        "known": _describe_ends(list_known_deviations(predictions)),
        "unknown": _describe_ends(drop_small(every_run)),
    }


def fit_peak_ends(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the ends of peaks by family of frameworks, where enough publishers logged them, and of all."""

    def select(keeps: Callable[[str], bool]) -> list[Deviation]:
        rows = (row for row in predictions if row.run.scenario and keeps(_find_family(row)))
        return drop_small(list_peak_deviations(rows))

    families = sorted({_find_family(row) for row in predictions if row.run.scenario and row.run.peak_memory})
    ends = {family: select(family.__eq__) for family in families}
    own_ends = {
        family: _describe_ends(deviations)
        for family, deviations in ends.items()
        if len({deviation.publisher for deviation in deviations}) >= FEWEST_PUBLISHERS
    }
    return own_ends | {"all": _describe_ends(select(lambda family: True))}


def _find_family(row: Prediction) -> str:
    assert row.run.scenario is not None
    return ENTRIES[row.run.scenario.problem.training.framework].family


def _describe_ends(deviations: Sequence[Deviation]) -> dict[str, Any]:
    is_alone = len({deviation.publisher for deviation in deviations}) == 1
    level = LEVELS[-1] if is_alone else choose_level(deviations)  # one publisher tells nothing of another one
    low, high = find_ends(deviations, level)
    coverage = {} if is_alone else leave_publishers_out(deviations, level)
    return {
        "low": round(low, 4),
        "high": round(high, 4),
        "level": level,
        "rows": len(deviations),
        "publishers": {name: round(inside, 3) for name, inside in coverage.items()},
    }
