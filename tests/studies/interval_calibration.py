"""Prediction intervals fitted to measured runs, and their coverage of runs that were left out of the fit.

Run ``python -m tests.studies.interval_calibration ROWS.jsonl`` for the coverage; a second argument,
``OUT.json``, gets the figures that `meshwise.scenarios.intervals` reads.

The half widths are those of split conformal prediction for correlated errors:

Errors on runs of one publisher are alike: a hundred of its runs say little more about the next publisher than ten.
Errors are therefore grouped by publisher, and every group has the same weight (CDF pooling [1]_). The size of errors
depends on what is known of a run, so each category of runs has an interval of its own (Mondrian conformal prediction
[2]_).

The half width of a category is the ``coverage`` quantile of the sizes of its errors [3]_, where an error of a group of
``n`` has the weight ``1 / n`` [4]_. For a new group that is exchangeable with ``k`` known ones, the expected fraction
of errors inside the interval is at least ``coverage * k / (k + 1)``. To promise ``coverage`` itself would need the
quantile at ``coverage * (k + 1) / k`` [5]_, which does not exist for few groups. The coverage is therefore measured,
by leaving out one group at a time.

References
----------
.. [1] Dunn, Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models", JASA
       (arXiv:1809.07441).
.. [2] Vovk, Gammerman and Shafer 2005, "Algorithmic learning in a random world", section 4.5.
.. [3] Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, "Distribution-free predictive inference for regression",
       JASA 113, section 2.2.
.. [4] Barber, Candes, Ramdas and Tibshirani 2023, "Conformal prediction beyond exchangeability", Annals of Statistics
       51, section 3.
.. [5] Lee, Barber and Willett 2023, "Distribution-free inference with hierarchical data" (arXiv:2306.06342).
"""

import datetime
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import log
from statistics import fmean, median
from typing import Any, NamedTuple

from meshwise.scenarios.console import BAD_INPUT, note, print_table
from meshwise.scenarios.files.results import write
from meshwise.scenarios.intervals import (
    RISK,
    UNCHECKED_FAMILY,
    Category,
    build_interval,
    build_uncertainty,
    find_category,
    find_half_width,
)
from meshwise.scenarios.published.accuracy import Prediction, load_runs, predict_all, select_split
from meshwise.scenarios.published.estimates import costs_of
from meshwise.scenarios.published.row import ALLOCATED, RESERVED
from meshwise.scenarios.published.vocabulary.publishers import find_publisher
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.allocation.device import count_overhead
from meshwise.strategies.allocation.replay import PlanReplay
from meshwise.strategies.plan.framework import ENTRIES

from .interval_ends import FEWEST_RUNS, fit_peak_ends, fit_step_ends, is_timed

COVERAGE = 0.9
"""Fraction of runs that should be inside their intervals."""


class Residual(NamedTuple):
    """An observed error: its size in natural logarithms, the category of its run, and its publisher as the group."""

    size: float
    category: str
    group: str


def find_half_widths(residuals: Sequence[Residual], coverage: float) -> dict[str, float]:
    """Return for every category the half width of the interval that contains the fraction ``coverage`` of its errors.

    Here the three errors of one group weigh as much as the one error of the other:

    >>> errors = [Residual(size, "all", "a") for size in (0.1, 0.2, 0.3)] + [Residual(0.4, "all", "b")]
    >>> find_half_widths(errors, 0.5), find_half_widths(errors, 0.6)
    ({'all': 0.3}, {'all': 0.4})
    """
    members: dict[str, list[Residual]] = defaultdict(list)
    for residual in residuals:
        members[residual.category].append(residual)
    return {name: _quantile(members[name], coverage) for name in sorted(members)}


