"""What predictions of many runs say of the simulator: errors, fitting, and how plans of one problem are ordered."""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median
from typing import Any

from scenarios.accuracy import Prediction
from scenarios.prediction_interval import Interval
from scenarios.rows.techniques import techniques
from simulator.rank_correlation import kendall_tau

LEAST_PLANS = 3
"""Measured plans of one problem from which an order can be judged."""

SIZES = (1, 8, 64, 512, 4096)
"""Devices from which the next class of sizes begins."""


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return errors per source, technique and size and in all, and how plans of one problem are ordered."""
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        sources[prediction.run.source].append(prediction)
    return {
        "sources": {name: _of_source(rows) for name, rows in sorted(sources.items())},
        "all": _of_source(predictions),
        "groups": _groups(predictions),
        "techniques": _errors_by(predictions, lambda row: techniques(row.run.scenario) if row.run.scenario else ()),
        "devices": _errors_by(predictions, lambda row: (size_class(devices_of(row)),) if row.run.scenario else ()),
        "assumptions": _assumptions(predictions),
        "calibrated_on": _calibrated_on(predictions),
    }


def devices_of(prediction: Prediction) -> int:
    """Return the devices of a run; 0 where it has no scenario."""
    scenario = prediction.run.scenario
    return scenario.chosen().mesh.num_ranks if scenario is not None else 0


def size_class(devices: int) -> str:
    """Return the class of sizes that a number of devices is in.

    >>> size_class(8), size_class(63), size_class(10000)
    ('8-63', '8-63', 'over 4095')
    """
    return size_classes()[bisect(SIZES, max(devices, 1)) - 1]


def size_classes() -> list[str]:
    """Return the names of all classes, the smallest first."""
    return [*(f"{least}-{after - 1}" for least, after in pairwise(SIZES)), f"over {SIZES[-1] - 1}"]


def _of_source(rows: Sequence[Prediction]) -> dict[str, Any]:
    skipped = [row for row in rows if row.skipped]
    return {
        "rows": len(rows),
        "predicted": len(rows) - len(skipped),
        "skipped": [{"row_id": row.run.row_id, "reason": row.skipped} for row in skipped],
        "reasons": dict(Counter(row.skipped for row in skipped).most_common()),
        "step_time": errors(row.error for row in rows),
        "memory": errors(row.memory_error for row in rows),
        "out_of_memory": confusion(rows),
        "step_time_interval": held((row.step_time_interval, row.run.step_time) for row in rows),
        "peak_memory_interval": held((row.peak_memory_interval, row.run.peak_memory) for row in rows),
    }


def held(pairs: Iterable[tuple[Interval | None, float | None]]) -> dict[str, float | int | None]:
    """Return of how many measured values the fraction that their intervals hold, and how wide those are.

    ``factor`` is the median of what an end is over the middle, the square root of high over low.

    >>> held([((1.0, 4.0), 3.0), ((1.0, 4.0), 5.0), (None, 1.0)])
    {'count': 2, 'inside': 0.5, 'factor': 2.0}
    """
    known = [(*interval, measured) for interval, measured in pairs if interval and measured]
    if not known:
        return {"count": 0, "inside": None, "factor": None}
    inside = fmean(low <= measured <= high for low, high, measured in known)
    factor = median(sqrt(high / low) for low, high, _ in known)
    return {"count": len(known), "inside": round(inside, 12), "factor": round(factor, 12)}


def by_class(
    predictions: Sequence[Prediction], classes: Callable[[Prediction], Iterable[str]]
) -> dict[str, list[float]]:
    """Return errors of step time by class, in order of names; a run may be in several."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in predictions:
        if row.error is not None:
            for name in classes(row):
                found[name].append(row.error)
    return {name: found[name] for name in sorted(found)}


def _errors_by(
    predictions: Sequence[Prediction], classes: Callable[[Prediction], Iterable[str]]
) -> dict[str, dict[str, float | int | None]]:
    return {name: errors(values) for name, values in by_class(predictions, classes).items()}


def _assumptions(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return every assumption with the rows that rest on it, the most common first."""
    found = Counter(line for row in predictions if not row.skipped for line in row.run.assumed)
    return [{"assumption": line, "rows": count} for line, count in found.most_common()]


def errors(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Return mean, median and largest absolute relative error, and the mean signed one.

    >>> errors([0.1, -0.3, None])
    {'count': 2, 'mape': 0.2, 'median': 0.2, 'max': 0.3, 'bias': -0.1}
    """
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0, "mape": None, "median": None, "max": None, "bias": None}
    sizes = [abs(value) for value in known]
    numbers = {"mape": fmean(sizes), "median": median(sizes), "max": max(sizes), "bias": fmean(known)}
    return {"count": len(known)} | {name: round(value, 12) for name, value in numbers.items()}


def confusion(rows: Sequence[Prediction]) -> dict[str, int]:
    """Return how many runs were said to fit and did, and so on; ``oom`` stands for out of memory."""
    judged = [(bool(row.fits), row.run.status) for row in rows if row.fits is not None]
    return {
        "true_fit": sum(fits and status == "ok" for fits, status in judged),
        "false_fit": sum(fits and status == "oom" for fits, status in judged),
        "true_oom": sum(not fits and status == "oom" for fits, status in judged),
        "false_oom": sum(not fits and status == "ok" for fits, status in judged),
    }


def _groups(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return regret and order of every group; runs of the very same plan count once, by their median."""
    groups: dict[tuple[str, str], dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in predictions:
        if row.step_time and row.run.step_time and row.run.status == "ok" and row.run.scenario:
            plan = (row.run.scenario.chosen(), row.run.scenario.problem.training.precision)
            groups[(row.run.source, row.run.group)][plan].append((row.step_time, row.run.step_time))
    result = []
    for (source, group), plans in sorted(groups.items()):
        pairs = [(runs[0][0], median(measured for _, measured in runs)) for runs in plans.values()]
        if len(pairs) >= LEAST_PLANS:
            order = {"regret": regret(pairs), "tau": kendall_tau(pairs)}
            result.append({"source": source, "group": group, "plans": len(pairs)} | order)
    return result


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how much longer the plan predicted fastest took than the fastest, from (predicted, measured).

    >>> regret([(1.0, 2.2), (2.0, 2.0)])
    0.1
    """
    chosen = min(pairs)[1]
    return round(chosen / min(measured for _, measured in pairs) - 1, 12)


def _calibrated_on(predictions: Sequence[Prediction]) -> dict[str, dict[str, str]]:
    """Return for each machine that was simulated where its figures come from."""
    from simulator.catalog import accelerator, accelerator_names, cluster_names, sources

    clusters = {row.run.scenario.problem.cluster for row in predictions if row.run.scenario}
    devices = {cluster.accelerator for cluster in clusters}
    names = [name for name in cluster_names() if name in {cluster.name for cluster in clusters}]
    names += [name for name in accelerator_names() if accelerator(name) in devices]
    return {name: dict(sources(name)) for name in names}
