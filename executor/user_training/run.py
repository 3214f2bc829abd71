"""Trains a user's file on this host under a layout, one process a rank, and returns what was measured."""

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.executor.device import require_device
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks, require_torch
from meshwise.executor.launch.run import compute_typical_time
from meshwise.executor.launch.several_hosts import SCRIPT, Hosts, prepare_hosts
from meshwise.executor.recording.rank_files import UserError, describe_first_failure, read_errors
from meshwise.executor.user_training.job import CHECKPOINTS, WEIGHTS, TrainJob, facts_file
from meshwise.executor.user_training.log import Progress, StepReader, StepRow, log_rows, require_tensorboard
from meshwise.executor.user_training.stopping import StoppedError, StopRequest
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.recomputation import Recompute

if TYPE_CHECKING:
    from meshwise.executor.user_training.verification import Difference

WORKER = "meshwise.executor.user_training.worker"
VERIFY = "verify"
"""The folder of a run's verification, inside the folder of the run."""
MISMATCH = "collective mismatch"
"""What gloo says where ranks exchange different numbers of bytes."""
VERIFIED_STEPS = 3
LOW_PRECISIONS = ("bf16",)
"""Those in which updates are compared too, within a bound."""


@dataclass(frozen=True, slots=True)
class TrainRun:
    """The measurements of a run of a user's file.

    Parameters
    ----------
    first_step
        Steps that the run went on from.
    rows
        The steps of this run.
    parameters, blocks
        Elements of the module's parameters, and its number of blocks.
    peak_memory
        Most bytes of tensors on the device of a rank: on cores those of one step, ``None`` in runs of few steps.
    host_memory
        Most bytes that a rank's process held in main memory.
    whole_reason
        Why ranks that keep parts of the module had the whole in memory at first; empty where they had not.
    tables
        Which embedding tables ranks have parts of, in words; empty where they have all whole.
    """

    job: TrainJob
    first_step: int
    rows: tuple[StepRow, ...]
    parameters: int
    blocks: int
    peak_memory: float | None
    host_memory: float
    checkpoints: Path
    weights: Path
    difference: "Difference | None" = None
    whole_reason: str = ""
    tables: str = ""

    __repr__ = brief_repr("losses", "step_time")

    @property
    def losses(self) -> tuple[float, ...]:
        """Those of the steps."""
        return tuple(row.loss for row in self.rows)

    @property
    def samples(self) -> int:
        """Samples of a step on all ranks."""
        return self.rows[0].samples

    @property
    def tokens(self) -> int | None:
        """Tokens of a step on all ranks; ``None`` where batches are not of token numbers."""
        return self.rows[0].tokens

    @property
    def evaluations(self) -> tuple[StepRow, ...]:
        """The steps after which there was an evaluation."""
        return tuple(row for row in self.rows if row.evaluation)

    @property
    def step_time(self) -> float:
        """Median seconds of the steps after the first two."""
        return compute_typical_time([row.seconds for row in self.rows])