def leave_groups_out(
    groups: Iterable[str], residuals: Sequence[Residual], coverage: float
) -> Iterator[tuple[int, float]]:
    """Yield the position of every error, and the half width fitted to the errors of all other groups.

    ``groups`` has the group of every residual.

    Raises
    ------
    ValueError
        Where there is only one group.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    if len(places) == 1:
        raise ValueError(f"leaving a group out needs two, met {next(iter(places))} alone")
    for group_places in places.values():
        excluded_places = set(group_places)
        widths = find_half_widths(
            [residual for place, residual in enumerate(residuals) if place not in excluded_places], coverage
        )
        yield from ((place, find_half_width(widths, residuals[place].category)) for place in group_places)


def _quantile(residuals: Sequence[Residual], fraction: float) -> float:
    """Return the smallest size that errors with this fraction of the weight do not exceed; groups weigh the same."""
    group_sizes = Counter(residual.group for residual in residuals)
    sorted_residuals = sorted(residuals)
    weight = 0.0
    for residual in sorted_residuals:
        weight += 1 / (group_sizes[residual.group] * len(group_sizes))
        if weight >= fraction - 1e-9:  # a sum of 1 / n falls short of a whole fraction by rounding
            return residual.size
    return sorted_residuals[-1].size


class HeldOutRun(NamedTuple):
    """A run left out of a fit: its source and category, and whether it is inside the fitted interval.

    ``factor`` is the interval's upper end over the prediction.
    """

    source: str
    category: str
    inside: bool
    factor: float


class Coverage(NamedTuple):
    """The coverage of a number of runs: the fraction inside their intervals, and the median ``factor``."""

    runs: int
    inside: float
    factor: float


def residuals(predictions: Sequence[Prediction]) -> list[Residual]:
    """Return the absolute errors of step time, ln(measured / predicted), with category and source."""
    return [
        Residual(abs(log(row.run.step_time / row.step_time)), _category(row), find_publisher(row.run.source).name)
        for row in select_judged(predictions)
        if row.step_time and row.run.step_time
    ]


def select_judged(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions of runs whose step time is judged."""
    return [row for row in predictions if is_timed(row)]


def leave_out(predictions: Sequence[Prediction], key: Callable[[Prediction], str]) -> list[HeldOutRun]:
    """Return for every run whether it is inside the interval fitted without the runs of the same ``key``.

    Raises
    ------
    ValueError
        Where all runs have one key.
    """
    row_residuals = residuals(predictions)
    result = [HeldOutRun("", "", False, 0.0)] * len(row_residuals)
    for place, width in leave_groups_out(map(key, select_judged(predictions)), row_residuals, COVERAGE):
        size, kind, source = row_residuals[place]
        result[place] = HeldOutRun(source, kind, size <= width, build_interval(1.0, width)[1])
    return result


def source_of(prediction: Prediction) -> str:
    """Return the publisher of a run, as a key of `leave_out`."""
    return find_publisher(prediction.run.source).name


def network_of(prediction: Prediction) -> str:
    """Return the network of a run by its sizes, whatever its name, as a key of `leave_out`."""
    return str(_scenario(prediction).spec)


def measure_coverage(held_out_runs: Sequence[HeldOutRun]) -> Coverage:
    """Return the coverage of left-out runs."""
    return Coverage(
        len(held_out_runs),
        fmean(held_out_run.inside for held_out_run in held_out_runs),
        median(held_out_run.factor for held_out_run in held_out_runs),
    )


def group_coverage(held_out_runs: Sequence[HeldOutRun], name: str) -> dict[str, Coverage]:
    """Return the coverage by ``source`` or ``category``, in order of names."""
    members: dict[str, list[HeldOutRun]] = defaultdict(list)
    for held_out_run in held_out_runs:
        members[getattr(held_out_run, name)].append(held_out_run)
    return {key: measure_coverage(members[key]) for key in sorted(members)}


