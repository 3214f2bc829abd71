"""Chooses the plan of a run of a user's file, and predicts its step: `plan_run`.

It measures the module for some seconds in processes of their own, captures it in this one, and has the simulator try
every layout that can run. Only a first batch that no rank could train on ends a run here: where a prediction is
impossible, the reason is told instead.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from meshwise.executor.device import CPU, CUDA, count_gpus
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks
from meshwise.executor.module_measures.figures import ModuleFigures, figures_file, write_start
from meshwise.executor.modules.layout import CutAxes, ModuleLayout
from meshwise.executor.recording.rank_files import UserError, make_teller, read_errors
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.module_plans.choosing import PlannedRun, choose, first_line, predict_layout
from meshwise.scenarios.module_plans.cut_plans import choose_cut_plans
from meshwise.scenarios.module_plans.prediction import ModuleModel, build_model
from meshwise.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from meshwise.executor.module_measures.first_batch import FirstBatch
    from meshwise.simulator.operator_graph import OperatorGraph

WORKER = "meshwise.executor.module_measures.worker"
CALIBRATION_SECONDS = 3.0
"""Seconds of a calibration, without those to start its processes."""
MOST_EARLY = 8
"""Ranks that are started at most before the batch has shown how many of them divide it."""
BUSY = 0.3
"""Part of all cores that other work wants, from which it is told."""
TELLING = 0.05
"""Seconds between two looks at what ranks are doing."""

TABLES_LINE = "rows that ranks look up on each other depend on the data, which is not measured: no time and no memory"

Report = Callable[[str], None]


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
    checkpoints: Path | None = None,
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
    checkpoints
        Those of which the run goes on from the newest; ``None`` for a new run.

    Raises
    ------
    UserError
        Where the file has no first batch, the plan does not divide it, or checkpoints are another module's.
    """
    default, load = layout or job.layout, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = count_processes(CPU) if job.device == CPU else 0
    calibrates = calibrates and not default.cuts_tables
    guess = default.num_ranks if layout is not None else processes or count_processes(job.device)
    with RankStarter(job, report) as starter:
        if calibrates and guess <= MOST_EARLY:
            starter.start(guess)  # torch is imported there and here at the same time
        report("reading the first batch")
        try:
            from meshwise.executor.module_measures.first_batch import FirstBatch  # needs torch

            first = FirstBatch(job)
            batch = first.samples
            if layout is not None:
                first.require_parts(layout)
            if checkpoints is not None:
                first.require_checkpoint(checkpoints)
        except UserError:  # that of every rank, before any has started to train
            raise
        except Exception as error:  # what fails here must not fail the run, which tells of its own faults
            return PlannedRun(default, failure=first_line(error))
        if default.cuts_tables:
            return PlannedRun(default, tokens=first.tokens, failure=TABLES_LINE)
        counts = (
            [default.num_ranks] if layout is not None else list_numbers(batch, processes, count_processes(job.device))
        )
        default = layout or ModuleLayout(max(counts))
        try:
            measuring = starter if calibrates else None
            model = _model_module(first, default, counts, measuring, report, searches=layout is None)
            report("comparing plans")
            if layout is not None:
                planned = predict_layout(model, layout, first.tokens)
            else:
                planned = choose(model, counts, first.tokens, require=partial(require_cuts, job))
            remarks = list_remarks(load, cores, planned.layout.num_ranks) if calibrates else ()
            return replace(planned, assumptions=(*planned.assumptions, *remarks))
        except Exception as error:
            remarks = list_remarks(load, cores, default.num_ranks) if layout is not None else ()
            return PlannedRun(default, tokens=first.tokens, assumptions=remarks, failure=first_line(error))


def list_remarks(load: float, cores: int, num_ranks: int) -> tuple[str, ...]:
    """Return what makes measured times of a machine's cores other than those of the run, in words.

    Parameters
    ----------
    load
        Processes that wanted a core before the module was measured, on average over a minute.
    cores
        Of the machine; 0 where it computes on other devices.

    >>> list_remarks(3.0, 2, 2)
    ('machine: other work wanted 3.0 of 2 cores before: steps may take otherwise',)
    >>> list_remarks(0.1, 2, 4)
    ('machine: 4 ranks share 2 cores: steps may take otherwise than predicted',)
    """
    remarks = []
    if cores and load > BUSY * cores:
        remarks.append(f"machine: other work wanted {load:.1f} of {cores} cores before: steps may take otherwise")
    if cores and num_ranks > cores:
        remarks.append(f"machine: {num_ranks} ranks share {cores} cores: steps may take otherwise than predicted")
    return tuple(remarks)


