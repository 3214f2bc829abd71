"""Execute a plan on this host and return what was measured."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from executor.job import Job, metrics_file
from executor.launcher import launch, require_torch
from executor.measured_timeline import read_timeline
from executor.supported import BYTES, unsupported
from executor.verification import Verification, require_equal, verify
from simulator.models.transformer import Transformer
from simulator.timeline import Timeline
from strategies.plan import Plan
from strategies.training import Training

WARM_UP = 2
UNVERIFIED_STEPS = 5
"""Runs of more steps are verified before they begin where nothing else is said."""
VERIFIED_STEPS = 3
VERIFIED_HEAD_DIM, VERIFIED_SEQUENCE = 8, 32
Progress = Callable[[int, float, float], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What a plan did on torch.

    Parameters
    ----------
    losses
        Mean cross entropy over the global batch, per step.
    step_times
        Seconds of every step: of its slowest rank.
    step_time
        Their median without the first two steps.
    peak_memory
        Largest bytes of tensors held at once by any rank, as torch's allocator reports them.
    """

    steps: int
    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    step_time: float
    peak_memory: float
    timeline: Timeline
    verification: Verification | None


def execute(
    spec: Transformer,
    training: Training,
    plan: Plan,
    *,
    steps: int,
    verify: bool,
    folder: Path,
    seed: int = 0,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> Run:
    """Return what was measured in ``steps`` steps of ``plan`` on this host, one process a rank.

    Parameters
    ----------
    verify
        Whether the same plan first runs a scaled-down model in fp64 against one process.
    folder
        Where job and results are written.
    timeout
        Seconds without any sign of life of a rank after which the run ends.
    progress
        Called with (step, loss, seconds) after every step.

    Raises
    ------
    ValueError
        Where torch cannot run the plan; nothing was started.
    ExecutionError
        Where a rank fails.
    VerificationError
        Where the ranks do not compute what one process computes; the steps were not begun.
    """
    if steps < 1:
        raise ValueError(f"steps is at least 1, met {steps}")
    refuse(spec, training, plan)
    job = Job(spec, training, plan, steps, seed, timeout=timeout)
    verification = verified(verification_job(job), folder / "verify") if verify else None
    run_jobs([(job, folder)], progress)
    times = step_times(plan, folder)
    timeline = read_timeline(plan, folder)
    return Run(
        steps=steps,
        losses=losses(plan, steps, folder),
        step_times=times,
        step_time=median(times[WARM_UP:] or times),
        peak_memory=timeline.peak_memory,
        timeline=timeline,
        verification=verification,
    )


def verified(job: Job, folder: Path) -> Verification:
    """Run a verification job and return how near it is to one process.

    Raises
    ------
    VerificationError
        Where it is not equal.
    """
    run_jobs([(job, folder)])
    return require_equal(compare(job, folder))


def refuse(spec: Transformer, training: Training, plan: Plan) -> None:
    """Return where the executor can run ``plan``, else raise ``ValueError`` with every reason."""
    require_torch()
    if reasons := unsupported(spec, training, plan):
        raise ValueError("the executor cannot run this plan: " + "; ".join(reasons))


def run_jobs(jobs: list[tuple[Job, Path]], progress: Progress | None = None) -> None:
    """Run jobs of as many ranks one after the other in one set of processes; progress is the first one's."""
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    first, folder = jobs[0]
    poll = progress_of(first.plan, folder, progress)
    timeout = max(job.timeout for job, _ in jobs)
    launch("executor.worker", paths, folder, first.plan.mesh.num_ranks, timeout=timeout, poll=poll)


def progress_of(plan: Plan, folder: Path, progress: Progress | None) -> Callable[[], None]:
    """Return what tells ``progress`` of the steps that all ranks have done since it was last called."""
    told = 0

    def poll() -> None:
        nonlocal told
        if progress is not None:
            rows = _metrics(plan, folder)
            for step in range(told, min(len(row) for row in rows)):
                progress(step, _mean_loss(rows, step), max(row[step]["seconds"] or 0.0 for row in rows))
                told = step + 1

    return poll


def verification_job(job: Job) -> Job:
    """Return the job in fp64 with the same plan and a model scaled down in its widths.

    Layers, heads and microbatches stay, so stages and cuts do; heads become at most 8 wide,
    the feed-forward layer at most twice as wide as the hidden one, sequences at most 32 long.
    """
    spec, tensor = job.spec, job.plan.tensor
    hidden = spec.heads * min(spec.head_dim, VERIFIED_HEAD_DIM)
    ffn = min(spec.ffn, -(-2 * hidden // tensor) * tensor)
    experts = spec.experts and replace(spec.experts, ffn=min(spec.experts.ffn, -(-2 * hidden // tensor) * tensor))
    vocab = BYTES if BYTES % tensor == 0 else spec.vocab
    parts = tensor * (2 * job.plan.context if job.plan.context > 1 else 1)
    sequence = min(job.training.sequence, -(-VERIFIED_SEQUENCE // parts) * parts)
    return replace(
        job,
        spec=replace(spec, hidden=hidden, ffn=ffn, vocab=vocab, experts=experts),
        training=replace(job.training, precision="fp64", sequence=sequence),
        steps=VERIFIED_STEPS,
        dump=True,
        profile=False,
    )


def compare(job: Job, folder: Path) -> Verification:
    """Return how far a dumped job is from one process."""
    return verify(job, folder, losses(job.plan, job.steps, folder))


def losses(plan: Plan, steps: int, folder: Path) -> tuple[float, ...]:
    """Return the loss of every step: the mean over the ranks of the last stage, equal shares each."""
    rows = _metrics(plan, folder)
    return tuple(_mean_loss(rows, step) for step in range(steps))


def step_times(plan: Plan, folder: Path) -> tuple[float, ...]:
    """Return the seconds of every step on its slowest rank."""
    rows = _metrics(plan, folder)
    return tuple(max(row[step]["seconds"] or 0.0 for row in rows) for step in range(min(len(row) for row in rows)))


def _metrics(plan: Plan, folder: Path) -> list[list[dict[str, float | None]]]:
    result = []
    for rank in range(plan.mesh.num_ranks):
        path = metrics_file(folder, rank)
        text = path.read_text() if path.exists() else ""
        result.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
    return result


def _mean_loss(rows: list[list[dict[str, float | None]]], step: int) -> float:
    values = [loss for row in rows if (loss := row[step]["loss"]) is not None]
    return sum(values) / len(values)