def train(
    job: TrainJob,
    folder: Path,
    *,
    verify: bool = False,
    replace_run: bool = False,
    has_board: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> TrainRun:
    """Train a user's file and return what was measured.

    Parameters
    ----------
    folder
        Folder for the job, ``metrics.jsonl`` with a line a step, checkpoints and the weights at the end.
    verify
        Whether first steps are made beforehand, under the layout and in one process, and compared (`verify_job`).
    replace_run
        Whether the checkpoints of an earlier run in the folder are removed; else a run that does not go on from them
        is refused.
    has_board
        Whether figures are written for TensorBoard too.
    progress
        Called with every step.
    tell
        Called with a message when a signal has come.

    Raises
    ------
    ValueError
        Where the file, its data or the checkpoint do not serve, or the folder has another run.
    ExecutionError
        Where a rank fails.
    StoppedError
        Where Ctrl-C or SIGTERM came: the ranks have ended, with a checkpoint.
    DifferenceError
        Where the ranks do not compute what one process computes; the run was not started.
    """
    require_torch()
    from meshwise.executor.user_training.verification import DifferenceError

    require_device(job.device, job.layout.num_ranks)
    if has_board:
        require_tensorboard()
    first_step = _prepare_folder(job, folder, replace_run=replace_run)
    difference = verify_job(job, folder / VERIFY, tell) if verify else None
    if difference is not None and not difference.is_equal:
        raise DifferenceError(f"the ranks compute what one process does, met {difference.describe()}")
    rows = _launch(job, folder, log_rows(folder, first_step, progress, has_board=has_board), tell=tell)
    return _collect(job, folder, first_step, rows, difference)


def prepare_training(job: TrainJob, folder: Path, hosts: Hosts, *, replace_run: bool = False) -> Path:
    """Write the job of several hosts, which share a folder, and return the script that each runs with its number.

    Raises
    ------
    ValueError
        Where the checkpoint does not serve, the folder has another run, or the port of the rendezvous is busy.
    """
    _prepare_folder(job, folder, replace_run=replace_run)
    return prepare_hosts([(job, folder)], hosts, WORKER)


def collect_training(folder: Path, progress: Progress | None = None, *, has_board: bool = False) -> TrainRun:
    """Return what the ranks of several hosts left in a folder, and write ``metrics.jsonl`` there.

    Raises
    ------
    ValueError
        Where the folder has no run.
    ExecutionError
        Where a rank failed or has not finished, or none has begun.
    """
    path = folder / "job.json"
    if not path.exists():
        raise ValueError(f"{folder}: the folder of a run has a job.json; `meshwise train --rendezvous` writes it")
    job = TrainJob.read(path)
    num_ranks = job.layout.num_ranks
    reader = StepReader(folder, num_ranks, job.layout.data_ranks)
    reader.read_on()
    rows = reader.rows
    if read_errors(folder, num_ranks):
        _require_no_user_error(folder, num_ranks)
        raise ExecutionError(describe_first_failure(folder, num_ranks))
    if not all(facts_file(folder, rank).exists() for rank in range(num_ranks)):
        if not rows:
            script = shlex.quote(str(folder / SCRIPT))
            raise ExecutionError(f"{folder}: no step is done; run `sh {script} NUMBER` on each host, then collect")
        progress_text = f"{rows[-1].step + 1} of {job.steps} steps are done"
        raise ExecutionError(f"{folder}: {progress_text}; a run that was stopped goes on with --resume --rendezvous")
    log_row = log_rows(folder, rows[0].step, progress, has_board=has_board)
    for row in rows:
        log_row(row)
    return _collect(job, folder, rows[0].step, rows, None)


def find_first_step(folder: Path, steps: int, *, resume: bool, replace_run: bool) -> int:
    """Return the steps that are done where a run in a folder begins, of ``steps`` in all.

    Raises
    ------
    UserError
        Where the folder has no checkpoint to go on from, one of the last step, or those of another run.
    """
    from meshwise.executor.modules.states import find_newest, list_checkpoints, read_step, require_steps  # needs torch

    checkpoints = folder / CHECKPOINTS
    if resume:
        first_step = read_step(find_newest(checkpoints))
        require_steps(checkpoints, steps, first_step)
        return first_step
    names = list_checkpoints(checkpoints)
    if names and not replace_run:
        met = f"met {names[-1]} in {checkpoints}"
        raise UserError(f"--out: a new run has a folder without checkpoints, {met}; nearest: --resume or --replace")
    return 0


def _prepare_folder(job: TrainJob, folder: Path, *, replace_run: bool) -> int:
    """Return the steps that are done; a folder has the checkpoints of one run only."""
    first_step = find_first_step(folder, job.steps, resume=job.resume, replace_run=replace_run)
    if not job.resume:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return first_step


def _launch(
    job: TrainJob, folder: Path, progress: Progress | None = None, *, tell: Callable[[str], None] = lambda text: None
) -> list[StepRow]:
    """Run the ranks of a job and return its steps; `StoppedError` where it was asked to end before the last one."""
    path = job.write(folder)
    reader = StepReader(folder, job.layout.num_ranks, job.layout.data_ranks, progress)
    with StopRequest(folder, tell) as request:

        def poll() -> None:
            request.pass_on()
            reader.read_on()

        try:
            launch_ranks(WORKER, [str(path.resolve())], folder, job.layout.num_ranks, timeout=job.timeout, poll=poll)
        except ExecutionError as error:
            _require_no_user_error(folder, job.layout.num_ranks)
            if job.layout.zero and MISMATCH in str(error):
                cause = "ranks ran different parts of the module, which the first batch had not shown"
                raise ExecutionError(f"{cause}; nearest: zero=0. {error}") from error
            raise
        finally:
            reader.read_on()
    if facts_file(folder, 0).exists():
        return reader.rows
    number = request.number or signal.SIGTERM  # or a rank alone got it
    name = signal.Signals(number).name
    if job.is_trial or not reader.rows:
        raise StoppedError(f"{name}: stopped before the first step was done; the same command begins again", number)
    num_steps = reader.rows[-1].step + 1
    raise StoppedError(
        f"{name}: stopped after {num_steps} of {job.steps} steps, with a checkpoint in {folder / CHECKPOINTS}; "
        "the same command with --resume goes on",
        number,
    )


def _require_no_user_error(folder: Path, num_ranks: int) -> None:
    """Raise the first failure of a rank where the user's file, data or options must mend it."""
    failures = sorted(read_errors(folder, num_ranks).values(), key=lambda failure: failure.time)
    if failures and failures[0].user_text:
        raise UserError(failures[0].user_text)


def _collect(
    job: TrainJob, folder: Path, first_step: int, rows: Sequence[StepRow], difference: "Difference | None"
) -> TrainRun:
    facts = [json.loads(facts_file(folder, rank).read_text()) for rank in range(job.layout.num_ranks)]
    peaks = [rank_facts["peak"] for rank_facts in facts if "peak" in rank_facts]
    return TrainRun(
        job,
        first_step,
        tuple(rows),
        facts[0]["parameters"],
        facts[0]["blocks"],
        max(peaks) if peaks else None,
        max(rank_facts["host"] for rank_facts in facts),
        folder / CHECKPOINTS,
        folder / WEIGHTS,
        difference,
        facts[0].get("whole", ""),
        facts[0].get("tables", ""),
    )


def verify_job(job: TrainJob, folder: Path, tell: Callable[[str], None] = lambda text: None) -> "Difference":
    """Return how far the first steps of a job under its layout are from those of one process.

    They are made in fp64, and where the job has a low precision in that too. Where blocks are computed again and have
    dropout, they are compared with kept ones.

    Raises
    ------
    DifferenceError
        Where ranks do not have the same parameters.
    """
    from meshwise.executor.user_training.plain_training import has_dropout, train_plainly, train_rounded  # needs torch
    from meshwise.executor.user_training.verification import compare_draws, compare_exactly, compare_updates

    check = replace(
        job,
        precision="fp64",
        steps=min(job.steps, VERIFIED_STEPS),
        resume=False,
        source=None,
        weights="safetensors",
        is_trial=True,
        without_dropout=True,
        checkpoint_every=0,
        evaluate_every=-1,
    )
    with redirect_stdout(sys.stderr):  # the user's file may print
        plain = train_plainly(check)
        has_draws = job.layout.recomputes and has_dropout(job)
    difference = compare_exactly(_run_trial(check, folder, tell), folder, plain)
    if has_draws and difference.is_equal:
        drawn = replace(check, without_dropout=False)
        kept = replace(drawn, layout=replace(job.layout, recompute=Recompute.NONE))
        again_folder, kept_folder = folder / "recomputed", folder / "kept"
        rows = _run_trial(drawn, again_folder, tell), _run_trial(kept, kept_folder, tell)
        difference = replace(difference, draws=compare_draws(rows, (again_folder, kept_folder)))
    if job.precision in LOW_PRECISIONS and difference.is_equal:
        narrow = replace(check, precision=job.precision, checkpoint_every=1)
        with redirect_stdout(sys.stderr):
            exact = train_plainly(narrow, keeps_steps=True)
            rounded = train_rounded(narrow)
        difference = replace(
            difference, update=compare_updates(_run_trial(narrow, folder, tell), folder, exact, rounded)
        )
    return difference


def _run_trial(job: TrainJob, folder: Path, tell: Callable[[str], None]) -> list[StepRow]:
    """Return the steps of a run whose states are compared; `DifferenceError` where ranks' own differ."""
    from meshwise.executor.recording.copies import find_unequal_copies  # needs torch
    from meshwise.executor.user_training.verification import DifferenceError

    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    rows = _launch(job, folder, tell=tell)
    facts = [json.loads(facts_file(folder, rank).read_text()) for rank in range(job.layout.num_ranks)]
    if names := find_unequal_copies(
        [rank_facts["copies"] for rank_facts in facts], job.layout.shards * job.layout.operator_ranks
    ):
        count = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise DifferenceError(
            f"all ranks have the same values of a parameter or buffer, met others of {names[0]}{count}"
        )
    return rows