def require_cuts(job: TrainJob, layout: ModuleLayout) -> None:
    """Raise `ValueError` where the module of a job cannot be cut as a layout says."""
    from meshwise.executor.user_training.cuts import capture_job, require_cut_optimizer  # needs torch

    require_cut_optimizer(job)
    capture_job(replace(job, layout=layout))


def list_numbers(batch: int, processes: int | None, devices: int) -> list[int]:
    """Return the numbers of ranks among which a search chooses: the one asked for, else all that divide the batch.

    >>> list_numbers(12, None, 4)
    [1, 2, 3, 4]
    >>> list_numbers(12, 5, 4)
    [5]
    """
    return [processes] if processes is not None else [n for n in range(1, devices + 1) if batch % n == 0]


def _model_module(
    first: "FirstBatch",
    default: ModuleLayout,
    counts: Sequence[int],
    starter: "RankStarter | None",
    report: Report,
    *,
    searches: bool,
) -> ModuleModel:
    """Return the module as the simulator sees it, measured by ranks that start while it is captured.

    Parameters
    ----------
    default
        Its plan says how operators are cut, where it has one.
    counts
        Numbers of ranks.
    searches
        Whether operators may be cut over parts of these.
    """
    batch = first.samples
    if starter is not None:
        # each rank measures with its own samples
        starter.start(max(n for n in range(1, default.num_ranks + 1) if default.num_ranks % n == 0 and batch % n == 0))
    report("capturing the module")
    captured: OperatorGraph | None = None
    why_not = ""
    try:
        captured = first.capture()
    except ValueError as error:
        why_not = first_line(error)
    cuts: dict[CutAxes, Plan] = {}
    if default.plan is not None:
        cuts[default.cut_axes] = default.plan
    elif captured is not None and searches:
        cuts = choose_cut_plans(captured, batch, counts)
    figures = None if starter is None else starter.measure(cuts.values())
    model = build_model(figures, captured, batch, first.job.precision, first.job.device, why_not)
    return replace(model, has_weight=captured is not None and first.has_weight, cut_plans=cuts)


class RankStarter:
    """Starts the ranks that measure a module, which wait until they are told to begin.

    It is a context, which ends them.
    """

    def __init__(self, job: TrainJob, report: Report, seconds: float = CALIBRATION_SECONDS) -> None:
        self.job, self.report, self.seconds = job, report, seconds
        self.num_ranks = 0
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._ranks: Future[None] | None = None
        self._is_stopped = Event()

    def __enter__(self) -> "RankStarter":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, num_ranks: int) -> None:
        """Start so many ranks, unless that many are there already."""
        if num_ranks == self.num_ranks:
            return
        self.stop()
        self.num_ranks, self._is_stopped = num_ranks, Event()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwise-")))
        path = replace(self.job, layout=ModuleLayout(num_ranks)).write(self._folder)
        self._ranks = self._stack.enter_context(ThreadPoolExecutor(1)).submit(
            self._run, path, num_ranks, self._is_stopped
        )

    def stop(self) -> None:
        """End the ranks."""
        self._is_stopped.set()
        self._stack.close()
        self.num_ranks = 0

    def measure(self, plans: Iterable[Plan] = ()) -> ModuleFigures:
        """Return what the module was measured to take, now that nothing else runs.

        Plans cut operators, each over another number of ranks.

        Raises
        ------
        ValueError
            Where a rank fails.
        """
        assert self._ranks is not None and self._folder is not None
        teller = make_teller(self._folder, lambda operation: self.report(f"measuring: {operation}"))
        write_start(self._folder, plans)
        while not self._ranks.done():
            teller()
            wait([self._ranks], TELLING)
        try:
            self._ranks.result()
        except ExecutionError as error:
            failures = sorted(read_errors(self._folder, self.num_ranks).values(), key=lambda failure: failure.time)
            texts = [failure.user_text for failure in failures if failure.user_text]
            raise ValueError(texts[0] if texts else str(error)) from error
        return ModuleFigures.read(figures_file(self._folder, 0))

    def _run(self, path: Path, num_ranks: int, is_stopped: Event) -> None:
        def poll() -> None:
            if is_stopped.is_set():
                raise ExecutionError("the ranks that measure are no longer needed")

        arguments = [str(path), str(self.seconds)]
        launch_ranks(WORKER, arguments, path.parent, num_ranks, timeout=self.job.timeout, poll=poll)
