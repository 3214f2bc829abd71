"""Predictions of many measured runs, and their errors; a run that cannot be predicted is skipped with a reason.

The summary has the errors of time and memory, whether plans fit, and how plans of one problem are ordered. Tags say
which techniques a plan uses, so that an error can be traced to a part of the simulator.
"""

import csv
import gc
import io
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

from meshwise.reports.pictures.accuracy import AccuracyRow, draw_accuracy, draw_errors_by_class
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.intervals import Interval, find_category, peak_memory_interval, step_time_interval
from meshwise.scenarios.loader import load
from meshwise.scenarios.published.estimates import (
    estimate_step_time,
    forecast_run,
    share_costs,
    shorten_plan,
)
from meshwise.scenarios.published.row import ALLOCATED_LAST, DEVICE, GIB, RESERVED
from meshwise.scenarios.published.runs import GROUP, Run, read_runs
from meshwise.scenarios.published.vocabulary.publishers import Split, find_publisher
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.catalog import accelerator, accelerator_names, cluster_names, sources
from meshwise.simulator.program import pause_collection
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute

ROWS_BETWEEN_COLLECTIONS = 500
"""Number of runs after which cyclic garbage is collected: often enough for memory, rarely enough for speed."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run with its predicted step time (s), peak memory (bytes) and whether it fits; None where it was skipped.

    ``peak_memory`` is that of tensors; ``peak_reserved`` and ``peak_device`` are what the allocator reserves for them,
    and all that is taken of the device; ``peak_last`` is that of tensors on the last pipeline rank.
    """

    run: Run
    step_time: float | None = None
    peak_memory: float | None = None
    fits: bool | None = None
    skipped: str = ""
    peak_reserved: float | None = None
    peak_device: float | None = None
    peak_last: float | None = None

    __repr__ = brief_repr()

    @property
    def error(self) -> float | None:
        """Relative error of the step time, (predicted - measured) / measured."""
        return _relative_error(self.step_time, self.run.step_time)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory of the kind that was measured, (predicted - measured) / measured."""
        return _relative_error(self.measured_kind_peak, self.run.peak_memory)

    @property
    def measured_kind_peak(self) -> float | None:
        """The predicted peak memory of the kind that was measured, in bytes."""
        peaks = {RESERVED: self.peak_reserved, DEVICE: self.peak_device, ALLOCATED_LAST: self.peak_last}
        return peaks.get(self.run.memory_kind, self.peak_memory)

    @property
    def step_time_interval(self) -> Interval | None:
        """The 90 % interval of the step time, in seconds."""
        if self.step_time is None or self.run.scenario is None:
            return None
        scenario = self.run.scenario
        cluster = scenario.problem.cluster
        return step_time_interval(self.step_time, find_category(cluster, scenario.assumptions), cluster.calibration)

    @property
    def peak_memory_interval(self) -> Interval | None:
        """The 90 % interval of the peak memory, in bytes."""
        peak = self.measured_kind_peak
        if peak is None or self.run.scenario is None:
            return None
        return peak_memory_interval(peak, self.run.scenario.problem.training.framework)


def _relative_error(predicted: float | None, measured: float | None) -> float | None:
    return (predicted - measured) / measured if predicted and measured else None


def select_split(runs: Sequence[Run], *, judge: bool) -> tuple[Run, ...]:
    """Return the runs of publishers that are kept for the last judgement, or those of all others."""
    return tuple(run for run in runs if (find_publisher(run.source).split is Split.JUDGE) == judge)


def load_runs(path: str | Path, *, strict: bool = False) -> tuple[Run, ...]:
    """Return the runs in a file of rows, or the scenarios with ``measured`` in a file or folder.

    ``strict`` makes words of rows that are not understood faults.
    """
    place = Path(path)
    if place.is_dir():
        files = sorted(place.rglob("*.yaml"))
        if not files:
            raise ValueError(f"{place}: a folder of scenarios holds .yaml files, met none")
        return tuple(_load_scenario_run(file) for file in files)
    return (_load_scenario_run(place),) if place.suffix in (".yaml", ".yml") else read_runs(place, strict=strict)


def _load_scenario_run(file: Path) -> Run:
    name, source = file.stem, file.parent.name or "scenario"
    try:
        scenario = load(file)
    except ScenarioError as error:
        return Run(name, source, name, None, None, "unknown", skipped=str(error.faults[0]))
    reason = "" if scenario.plan and scenario.measured else "the scenario has no plan or nothing measured"
    step_time = scenario.measured.step_time if scenario.measured else None
    return Run(name, source, name, step_time, None, "ok", None if reason else scenario, reason, scenario.assumptions)


def predict(run: Run) -> Prediction:
    """Return the prediction for one run; a plan that does not fit has a step time as well."""
    if run.scenario is None:
        return Prediction(run, skipped=run.skipped)
    problem, plan = run.scenario.problem, run.scenario.choose_plan()
    try:
        seconds = estimate_step_time(problem, plan)
    except ValueError as error:
        return Prediction(run, skipped=str(error))
    memory = forecast_run(problem, plan)
    return Prediction(
        run,
        seconds,
        memory.allocated,
        memory.fits,
        peak_reserved=memory.reserved,
        peak_device=memory.device,
        peak_last=memory.allocated_last,
    )


def predict_all(runs: Sequence[Run], progress: Callable[[int, int], None] | None = None) -> tuple[Prediction, ...]:
    """Return the prediction for every run, in order; ``progress`` gets the number done and the number of all runs."""
    result: dict[int, Prediction] = {}
    grouped_indices = _group_by_problem(runs)
    with pause_collection():
        for num_done, index in enumerate(grouped_indices, start=1):
            result[index] = predict(runs[index])
            if num_done % ROWS_BETWEEN_COLLECTIONS == 0:
                gc.collect()
            if progress is not None:
                progress(num_done, len(runs))
    return tuple(result[index] for index in range(len(runs)))


def _group_by_problem(runs: Sequence[Run]) -> list[int]:
    """Return the places of runs, equal problems and in them equal plans one after the other: they are in the caches."""
    problems: dict[Problem, int] = {}
    plans: dict[Plan, int] = {}

    def rank(index: int) -> tuple[str, int, int]:
        scenario = runs[index].scenario
        if scenario is None:
            return runs[index].source, -1, -1
        problem, plan = share_costs(scenario.problem), shorten_plan(scenario.problem, scenario.choose_plan())
        return runs[index].source, problems.setdefault(problem, index), plans.setdefault(plan, index)

    ranks = [rank(index) for index in range(len(runs))]
    return sorted(range(len(runs)), key=ranks.__getitem__)


COLUMNS = (
    "row_id",
    "predicted_step_time_s",
    "measured_step_time_s",
    "predicted_peak_memory_gib",
    "predicted_peak_reserved_gib",
    "predicted_peak_device_gib",
    "measured_peak_memory_gib",
    "predicted_fits",
    "measured_status",
    "assumptions",
    "step_time_low_s",
    "step_time_high_s",
    "peak_memory_low_gib",
    "peak_memory_high_gib",
    "publisher",
)


def to_csv(predictions: Sequence[Prediction]) -> str:
    """Return a CSV line per run; a skipped run has its reason among the assumptions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in predictions:
        notes = (f"skipped: {row.skipped}",) if row.skipped else row.run.assumed
        writer.writerow(
            [
                row.run.row_id,
                _format_cell(row.step_time),
                _format_cell(row.run.step_time),
                _format_cell(row.peak_memory, GIB),
                _format_cell(row.peak_reserved, GIB),
                _format_cell(row.peak_device, GIB),
                _format_cell(row.run.peak_memory, GIB),
                "" if row.fits is None else str(row.fits).lower(),
                row.run.status,
                "; ".join(notes),
                *(_format_cell(end) for end in row.step_time_interval or (None, None)),
                *(_format_cell(end, GIB) for end in row.peak_memory_interval or (None, None)),
                find_publisher(row.run.source).name,
            ]
        )
    return text.getvalue()


