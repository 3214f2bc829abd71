"""Predicted against measured over many runs: every row is predicted or skipped with a reason."""

import csv
import gc
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scenarios.errors import ScenarioError
from scenarios.loader import load
from scenarios.prediction_interval import Interval, category, peak_memory_interval, step_time_interval
from scenarios.published import GIB, Run, read_runs
from simulator.brief import brief
from simulator.collection import no_collection

ROWS_BETWEEN_COLLECTIONS = 500
"""Runs after which cyclic garbage is collected: often enough for memory, seldom enough for time."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run with what the simulator says of it: seconds, bytes, whether it fits; None where it was skipped."""

    run: Run
    step_time: float | None = None
    peak_memory: float | None = None
    fits: bool | None = None
    skipped: str = ""

    __repr__ = brief()

    @property
    def error(self) -> float | None:
        """Relative error of the step time, (predicted - measured) / measured."""
        return _error(self.step_time, self.run.step_time)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory."""
        return _error(self.peak_memory, self.run.peak_memory)

    @property
    def step_time_interval(self) -> Interval | None:
        """Seconds between which 90 % of runs like it take."""
        if self.step_time is None or self.run.scenario is None:
            return None
        scenario = self.run.scenario
        return step_time_interval(self.step_time, category(scenario.problem.cluster, scenario.assumptions))

    @property
    def peak_memory_interval(self) -> Interval | None:
        """Bytes between which 90 % of peaks lie."""
        return None if self.peak_memory is None else peak_memory_interval(self.peak_memory)


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
    from scenarios.rows.costs import fits, peak_memory_of, seconds_of

    if run.scenario is None:
        return Prediction(run, skipped=run.skipped)
    problem, plan = run.scenario.problem, run.scenario.chosen()
    try:
        seconds = seconds_of(problem, plan)
    except ValueError as error:
        return Prediction(run, skipped=str(error))
    apart = 0.0 if run.with_context else problem.cluster.accelerator.reserved
    return Prediction(run, seconds, peak_memory_of(problem, plan) - apart, fits(problem, plan))


def predict_all(runs: Sequence[Run], progress: Callable[[int, int], None] | None = None) -> tuple[Prediction, ...]:
    """Return the prediction for every run; ``progress`` is told how many of how many are done."""
    result: dict[int, Prediction] = {}
    alike = sorted(range(len(runs)), key=lambda index: (runs[index].source, runs[index].group))
    with no_collection():
        for done, index in enumerate(alike, start=1):
            result[index] = predict(runs[index])
            if done % ROWS_BETWEEN_COLLECTIONS == 0:
                gc.collect()
            if progress is not None:
                progress(done, len(runs))
    return tuple(result[index] for index in range(len(runs)))


COLUMNS = (
    "row_id",
    "predicted_step_time_s",
    "measured_step_time_s",
    "predicted_peak_memory_gib",
    "measured_peak_memory_gib",
    "predicted_fits",
    "measured_status",
    "assumptions",
    "step_time_low_s",
    "step_time_high_s",
    "peak_memory_low_gib",
    "peak_memory_high_gib",
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
                *(_cell(end) for end in row.step_time_interval or (None, None)),
                *(_cell(end, GIB) for end in row.peak_memory_interval or (None, None)),
            ]
        )
    return text.getvalue()


def _cell(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.6g}"
