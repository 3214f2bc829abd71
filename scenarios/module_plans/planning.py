"""Chooses the plan of a run of a user's file, and predicts its step: `plan_run`.

It measures the module for some seconds in processes of their own, captures it in this one, and has the simulator try
every layout that can run. Nothing here ends a run: where a prediction is impossible, the reason is told instead.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.executor.device import CUDA, count_gpus
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks
from meshwise.executor.module_measures.figures import ModuleFigures, figures_file
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.rank_files import make_teller, read_errors
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.module_plans.layouts import Choices, find_choices, list_layouts, list_refusals
from meshwise.scenarios.module_plans.prediction import (
    ModuleModel,
    Prediction,
    StepPredictor,
    build_model,
    find_fastest,
)
from meshwise.simulator.brief import brief_repr

if TYPE_CHECKING:
    from meshwise.executor.module_measures.first_batch import FirstBatch
    from meshwise.simulator.operator_graph import OperatorGraph

WORKER = "meshwise.executor.module_measures.worker"
CALIBRATION_SECONDS = 8.0
"""Seconds of a calibration, without those to start its processes."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The plan of a run and what it is predicted to take.

    Parameters
    ----------
    prediction, runner_up
        Of the plan, and of the next best of a search; ``None`` where there are none.
    num_plans
        Plans that were compared; 1 for a plan that was given.
    tokens
        Tokens of a step, where the data are tokens.
    assumptions
        What the prediction rests on, or why there is none.
    """

    layout: ModuleLayout
    prediction: Prediction | None = None
    runner_up: Prediction | None = None
    num_plans: int = 0
    tokens: int | None = None
    assumptions: tuple[str, ...] = ()

    __repr__ = brief_repr("layout", "prediction", "num_plans")

    def list_reasons(self) -> list[str]:
        """Return why the plan was chosen, a line each."""
        if self.prediction is None or self.num_plans < 2 or self.runner_up is None:
            return []
        runner_up, chosen = self.runner_up, self.prediction
        if not chosen.fits:
            return [f"the least memory of {self.num_plans} plans, none of which fits"]
        compared = "does not fit" if not runner_up.fits else _compare(runner_up.step_time, chosen.step_time)
        return [f"fastest of {self.num_plans} plans; next {runner_up.layout.describe()}, {compared}"]


def _compare(slower: float, faster: float) -> str:
    """Return how much slower a time is.

    >>> _compare(1.25, 1.0)
    '25 % slower'
    """
    return f"{slower / faster - 1:.0%} slower".replace("%", " %")


def count_processes(device: str) -> int:
    """Return the ranks that this machine has devices for: its GPUs, or the cores that this process may use."""
    if device == CUDA:
        return max(count_gpus(), 1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_run(
    job: TrainJob,
    *,
    layout: ModuleLayout | None,
    processes: int | None,
    calibrates: bool,
    report: Report = lambda text: None,
) -> PlannedRun:
    """Return the plan of a run with its prediction.

    Parameters
    ----------
    job
        The run; its own layout counts where nothing can be predicted.
    layout
        The plan that was given; ``None`` to search for one.
    processes
        Ranks of a searched plan; ``None`` for as many as the machine has, or fewer where that is faster.
    calibrates
        Whether the module is measured for some seconds.
    report
        Called with a word about what is done next.
    """
    if layout is not None and layout.tensor > 1:
        return PlannedRun(layout, assumptions=("not predicted: operators are cut over ranks",))
    report("reading the first batch")
    try:
        from meshwise.executor.module_measures.first_batch import FirstBatch  # needs torch

        first = FirstBatch(job)
        batch = first.samples
    except Exception as error:
        return PlannedRun(layout or job.layout, assumptions=(f"not predicted: {_tell(error)}",))
    numbers = [layout.num_ranks] if layout is not None else list_numbers(batch, processes, count_processes(job.device))
    default = layout or ModuleLayout(max(numbers))
    try:
        ranks = default.data if batch % default.num_ranks else default.num_ranks  # each measures with its own samples
        model = _model_module(
            replace(job, layout=ModuleLayout(ranks)), first, batch, calibrates=calibrates, report=report
        )
        report("comparing plans")
        return choose(model, layout, numbers, tokens=first.tokens)
    except Exception as error:  # what fails here must not fail the run, which tells of its own faults
        return PlannedRun(default, tokens=first.tokens, assumptions=(f"not predicted: {_tell(error)}",))


def list_numbers(batch: int, processes: int | None, devices: int) -> list[int]:
    """Return the numbers of ranks among which a search chooses: the one asked for, else all that divide the batch.

    >>> list_numbers(12, None, 4)
    [1, 2, 3, 4]
    >>> list_numbers(12, 5, 4)
    [5]
    """
    return [processes] if processes is not None else [n for n in range(1, devices + 1) if batch % n == 0]


def choose(
    model: ModuleModel, layout: ModuleLayout | None, numbers: Sequence[int], tokens: int | None = None
) -> PlannedRun:
    """Return the fastest layout that fits, or the one that was given, with its prediction."""
    predictor = StepPredictor(model)
    if layout is not None:
        return PlannedRun(layout, predictor.predict(layout), None, 1, tokens, model.assumptions)
    num_layers = sum(block.layer for block in model.graph.blocks)
    choices = find_choices(numbers, model.figures, num_layers, is_captured=model.is_captured)
    predictions = [predictor.predict(candidate) for candidate in list_layouts(model.batch, choices)]
    if not predictions:
        raise ValueError(f"no plan of {_describe_numbers(choices)} divides a batch of {model.batch}")
    best, *others = find_fastest(predictions)
    if not best.fits:
        best, *others = sorted(predictions, key=lambda prediction: prediction.peak_memory)
    runner_up = others[0] if others else None
    refusals = () if model.figures is None else tuple(list_refusals(model.figures))
    return PlannedRun(best.layout, best, runner_up, len(predictions), tokens, (*model.assumptions, *refusals))


def _describe_numbers(choices: Choices) -> str:
    return f"{' or '.join(map(str, choices.data))} ranks"


def _model_module(job: TrainJob, first: "FirstBatch", batch: int, *, calibrates: bool, report: Report) -> ModuleModel:
    report("capturing the module")
    captured: OperatorGraph | None = None
    why_not = ""
    try:
        captured = first.capture()
    except ValueError as error:
        why_not = _tell(error)
    figures = measure(job, report) if calibrates else None
    return build_model(figures, captured, batch, job.precision, job.device, why_not)


def measure(job: TrainJob, report: Report, seconds: float = CALIBRATION_SECONDS) -> ModuleFigures:
    """Return what the module of a job was measured to take, on as many ranks as its layout has.

    Raises
    ------
    ValueError
        Where a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder, num_ranks = Path(name), job.layout.data
        path = job.write(folder)
        teller = make_teller(folder, lambda operation: report(f"measuring: {operation}"))
        try:
            launch_ranks(WORKER, [str(path), str(seconds)], folder, num_ranks, timeout=job.timeout, poll=teller)
        except ExecutionError as error:
            failures = sorted(read_errors(folder, num_ranks).values(), key=lambda failure: failure.time)
            texts = [failure.user_text for failure in failures if failure.user_text]
            raise ValueError(texts[0] if texts else str(error)) from error
        return ModuleFigures.read(figures_file(folder, 0))


def _tell(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