def fit_figures(predictions: Sequence[Prediction], date: str) -> dict[str, Any]:
    """Return the figures of `meshwise.scenarios.intervals`, fitted to measured runs.

    Raises
    ------
    ValueError
        Where no step time, no peak memory or no reserved memory was measured.
    """
    times = residuals(predictions)
    peaks = [
        Residual(abs(log(row.run.peak_memory / row.measured_kind_peak)), "peak", row.run.source)
        for row in predictions
        if row.measured_kind_peak and row.run.peak_memory and row.run.memory_kind == ALLOCATED
    ]
    ratios = [
        Residual(row.run.reserved_memory / row.run.peak_memory, "peak", row.run.source)
        for row in predictions
        if row.run.peak_memory and row.run.reserved_memory
    ]
    if not (times and peaks and ratios):
        counts = f"met {len(times)}, {len(peaks)} and {len(ratios)}"
        raise ValueError(f"intervals need measured step times, peaks and reserved memory, {counts}")
    return {
        "date": date,
        "coverage": COVERAGE,
        "step_time": {
            name: {"half_width": round(width, 4)}
            | _count_rows([residual for residual in times if residual.category == name])
            for name, width in find_half_widths(times, COVERAGE).items()
        },
        "step_time_ends": fit_step_ends(predictions),
        "peak_memory_ends": fit_peak_ends(predictions),
        "peak_memory": {"half_width": round(find_half_widths(peaks, COVERAGE)["peak"], 5)} | _count_rows(peaks),
        "reserved_over_allocated": {
            "least": round(min(ratios).size, 4),
            "median": round(median(residual.size for residual in ratios), 4),
            "largest": round(max(ratios).size, 4),
        }
        | _count_rows(ratios),
        "unknown_framework": fit_unknown_memory(predictions),
        **fit_replay(predictions),
    }


def fit_replay(predictions: Sequence[Prediction], risk: float = RISK) -> dict[str, Any]:
    """Return the half widths of what a replay says is reserved: where conventions are known, and where they are not.

    The first is fitted to measured reserved memory, the other as that of `fit_unknown_memory`.
    """
    sizes = [
        Residual(abs(log(measured / row.peak_reserved)), "replay", row.run.source)
        for row in predictions
        if row.peak_reserved and (measured := _measured_reserved(row))
    ]
    rows = [
        (log(room / least), row.run.status == "oom")
        for row in _select_unknown(predictions)
        for room, least in [_find_replay_room(row)]
    ]
    result: dict[str, Any] = {}
    counts = Counter(residual.group for residual in sizes)
    sizes = [residual for residual in sizes if counts[residual.group] >= FEWEST_RUNS] or sizes
    if sizes:
        result["replay"] = {"half_width": round(find_half_widths(sizes, COVERAGE)["replay"], 4)} | _count_rows(sizes)
    if rows:
        models = [row.run.group.split(",")[0] for row in _select_unknown(predictions)]
        result["replay_unknown_framework"] = {
            "half_width": round(find_safe_width(rows, risk), 4),
            "rows": len(rows),
            "sources": dict(sorted(Counter(models).items())),
            "left_out": {name: round(fraction, 3) for name, fraction in leave_models_out(rows, models, risk).items()},
        }
    return result


def find_safe_width(rows: Sequence[tuple[float, bool]], risk: float) -> float:
    """Return the least half width with which at most a fraction ``risk`` of what is predicted to fit ran out.

    ``rows`` has the logarithm of the room of each run over what it needs, and whether it ran out of memory.

    >>> find_safe_width([(0.3, False), (0.2, False), (0.1, True), (-0.1, True)], 0.05)
    0.2
    """
    return next(
        width
        for width in sorted(max(room, 0.0) for room, _ in rows)
        if sum(oom for room, oom in rows if room >= width) <= risk * sum(room >= width for room, _ in rows)
    )


def leave_models_out(rows: Sequence[tuple[float, bool]], models: Sequence[str], risk: float) -> dict[str, float]:
    """Return for every model the fraction of its runs that the width of all others tells rightly to fit or not."""
    result = {}
    for model in sorted(set(models)):
        others = [row for row, name in zip(rows, models, strict=True) if name != model]
        if others:
            width = find_safe_width(others, risk)
            own_rows = [row for row, name in zip(rows, models, strict=True) if name == model]
            result[model] = fmean((room >= width) != oom for room, oom in own_rows)
    return result


def _measured_reserved(row: Prediction) -> float | None:
    """Return the reserved memory that was measured in a run, in bytes."""
    return row.run.reserved_memory or (row.run.peak_memory if row.run.memory_kind == RESERVED else None)


