"""Predicted against measured over many runs: every row is predicted or skipped with a reason."""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scenarios.errors import ScenarioError
from scenarios.loader import load
from scenarios.published import GIB, Run, read_runs

LEAST_PLANS = 3
"""Measured plans of one problem from which an order can be judged."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run with what the simulator says of it: seconds, bytes, whether it fits; None where it was skipped."""

    run: Run
    step_time: float | None = None
    peak_memory: float | None = None
    fits: bool | None = None
    skipped: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the step time, (predicted - measured) / measured."""
        return _error(self.step_time, self.run.step_time)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory."""
        return _error(self.peak_memory, self.run.peak_memory)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return (predicted - measured) / measured if predicted and measured else None


def runs_at(path: str | Path) -> tuple[Run, ...]:
    """Return the runs in a file of rows, or the scenarios with ``measured`` in a file or folder."""
    place = Path(path)
    if place.is_dir():
        files = sorted(place.rglob("*.yaml"))
        if not files:
            raise ValueError(f"{place}: a folder of scenarios holds .yaml files, met none")
        return tuple(_scenario_run(file) for file in files)
    return (_scenario_run(place),) if place.suffix in (".yaml", ".yml") else read_runs(place)


def _scenario_run(file: Path) -> Run:
    name, source = file.stem, file.parent.name or "scenario"
    try:
        scenario = load(file)
    except ScenarioError as error:
        return Run(name, source, name, None, None, "unknown", skipped=str(error.faults[0]))
    reason = "" if scenario.plan and scenario.measured else "the scenario has no plan or nothing measured"
    step_time = scenario.measured.step_time if scenario.measured else None
    return Run(name, source, name, step_time, None, "ok", None if reason else scenario, reason, scenario.assumptions)


def predict(run: Run) -> Prediction:
    """Return the prediction for one run; a plan that does not fit has a step time all the same.

    Peak memory is that of the framework's tensors, as its allocator counts them, where the run's was measured so.
    """
    from scenarios.rows.costs import costs_of, seconds_of

    if run.scenario is None:
        return Prediction(run, skipped=run.skipped)
    problem, plan = run.scenario.problem, run.scenario.chosen()
    costs = costs_of(problem)
    try:
        seconds = seconds_of(problem, plan)
    except ValueError as error:
        return Prediction(run, skipped=str(error))
    apart = 0.0 if run.with_context else problem.cluster.accelerator.reserved
    return Prediction(run, seconds, costs.peak_memory(plan) - apart, costs.fits(plan))


def predict_all(runs: Sequence[Run], progress: Callable[[int, int], None] | None = None) -> tuple[Prediction, ...]:
    """Return the prediction for every run; ``progress`` is told how many of how many are done."""
    result = []
    for index, run in enumerate(runs):
        result.append(predict(run))
        if progress is not None:
            progress(index + 1, len(runs))
    return tuple(result)


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return errors per source and in all, confusion of fitting, and how plans of one problem are ordered."""
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        sources[prediction.run.source].append(prediction)
    return {
        "sources": {name: _of_source(rows) for name, rows in sorted(sources.items())},
        "all": _of_source(predictions),
        "groups": _groups(predictions),
        "calibrated_on": _calibrated_on(predictions),
    }


def _of_source(rows: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "predicted": sum(not row.skipped for row in rows),
        "skipped": [{"row_id": row.run.row_id, "reason": row.skipped} for row in rows if row.skipped],
        "step_time": errors(row.error for row in rows),
        "memory": errors(row.memory_error for row in rows),
        "out_of_memory": _confusion(rows),
    }


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


def _confusion(rows: Sequence[Prediction]) -> dict[str, int]:
    judged = [(bool(row.fits), row.run.status) for row in rows if row.fits is not None]
    return {
        "true_fit": sum(fits and status == "ok" for fits, status in judged),
        "false_fit": sum(fits and status == "oom" for fits, status in judged),
        "true_oom": sum(not fits and status == "oom" for fits, status in judged),
        "false_oom": sum(not fits and status == "ok" for fits, status in judged),
    }


def _groups(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in predictions:
        if row.step_time and row.run.step_time:
            groups[(row.run.source, row.run.group)].append((row.step_time, row.run.step_time))
    return [
        {"source": source, "group": group, "plans": len(pairs), "regret": regret(pairs), "tau": kendall_tau(pairs)}
        for (source, group), pairs in sorted(groups.items())
        if len(pairs) >= LEAST_PLANS
    ]


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how much longer the plan predicted fastest took than the fastest, from (predicted, measured).

    >>> regret([(1.0, 2.2), (2.0, 2.0)])
    0.1
    """
    chosen = min(pairs)[1]
    return round(chosen / min(measured for _, measured in pairs) - 1, 12)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-a of (predicted, measured): 1 same order, -1 opposite.

    >>> kendall_tau([(1, 1), (2, 3), (3, 2)])
    0.333333333333
    """
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return round(fmean(signs), 12) if signs else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _calibrated_on(predictions: Sequence[Prediction]) -> dict[str, dict[str, str]]:
    """Return for each machine that was simulated where its figures come from."""
    from simulator.catalog import accelerator, accelerator_names, cluster_names, sources

    clusters = {row.run.scenario.problem.cluster for row in predictions if row.run.scenario}
    devices = {cluster.accelerator for cluster in clusters}
    names = [name for name in cluster_names() if name in {cluster.name for cluster in clusters}]
    names += [name for name in accelerator_names() if accelerator(name) in devices]
    return {name: dict(sources(name)) for name in names}


COLUMNS = (
    "row_id",
    "predicted_step_time_s",
    "measured_step_time_s",
    "predicted_peak_memory_gib",
    "measured_peak_memory_gib",
    "predicted_fits",
    "measured_status",
    "assumptions",
)


def to_csv(predictions: Sequence[Prediction]) -> str:
    """Return one line a run; a skipped one has its reason among the assumptions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in predictions:
        notes = (f"skipped: {row.skipped}",) if row.skipped else row.run.assumed
        writer.writerow(
            [
                row.run.row_id,
                _cell(row.step_time),
                _cell(row.run.step_time),
                _cell(row.peak_memory, GIB),
                _cell(row.run.peak_memory, GIB),
                "" if row.fits is None else str(row.fits).lower(),
                row.run.status,
                "; ".join(notes),
            ]
        )
    return text.getvalue()


def _cell(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.6g}"
