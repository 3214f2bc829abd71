"""Trains a user's file on this host under a layout, one process a rank, and returns what was measured."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import NamedTuple

from meshwise.executor.device import require_device
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks, require_torch
from meshwise.executor.launch.run import Progress, compute_typical_time, log_steps
from meshwise.executor.recording.rank_files import UserError, read_errors
from meshwise.executor.user_training.job import CHECKPOINTS, WEIGHTS, TrainJob, facts_file, metrics_file
from meshwise.simulator.brief import brief_repr

WORKER = "meshwise.executor.user_training.worker"
VERIFY = "verify"
"""The folder of a run's verification, inside the folder of the run."""
MISMATCH = "collective mismatch"
"""What gloo says where ranks exchange different numbers of bytes."""
VERIFIED_STEPS = 3
TOLERANCE = 1e-9
"""Fraction by which losses and weights in fp64 may differ from those of one process."""


class DifferenceError(RuntimeError):
    """A run under a plan that does not compute what one process computes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences of a run in fp64 from one process: of losses, and of weights by name.

    ``tolerance`` is up to which they are rounding.
    """

    loss: float
    weights: float
    worst_name: str = ""
    tolerance: float = TOLERANCE

    @property
    def is_equal(self) -> bool:
        """Whether both are as small as rounding is."""
        return self.loss <= self.tolerance and self.weights <= self.tolerance


@dataclass(frozen=True, slots=True)
class TrainRun:
    """The measurements of a run of a user's file.

    Parameters
    ----------
    first_step
        Steps that the run went on from.
    losses
        Those of the steps of this run.
    step_times
        Seconds of every step on its slowest rank, with the time to read the batch.
    samples
        Samples of a step on all ranks.
    parameters, blocks
        Elements of the module's parameters, and its number of blocks.
    peak_memory
        Most bytes of tensors on a GPU; ``None`` on cores.
    host_memory
        Most bytes that a rank's process held in main memory.
    """

    job: TrainJob
    first_step: int
    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    samples: int
    parameters: int
    blocks: int
    peak_memory: float | None
    host_memory: float
    checkpoints: Path
    weights: Path
    difference: Difference | None = None

    __repr__ = brief_repr("losses", "step_time")

    @property
    def step_time(self) -> float:
        """Median seconds of the steps after the first two."""
        return compute_typical_time(self.step_times)


def train(
    job: TrainJob, folder: Path, *, verify: bool = False, replace_run: bool = False, progress: Progress | None = None
) -> TrainRun:
    """Train a user's file and return what was measured.

    Parameters
    ----------
    folder
        Folder for the job, ``metrics.jsonl`` with a line a step, checkpoints and the weights at the end.
    verify
        Whether the first steps are made in fp64 beforehand, under the layout and in one process, and compared.
    replace_run
        Whether the checkpoints of an earlier run in the folder are removed; else a run that does not go on from them
        is refused.
    progress
        Called with (step, loss, seconds) after every step.

    Raises
    ------
    ValueError
        Where the file, its data or the checkpoint do not serve, or the folder has another run.
    ExecutionError
        Where a rank fails.
    DifferenceError
        Where the ranks do not compute what one process computes; the run was not started.
    """
    require_torch()
    require_device(job.device, job.layout.num_ranks)
    first_step = _prepare_folder(job, folder, replace_run=replace_run)
    difference = verify_job(job, folder / VERIFY) if verify else None
    if difference is not None and not difference.is_equal:
        raise DifferenceError(
            f"the ranks compute what one process does, met losses {difference.loss:.1e} and weights "
            f"{difference.weights:.1e} apart ({difference.worst_name}); random draws in forward or "
            "data, other than of dropout modules, make them differ too"
        )
    rates: dict[int, float] = {}
    log_step = log_steps(folder, first_step, rates.__getitem__, progress)
    _launch(job, folder, log_step, first_step, rates)
    return _collect(job, folder, first_step, difference)


def _prepare_folder(job: TrainJob, folder: Path, *, replace_run: bool) -> int:
    """Return the steps that are done; a folder has the checkpoints of one run only."""
    from meshwise.executor.modules.states import find_newest, list_checkpoints, read_step  # needs torch

    checkpoints = folder / CHECKPOINTS
    if job.resume:
        return read_step(find_newest(checkpoints))
    if names := list_checkpoints(checkpoints):
        if not replace_run:
            met = f"met {names[-1]} in {checkpoints}"
            raise UserError(f"--out: a new run has a folder without checkpoints, {met}; nearest: --resume or --replace")
        shutil.rmtree(checkpoints)
    return 0