def _format_cell(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.6g}"


def list_techniques(scenario: Scenario) -> tuple[str, ...]:
    """Return the tags of the techniques in a scenario's plan; ``plain`` where it has none."""
    training, blocks, plan = scenario.problem.training, scenario.problem.graph.blocks, scenario.choose_plan()
    tags: dict[str, object] = {
        "dp": plan.data > 1,
        "tp": plan.tensor > 1,
        "pp": plan.pipeline > 1,
        "cp": plan.context > 1,
        "ep": plan.expert > 1,
        "vpp": plan.chunks > 1,
        "sp": plan.sequence_parallel,
        "tp overlap": plan.overlap_tensor,
        f"zero{plan.zero}": plan.zero and plan.data * plan.context > 1,
        "hsdp": plan.replica > 1,
        "recompute": plan.recompute is not Recompute.NONE,
        "offload": plan.offload,
        "fp8": training.precision == "fp8",
        "moe": any(dim == "experts" for block in blocks for op in block.operators for dim, _ in op.dims),
    }
    return tuple(tag for tag, is_used in tags.items() if is_used) or ("plain",)


LEAST_PLANS = 3
"""Fewest measured plans of one problem from which their order is judged."""

SIZES = (1, 8, 64, 512, 4096)
"""Numbers of devices at which a new size class begins."""


