"""Executes a plan on this host and returns the measurements.

The losses of a run are in one file, which grows with the run and which a resumed run continues.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from meshwise.executor.check.verification import Verification, require_equal, verify
from meshwise.executor.device import require_device
from meshwise.executor.job import Job, checkpoints_folder, metrics_file, result_file
from meshwise.executor.launch.launcher import launch_ranks, require_torch
from meshwise.executor.options import DEFAULT_OPTIONS, RunOptions
from meshwise.executor.recording.timeline import read_timeline
from meshwise.executor.supported import BYTE_VOCAB, find_unsupported
from meshwise.executor.training.checkpoint import sweep_partials
from meshwise.executor.training.continuation import prepare_job
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.notebook import to_html
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_size, format_time
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, float, float], None]


def metrics_log(folder: Path) -> Path:
    """Return the file of a run in ``folder`` with one JSON line a step: step, loss, seconds, learning_rate."""
    return folder / "metrics.jsonl"


def log_steps(folder: Path, first_step: int, rate: Callable[[int], float], progress: Progress | None) -> Progress:
    """Return a callback that logs every step and calls ``progress``; old lines from ``first_step`` on are removed.

    ``rate`` returns the learning rate of a step.
    """
    path = metrics_log(folder)
    folder.mkdir(parents=True, exist_ok=True)
    earlier_lines = read_lines_before(path, first_step) if first_step else []
    path.write_text("".join(earlier_lines))

    def log_step(step: int, loss: float, seconds: float) -> None:
        row = {"step": step, "loss": loss, "seconds": seconds, "learning_rate": rate(step)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if progress is not None:
            progress(step, loss, seconds)

    return log_step


def read_lines_before(path: Path, step: int) -> list[str]:
    """Return the lines of a log up to a step, or up to the first broken line."""
    lines: list[str] = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] >= step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            lines.append(line)
    return lines


WARM_UP = 2
VERIFIED_STEPS = 3
VERIFIED_HEAD_DIM, VERIFIED_SEQUENCE = 8, 32
VERIFY = "verify"
"""The folder of a run's verification, inside the folder of the run."""


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a plan on torch.

    Parameters
    ----------
    steps
        Number of steps that were run: all, or those after the resumed checkpoint, which was made at ``first_step``.
    losses
        Mean cross entropy over the global batch, per step.
    step_times
        Seconds of every step, on its slowest rank.
    step_time
        Their median without the first two steps.
    peak_memory
        Largest bytes of tensors held at once by any rank, as torch's allocator reports them: on a GPU in the timed
        steps but the first, on cores in a profiled one.
    host_memory
        Most bytes that any rank used at once on its host.
    reserved_memory
        Most bytes that torch's allocator reserved on any GPU; 0 on cores.
    """

    steps: int
    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    step_time: float
    peak_memory: float
    timeline: Timeline
    verification: Verification | None
    first_step: int = 0
    host_memory: float = 0.0
    reserved_memory: float = 0.0

    __repr__ = brief_repr("steps", "step_time", "peak_memory", "verification")

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a measured span of the last step, as `Timeline.to_pandas` does of a simulated one."""
        return self.timeline.to_pandas()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: losses, times and memory."""
        rows = [
            ("step time", format_time(self.step_time)),
            ("peak memory of a rank", format_size(self.peak_memory)),
            ("loss of the first step", f"{self.losses[0]:.6g}"),
            ("loss of the last step", f"{self.losses[-1]:.6g}"),
            ("equal to one process", "not asked" if self.verification is None else "verified"),
        ]
        return to_html(f"{self.steps} steps from step {self.first_step}", rows)


def execute(
    spec: Transformer,
    training: Training,
    plan: Plan,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    folder: Path,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Run:
    """Execute ``plan`` on this host, one process a rank, and return the measurements of its steps.

    Parameters
    ----------
    folder
        Folder for the job, results, ``metrics.jsonl`` with a line a step, and checkpoints.
    progress
        Called with (step, loss, seconds) after every step.
    warn
        Called with a message for every damaged checkpoint that is passed over.

    Raises
    ------
    ValueError
        Where torch cannot run the plan, GPUs are too few, or data or checkpoint do not fit; nothing has started.
    ExecutionError
        Where a rank fails.
    VerificationError
        Where the ranks do not compute the same as one process; the steps have not begun.
    """
    require_torch()
    require_device(options.device, plan.mesh.num_ranks)
    jobs = make_jobs(spec, training, plan, options, folder=folder, warn=warn)
    verification = run_verification(*jobs[1]) if options.is_verified else None
    job = jobs[0][0]
    log_step = log_steps(
        folder, job.first_step, lambda step: job.learning_rate.rate_at(step, training.optimizer), progress
    )
    try:
        run_jobs(jobs[:1], log_step)
    finally:
        sweep_partials(checkpoints_folder(folder))
    return replace(collect_run(jobs[:1]), verification=verification)


def make_jobs(
    spec: Transformer,
    training: Training,
    plan: Plan,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    folder: Path,
    warn: Callable[[str], None] = lambda text: None,
) -> list[tuple[Job, Path]]:
    """Return the job of a run and, where asked for, the job of its verification, each with its folder.

    ``ValueError`` where torch cannot run the plan, or data or checkpoint do not fit.
    """
    require_supported(spec, training, plan)
    job, damaged_checkpoints = prepare_job(spec, training, plan, options, folder)
    for text in damaged_checkpoints:
        warn(f"passed over: {text}")
    return [(job, folder)] + ([(build_verification_job(job), folder / VERIFY)] if options.is_verified else [])


def collect_run(jobs: Sequence[tuple[Job, Path]]) -> Run:
    """Return the measurements that the ranks of finished jobs wrote; a second job is a verification."""
    (job, folder), *verification_jobs = jobs
    times = read_step_times(job.plan, folder)
    timeline = read_timeline(job.plan, folder)
    # cores have no allocator statistics: their peak is that of the profiler
    return Run(
        steps=len(times),
        losses=read_losses(job.plan, len(times), folder),
        step_times=times,
        step_time=compute_typical_time(times),
        peak_memory=read_gpu_memory(job.plan, folder, "peak") or timeline.peak_memory,
        timeline=timeline,
        verification=compare_job(*verification_jobs[0]) if verification_jobs else None,
        first_step=job.first_step,
        host_memory=read_host_memory(job.plan, folder),
        reserved_memory=read_gpu_memory(job.plan, folder, "reserved"),
    )


def compute_typical_time(times: Sequence[float]) -> float:
    """Return the median seconds of the steps after the first two, or of all where there are no more.

    >>> compute_typical_time((9.0, 9.0, 2.0, 3.0, 1.0))
    2.0
    """
    return median(times[WARM_UP:] or times)


def read_gpu_memory(plan: Plan, folder: Path, statistic: str) -> float:
    """Return the largest ``peak`` or ``reserved`` bytes of the GPU allocator over the ranks of a profiled job.

    It is 0 on cores, for which torch has no such statistics.
    """
    statistics = (result["held"] for result in _read_results(plan, folder))
    return float(max(rank_memory[statistic] if rank_memory else 0 for rank_memory in statistics))


def read_host_memory(plan: Plan, folder: Path) -> float:
    """Return the most bytes that any rank of a profiled job used at once on its host."""
    return float(max(result["host"] for result in _read_results(plan, folder)))


def _read_results(plan: Plan, folder: Path) -> Iterator[dict[str, Any]]:
    for rank in range(plan.mesh.num_ranks):
        yield json.loads(result_file(folder, rank).read_text())


def run_verification(job: Job, folder: Path) -> Verification:
    """Run a verification job and return its differences from one process; ``VerificationError`` where too large."""
    run_jobs([(job, folder)])
    return require_equal(compare_job(job, folder))


def require_supported(spec: Transformer, training: Training, plan: Plan) -> None:
    """Raise ``ValueError`` with every reason why the executor cannot run ``plan``."""
    require_torch()
    if reasons := find_unsupported(spec, training, plan):
        raise ValueError("the executor cannot run this plan: " + "; ".join(reasons))


def run_jobs(jobs: list[tuple[Job, Path]], progress: Progress | None = None) -> None:
    """Run jobs of equally many ranks in order in one set of processes; ``progress`` is told of the first job."""
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    first_job, folder = jobs[0]
    poll = build_poll(first_job.plan, folder, progress, first_job.first_step)
    timeout = max(job.timeout for job, _ in jobs)
    try:
        launch_ranks(
            "meshwise.executor.launch.worker", paths, folder, first_job.plan.mesh.num_ranks, timeout=timeout, poll=poll
        )
    finally:
        poll()  # the last steps, and those before a failure


def build_poll(plan: Plan, folder: Path, progress: Progress | None, first_step: int = 0) -> Callable[[], None]:
    """Return a callback that reports to ``progress`` each step that all ranks have finished since its last call."""
    num_told = 0

    def poll() -> None:
        nonlocal num_told
        if progress is not None:
            steps = _read_steps(plan, folder)
            for step in range(num_told, len(steps)):
                progress(first_step + step, *steps[step])
                num_told = step + 1

    return poll


def build_verification_job(job: Job) -> Job:
    """Return the verification of a job: fp64, the same plan, and a model of smaller widths.

    Layers, heads and microbatches stay, and with them stages and cuts. Heads become at most 8 wide, the feed-forward
    layer at most twice as wide as the hidden one, and sequences at most 32 long, rounded up to what the cuts divide.
    """
    spec, tensor = job.spec, job.plan.tensor
    hidden = spec.heads * min(spec.head_dim, VERIFIED_HEAD_DIM)
    ffn = min(spec.ffn, -(-2 * hidden // tensor) * tensor)
    experts = spec.experts and replace(spec.experts, ffn=min(spec.experts.ffn, -(-2 * hidden // tensor) * tensor))
    vocab = BYTE_VOCAB if BYTE_VOCAB % tensor == 0 else spec.vocab
    parts = tensor * (2 * job.plan.context if job.plan.context > 1 else 1)
    sequence = min(job.training.sequence, -(-VERIFIED_SEQUENCE // parts) * parts)
    return replace(
        job,
        spec=replace(spec, hidden=hidden, ffn=ffn, vocab=vocab, experts=experts),
        training=replace(job.training, precision="fp64", gradient_precision=None, sequence=sequence),
        steps=VERIFIED_STEPS,
        dump=True,
        profile=False,
        checkpoint_every=0,
        resume=None,
        first_step=0,
    )


def compare_job(job: Job, folder: Path) -> Verification:
    """Return the differences of a dumped job from one process."""
    return verify(job, folder, read_losses(job.plan, job.steps, folder))


def read_losses(plan: Plan, steps: int, folder: Path) -> tuple[float, ...]:
    """Return the loss of every step: the mean over the ranks of the last stage, with equal weights."""
    measured_steps = _read_steps(plan, folder)
    return tuple(measured_steps[step][0] for step in range(steps))


def read_step_times(plan: Plan, folder: Path) -> tuple[float, ...]:
    """Return the seconds of every step on its slowest rank."""
    return tuple(seconds for _, seconds in _read_steps(plan, folder))


def _read_steps(plan: Plan, folder: Path) -> list[tuple[float, float]]:
    """Return the loss and the seconds of every step that all ranks have finished."""
    rank_rows = []
    for rank in range(plan.mesh.num_ranks):
        path = metrics_file(folder, rank)
        text = path.read_text() if path.exists() else ""
        # a rank may be writing its last line at this moment
        rank_rows.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
    result = []
    for rows in zip(*rank_rows, strict=False):  # up to the step of the rank that is behind
        losses = [loss for row in rows if (loss := row["loss"]) is not None]
        result.append((sum(losses) / len(losses), max(row["seconds"] or 0.0 for row in rows)))
    return result