def _select_unknown(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions of runs in sweeps that ran out of memory too, with a framework that is not checked."""
    failed_sources = {row.run.source for row in predictions if row.run.status == "oom"}
    return [
        row
        for row in predictions
        if row.peak_memory
        and row.run.scenario is not None
        and ENTRIES[row.run.scenario.problem.training.framework].family == UNCHECKED_FAMILY
        and row.run.source in failed_sources
    ]


def _find_replay_room(row: Prediction) -> tuple[float, float]:
    """Return the bytes that the allocator may have, and the least with which a replay of the run's step runs."""
    scenario = _scenario(row)
    problem, plan = scenario.problem, scenario.choose_plan()
    device = min(problem.cluster.accelerators, key=lambda accelerator: accelerator.memory)
    replayer = costs_of(problem).costs.get_shared(PlanReplay)
    return device.memory - count_overhead(problem, plan), replayer.reserve(plan).least


def fit_unknown_memory(predictions: Sequence[Prediction], risk: float = RISK) -> dict[str, Any]:
    """Return the half width of the peak memory interval for frameworks whose conventions are not known.

    No such publisher prints peaks, so that it is fitted to which runs ran out of memory: it is the least half width
    with which at most a fraction ``risk`` of the runs that are predicted to fit ran out. Each model tests the width of
    the others (`leave_models_out`).
    """
    rows = [(_memory_ratio(row), row.run.status == "oom") for row in _select_unknown(predictions)]
    if not rows:
        return {}

    def failed_fraction(margin: float) -> float:
        outcomes = [oom for room, oom in rows if room >= margin]
        return sum(outcomes) / len(outcomes) if outcomes else 0.0

    margin = next(room for room in sorted(room for room, _ in rows if room >= 1.0) if failed_fraction(room) <= risk)
    # the margin grows with the half width, so that bisection finds the least one that reaches it
    low, high = 0.0, 2.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        middle_margin = replace(build_uncertainty(Category.STATED), peak_memory_width=middle).memory_margin(risk)
        low, high = (low, middle) if middle_margin >= margin else (middle, high)
    sources = Counter(row.run.source for row in _select_unknown(predictions))
    return {"half_width": round(high, 4), "rows": len(rows), "sources": dict(sorted(sources.items()))}


def _memory_ratio(row: Prediction) -> float:
    """Return the ratio of the smallest device's memory to the predicted peak, both without the reserved memory."""
    assert row.run.scenario is not None and row.peak_memory is not None
    device = min(row.run.scenario.problem.cluster.accelerators, key=lambda accelerator: accelerator.memory)
    return (device.memory - device.reserved) / max(row.peak_memory, 1.0)


def _count_rows(category_residuals: Sequence[Residual]) -> dict[str, Any]:
    sources = Counter(residual.group for residual in category_residuals)
    return {"rows": len(category_residuals), "sources": {name: sources[name] for name in sorted(sources)}}


def _category(row: Prediction) -> str:
    scenario = _scenario(row)
    return find_category(scenario.problem.cluster, scenario.assumptions)


def _scenario(row: Prediction) -> Scenario:
    if row.run.scenario is None:
        raise ValueError(f"{row.run.row_id} has no scenario: {row.skipped}")
    return row.run.scenario


HEAD = ("left out", "runs", "inside", "factor")


def list_lines(predictions: Sequence[Prediction]) -> Iterator[tuple[str, int, str, str]]:
    """Yield the rows of the coverage table under `HEAD`: by source, then overall, then with each network left out."""
    held_out_runs = leave_out(predictions, source_of)
    network_coverage = {"all, each network left out": measure_coverage(leave_out(predictions, network_of))}
    source_coverage = {"all, each source left out": measure_coverage(held_out_runs)}
    for name, (runs, inside, factor) in (
        group_coverage(held_out_runs, "source") | source_coverage | network_coverage
    ).items():
        yield name, runs, f"{inside:.1%}", f"{factor:.3f}"


def main(arguments: Sequence[str]) -> int:
    """Print the coverage of the runs in a file, and write the figures to a second one; return the exit code."""
    if len(arguments) not in (1, 2):
        note("usage: python -m tests.studies.interval_calibration ROWS.jsonl [OUT.json]")
        return BAD_INPUT
    try:
        predictions = predict_all(select_split(load_runs(arguments[0]), judge=False))
        document = fit_figures(predictions, datetime.date.today().isoformat())
        print_table(HEAD, list(list_lines(predictions)))
        if len(arguments) == 2:
            write(arguments[1], json.dumps(document, indent=1) + "\n")
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