def summarize(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors by source, technique, size and overall, and how plans of one problem are ordered."""
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        sources[prediction.run.source].append(prediction)
    return {
        "sources": {name: _summarize_source(rows) for name, rows in sorted(sources.items())},
        "all": _summarize_source(predictions),
        "groups": _judge_groups(predictions),
        "techniques": _summarize_classes(predictions, _list_row_techniques),
        "devices": _summarize_classes(
            predictions, lambda row: (size_class(devices_of(row)),) if row.run.scenario else ()
        ),
        "assumptions": _count_assumptions(predictions),
        "calibrated_on": _list_calibrations(predictions),
    }


def _list_row_techniques(row: Prediction) -> tuple[str, ...]:
    return list_techniques(row.run.scenario) if row.run.scenario else ()


def devices_of(prediction: Prediction) -> int:
    """Return the devices of a run; 0 where it has no scenario."""
    scenario = prediction.run.scenario
    return scenario.choose_plan().mesh.num_ranks if scenario is not None else 0


def size_class(devices: int) -> str:
    """Return the size class of a number of devices.

    >>> size_class(8), size_class(63), size_class(10000)
    ('8-63', '8-63', 'over 4095')
    """
    return size_classes()[bisect(SIZES, max(devices, 1)) - 1]


def size_classes() -> list[str]:
    """Return the names of all size classes, the smallest first."""
    return [*(f"{least}-{after - 1}" for least, after in pairwise(SIZES)), f"over {SIZES[-1] - 1}"]


def _summarize_source(rows: Sequence[Prediction]) -> dict[str, Any]:
    skipped = [row for row in rows if row.skipped]
    return {
        "rows": len(rows),
        "predicted": len(rows) - len(skipped),
        "skipped": [{"row_id": row.run.row_id, "reason": row.skipped} for row in skipped],
        "reasons": dict(Counter(row.skipped for row in skipped).most_common()),
        "step_time": summarize_errors(row.error for row in rows),
        "memory": summarize_errors(row.memory_error for row in rows),
        "out_of_memory": count_confusion(rows),
        "step_time_interval": measure_coverage((row.step_time_interval, row.run.step_time) for row in rows),
        "peak_memory_interval": measure_coverage((row.peak_memory_interval, row.run.peak_memory) for row in rows),
    }


def measure_coverage(pairs: Iterable[tuple[Interval | None, float | None]]) -> dict[str, float | int | None]:
    """Return the number of measured values, the fraction inside their intervals, and the intervals' width.

    ``factor`` is the median ratio of an interval's upper end to its geometric middle, sqrt(high / low).

    >>> measure_coverage([((1.0, 4.0), 3.0), ((1.0, 4.0), 5.0), (None, 1.0)])
    {'count': 2, 'inside': 0.5, 'factor': 2.0}
    """
    known = [(*interval, measured) for interval, measured in pairs if interval and measured]
    if not known:
        return {"count": 0, "inside": None, "factor": None}
    inside = fmean(low <= measured <= high for low, high, measured in known)
    factor = median(sqrt(high / low) for low, high, _ in known)
    return {"count": len(known), "inside": round(inside, 12), "factor": round(factor, 12)}


def group_errors(
    predictions: Sequence[Prediction], classes: Callable[[Prediction], Iterable[str]]
) -> dict[str, list[float]]:
    """Return the errors of step time by class, in order of names; a run may be in several classes."""
    errors_by_class: dict[str, list[float]] = defaultdict(list)
    for row in predictions:
        if row.error is not None:
            for name in classes(row):
                errors_by_class[name].append(row.error)
    return {name: errors_by_class[name] for name in sorted(errors_by_class)}


def _summarize_classes(
    predictions: Sequence[Prediction], classes: Callable[[Prediction], Iterable[str]]
) -> dict[str, dict[str, float | int | None]]:
    return {name: summarize_errors(values) for name, values in group_errors(predictions, classes).items()}


def _count_assumptions(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return every assumption with the number of rows that make it, the most common first."""
    counts = Counter(line for row in predictions if not row.skipped for line in row.run.assumed)
    return [{"assumption": line, "rows": count} for line, count in counts.most_common()]


def summarize_errors(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Return mean, median and largest absolute relative error, and the mean signed one.

    >>> summarize_errors([0.1, -0.3, None])
    {'count': 2, 'mape': 0.2, 'median': 0.2, 'max': 0.3, 'bias': -0.1}
    """
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0, "mape": None, "median": None, "max": None, "bias": None}
    sizes = [abs(value) for value in known]
    numbers = {"mape": fmean(sizes), "median": median(sizes), "max": max(sizes), "bias": fmean(known)}
    return {"count": len(known)} | {name: round(value, 12) for name, value in numbers.items()}


def count_confusion(rows: Sequence[Prediction]) -> dict[str, int]:
    """Return the confusion matrix of predicted fitting against what happened; ``oom`` stands for out of memory."""
    judged = [(bool(row.fits), row.run.status) for row in rows if row.fits is not None]
    return {
        "true_fit": sum(fits and status == "ok" for fits, status in judged),
        "false_fit": sum(fits and status == "oom" for fits, status in judged),
        "true_oom": sum(not fits and status == "oom" for fits, status in judged),
        "false_oom": sum(not fits and status == "ok" for fits, status in judged),
    }


def _judge_groups(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return regret and rank correlation of every group; runs of one plan count once, by their median."""
    groups: dict[tuple[str, str], dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in predictions:
        if row.step_time and row.run.step_time and row.run.status == "ok" and row.run.scenario:
            plan = (row.run.scenario.choose_plan(), row.run.scenario.problem.training.precision)
            groups[(row.run.source, row.run.group)][plan].append((row.step_time, row.run.step_time))
    result = []
    for (source, group), plans in sorted(groups.items()):
        pairs = [(runs[0][0], median(measured for _, measured in runs)) for runs in plans.values()]
        if len(pairs) >= LEAST_PLANS:
            order = {"regret": regret(pairs), "tau": kendall_tau(pairs)}
            result.append({"source": source, "group": group, "plans": len(pairs)} | order)
    return result


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how much longer the plan predicted fastest took than the fastest plan, from (predicted, measured) pairs.

    >>> regret([(1.0, 2.2), (2.0, 2.0)])
    0.1
    """
    chosen_time = min(pairs)[1]
    return round(chosen_time / min(measured for _, measured in pairs) - 1, 12)


def _list_calibrations(predictions: Sequence[Prediction]) -> dict[str, dict[str, str]]:
    """Return the sources of the figures of every simulated machine."""
    clusters = {row.run.scenario.problem.cluster for row in predictions if row.run.scenario}
    devices = {cluster.accelerator for cluster in clusters}
    names = [name for name in cluster_names() if name in {cluster.name for cluster in clusters}]
    names += [name for name in accelerator_names() if accelerator(name) in devices]
    return {name: dict(sources(name)) for name in names}


TECHNIQUES = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "vpp": "interleaved pipeline",
    "sp": "sequence parallel",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
    "hsdp": "ZeRO 3 over groups",
    "moe": "mixture of experts",
    "tp overlap": "tensor overlap",
}
"""Names of the tags of techniques in pictures; other tags are their own names."""


def draw_pictures(predictions: Sequence[Prediction], folder: Path) -> tuple[Path, ...]:
    """Draw the pictures into ``folder`` and return their files; none without a predicted and measured step time."""
    point_rows = list_points(predictions)
    if not point_rows:
        return ()
    errors_by_size = group_errors(predictions, lambda row: (size_class(devices_of(row)),))
    errors_by_technique = group_errors(predictions, _list_row_techniques)
    classes = {
        "source": ("Error by who measured", group_errors(predictions, lambda row: (row.run.source,))),
        "devices": (
            "Error by size of run",
            {f"{name} devices": errors_by_size[name] for name in size_classes() if name in errors_by_size},
        ),
        "technique": (
            "Error by technique",
            {TECHNIQUES.get(name, name): errors for name, errors in errors_by_technique.items()},
        ),
    }
    paths = [folder / "predicted-measured.png"]
    draw_accuracy(point_rows, paths[0])
    for name, (title, errors) in classes.items():
        paths.append(folder / f"error-by-{name}.png")
        draw_errors_by_class(errors, paths[-1], title=title)
    return tuple(paths)


def list_points(predictions: Sequence[Prediction]) -> list[AccuracyRow]:
    """Return a point for every run with a predicted and a measured step time, under the name of its model."""
    return [
        AccuracyRow(row.run.row_id, row.run.source, _find_model(row), row.step_time, row.run.step_time)
        for row in predictions
        if row.step_time and row.run.step_time
    ]


def _find_model(prediction: Prediction) -> str:
    """Return the publisher's name for the model of a run."""
    return prediction.run.group.rsplit(", ", len(GROUP) - 1)[0]