def _launch(
    job: TrainJob,
    folder: Path,
    progress: Progress | None = None,
    first_step: int = 0,
    rates: dict[int, float] | None = None,
) -> None:
    """Run the ranks of a job; ``rates`` gets the learning rate of every step before ``progress`` is told of it."""
    path = job.write(folder)
    poll = _build_poll(job, folder, progress, first_step, {} if rates is None else rates)
    try:
        launch_ranks(WORKER, [str(path.resolve())], folder, job.layout.num_ranks, timeout=job.timeout, poll=poll)
    except ExecutionError as error:
        failures = sorted(read_errors(folder, job.layout.num_ranks).values(), key=lambda failure: failure.time)
        if failures and failures[0].user_text:
            raise UserError(failures[0].user_text) from error
        if job.layout.zero and MISMATCH in str(error):
            cause = "ranks ran different parts of the module, which the first batch had not shown"
            raise ExecutionError(f"{cause}; nearest: zero=0. {error}") from error
        raise
    finally:
        poll()


def _build_poll(
    job: TrainJob, folder: Path, progress: Progress | None, first_step: int, rates: dict[int, float]
) -> Callable[[], None]:
    num_told = 0

    def poll() -> None:
        nonlocal num_told
        if progress is not None:
            rows = list(_read_steps(job, folder))
            for number, row in enumerate(rows[num_told:], first_step + num_told):
                rates[number] = row.learning_rate
                progress(number, row.loss, row.seconds)
            num_told = len(rows)

    return poll


class _Row(NamedTuple):
    """A step of all ranks: its loss, the seconds of the slowest rank, all samples, and the learning rate."""

    loss: float
    seconds: float
    samples: int
    learning_rate: float


def _read_steps(job: TrainJob, folder: Path) -> Iterator[_Row]:
    """Yield every step that all ranks have finished."""
    rank_rows = []
    for rank in range(job.layout.num_ranks):
        path = metrics_file(folder, rank)
        text = path.read_text("utf-8") if path.exists() else ""
        rank_rows.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
    for rows in zip(*rank_rows, strict=False):
        seconds = max(row["seconds"] for row in rows)
        samples = sum(row["samples"] for row in rows) // job.layout.tensor
        yield _Row(rows[0]["loss"], seconds, samples, rows[0]["learning_rate"])


def _collect(job: TrainJob, folder: Path, first_step: int, difference: Difference | None) -> TrainRun:
    rows = list(_read_steps(job, folder))
    facts = [json.loads(facts_file(folder, rank).read_text()) for rank in range(job.layout.num_ranks)]
    peaks = [rank_facts["peak"] for rank_facts in facts if "peak" in rank_facts]
    return TrainRun(
        job,
        first_step,
        tuple(row.loss for row in rows),
        tuple(row.seconds for row in rows),
        rows[0].samples,
        facts[0]["parameters"],
        facts[0]["blocks"],
        max(peaks) if peaks else None,
        max(rank_facts["host"] for rank_facts in facts),
        folder / CHECKPOINTS,
        folder / WEIGHTS,
        difference,
    )


def verify_job(job: TrainJob, folder: Path) -> Difference:
    """Return how far the first steps of a job under its layout, in fp64, are from those of one process."""
    import torch

    from meshwise.executor.user_training.own_casts import SINGLE_TOLERANCE  # needs torch
    from meshwise.executor.user_training.training import train_plainly

    check = replace(
        job,
        precision="fp64",
        steps=min(job.steps, VERIFIED_STEPS),
        resume=False,
        without_dropout=True,
        checkpoint_every=-1,
    )
    with redirect_stdout(sys.stderr):  # the user's file may print
        expected_losses, expected_weights, has_cast = train_plainly(check)
    _launch(check, folder)
    losses = [row.loss for row in _read_steps(check, folder)]
    weights = torch.load(folder / WEIGHTS / "weights.pt", weights_only=True)
    pairs = zip(losses, expected_losses, strict=True)
    loss_difference = find_largest(abs(loss - expected) / max(abs(expected), 1e-12) for loss, expected in pairs)
    if missing_names := set(expected_weights) - set(weights):
        raise DifferenceError(f"the weights of both runs have equal names, met no {', '.join(sorted(missing_names))}")
    differences = {
        name: float((weights[name] - tensor).double().abs().max() / tensor.double().abs().max().clamp(min=1e-12))
        for name, tensor in expected_weights.items()
        if tensor.numel()
    }
    weights_difference = find_largest(differences.values())
    worst_name = next((name for name, value in differences.items() if not value < weights_difference), "")
    tolerance = SINGLE_TOLERANCE if has_cast else TOLERANCE
    return Difference(loss_difference, weights_difference, worst_name, tolerance)


def find_largest(values: Iterable[float]) -> float:
    """Return the largest of some differences, which is infinite where one is no number.

    >>> find_largest([0.5, float("nan"), 0.25])
    inf
    """
    return max((inf if isnan(value) else value for value in values), default=0.0)
