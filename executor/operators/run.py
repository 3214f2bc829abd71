"""Executes a user's module under a plan on this host, and returns what was measured."""

import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwise.executor.check.verification import Verification, require_equal
from meshwise.executor.device import require_device
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks, require_torch
from meshwise.executor.launch.run import (
    VERIFIED_STEPS,
    VERIFY,
    WARM_UP,
    Progress,
    Run,
    build_poll,
    read_gpu_memory,
    read_losses,
    read_step_times,
)
from meshwise.executor.operators.job import OperatorJob, expect, is_done, verdict
from meshwise.executor.options import DEFAULT_OPTIONS, RunOptions
from meshwise.executor.recording.rank_files import read_errors
from meshwise.executor.recording.timeline import read_timeline
from meshwise.executor.supported import OPTIMIZERS
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.schedules.schedule import ActionKind

WORKER = "meshwise.executor.operators.worker"


def execute_module(
    module: str,
    graph: OperatorGraph,
    training: Training,
    plan: Plan,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    folder: Path,
    progress: Progress | None = None,
) -> Run:
    """Return what was measured in the steps of a module under ``plan`` on this host, one process a rank.

    Parameters
    ----------
    module
        ``FILE.py:FACTORY``; the factory's inputs are the global batch.
    graph
        That of which ``plan`` is.
    training
        Precision, optimizer and clipping, which must be those that the back end has.
    options
        ``verify`` says how many steps first run in fp64 on the ranks and, on the whole batch, in one process: all of
        `meshwise.executor.launch.run.VERIFIED_STEPS`, or one, which no run goes without.

    Raises
    ------
    ValueError
        Where the plan cannot be run, this host has too few GPUs, or options are of the executor's own model; nothing
        was started.
    ExecutionError
        Where a rank fails.
    VerificationError
        Where the ranks do not compute what one process computes; the steps were not started.
    """
    if options.needs_own_model:
        owners = "data, learning rate, checkpoints and resume are of the executor's own model"
        raise ValueError(f"{owners}, met --module: a module brings its inputs")
    arguments = to_absolute(module), plan, options.steps, training.optimizer, options.seed or 0
    job = OperatorJob(*arguments, timeout=options.timeout, device=options.device)
    tolerance = refuse(job, graph, training)
    require_device(options.device, plan.mesh.num_ranks)
    check = replace(job, steps=VERIFIED_STEPS if options.is_verified else 1, double=True, dump=True, profile=False)
    verification = run_verified(job, check, folder, tolerance, progress)
    times = read_step_times(plan, folder)
    timeline = read_timeline(plan, folder)
    return Run(
        steps=job.steps,
        losses=read_losses(plan, job.steps, folder),
        step_times=times,
        step_time=median(times[WARM_UP:] or times),
        peak_memory=read_gpu_memory(plan, folder, "peak") or timeline.peak_memory,
        timeline=timeline,
        verification=verification,
        reserved_memory=read_gpu_memory(plan, folder, "reserved"),
    )


def to_absolute(module: str) -> str:
    """Return ``FILE.py:FACTORY`` with the absolute path of the file.

    >>> to_absolute("/models/mine.py:small")
    '/models/mine.py:small'
    """
    file, colon, factory = module.rpartition(":")
    return f"{Path(file).resolve()}{colon}{factory}" if colon else module


def run_verified(
    job: OperatorJob, check: OperatorJob, folder: Path, tolerance: float, progress: Progress | None = None
) -> Verification:
    """Run a check and then its job in one set of processes; return how far the check was from one process.

    Raises
    ------
    ValueError
        Where a rank fails in the check; the job was not started.
    VerificationError
        Where the check differs from one process; the job was not started.
    """
    from meshwise.executor.capture.captured import CaptureError
    from meshwise.executor.operators.trainer import train

    check_folder = folder / VERIFY
    with redirect_stdout(sys.stderr):  # forward may print
        expected = train(check)
    expect(check_folder, *expected, tolerance)
    try:
        run_jobs([(job, folder), (check, check_folder)], progress)
    except ExecutionError as error:
        failures = sorted(read_errors(folder, job.plan.mesh.num_ranks).values(), key=lambda rank_error: rank_error.time)
        if failures and not is_done(check_folder):
            kind, _, text = failures[0].error.partition(": ")
            location = re.match(r"(\S+:\d+): ", text)
            line, reason = (location[1], text[location.end() :]) if location else (job.module, f"{kind}: {text}")
            rule = "ranks can run every operator of a captured module, which is tried in fp64 before the run"
            raise CaptureError(f"{rule}; met {reason}; nearest: a plan with fewer cuts", line) from error
        raise
    return require_equal(verdict(check, check_folder), " of the whole batch")


def refuse(job: OperatorJob, graph: OperatorGraph, training: Training) -> float:
    """Raise ``ValueError`` with every reason why a job cannot run; else return the tolerance of its verification.

    The module is captured, and compared in fp64 with its captured program, in this process.

    Raises
    ------
    ValueError
        Where plan or graph do not belong to this module and batch, or where plan, training or module need what the back
        end does not support.
    """
    require_torch()
    if reasons := (*list_unsupported(job.plan), *list_unsupported_training(training)):
        raise ValueError("the executor cannot run this plan: " + "; ".join(reasons))
    from meshwise.executor.operators.whole_batch import check_module  # needs torch

    return check_module(job, graph)


def run_jobs(jobs: list[tuple[OperatorJob, Path]], progress: Progress | None = None) -> None:
    """Run jobs of equally many ranks in one set of processes, the last job first; progress is that of the first."""
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    first_job, folder = jobs[0]
    poll: Callable[[], None] = build_poll(first_job.plan, folder, progress)
    timeout = max(job.timeout for job, _ in jobs)
    launch_ranks(WORKER, paths, folder, first_job.plan.mesh.num_ranks, timeout=timeout, poll=poll)


def list_unsupported_training(training: Training) -> tuple[str, ...]:
    """Return every reason why the operator back end cannot run such a training; empty where it can."""
    reasons = []
    if training.precision != "fp32":
        reasons.append(
            f"precision: a captured module is trained as it was made, met {training.precision}; nearest: fp32"
        )
    if training.state_precision in ("bf16", "int8"):
        rule = "moments of a captured module are as precise as its weights"
        reasons.append(f"state_precision: {rule}, met {training.state_precision}; nearest: fp32")
    if training.gradient_clipping:
        reasons.append("gradient_clipping: gradients of a captured module are not clipped, met true; nearest: false")
    if training.optimizer not in OPTIMIZERS:
        reasons.append(f"optimizer: the executor steps with {' or '.join(OPTIMIZERS)}, met {training.optimizer}")
    if training.frozen:
        reasons.append("frozen: a captured module trains what its requires_grad says, met true; nearest: false")
    return tuple(reasons)


def list_unsupported(plan: Plan) -> tuple[str, ...]:
    """Return every reason why the operator back end cannot run ``plan``; empty where it can."""
    reasons = []
    if {action.kind for order in plan.actions.orders for action in order} - {ActionKind.FORWARD, ActionKind.BACKWARD}:
        reasons.append(f"schedule: backward of a captured module is one pass, met {plan.rule.name}; nearest: 1f1b")
    if plan.asynchronous:
        reasons.append(f"schedule: steps of a captured module end with a flush, met {plan.rule.name}; nearest: 1f1b")
    if plan.recompute is not Recompute.NONE:
        reasons.append(f"recompute: a captured module keeps what backward reads, met {plan.recompute}; nearest: none")
    if plan.zero:
        finding = f"met {plan.zero}; nearest: 0"
        reasons.append(f"zero: shards of a captured module's parameters are in its shardings, {finding}")
    if plan.overlap_tensor:
        reasons.append("overlap_tensor: a captured module's collectives follow its products, met true; nearest: false")
    if plan.offload:
        reasons.append(f"offload: a captured module stays on the device, met {plan.offload}")
    if not isinstance(plan.microbatch, int):
        reasons.append(
            f"microbatch: one size on all data ranks, met {list(plan.microbatch)}; nearest: {plan.sizes[-1]}"
        )
    if plan.context > 1 or plan.expert > 1 or plan.replica > 1:
        reasons.append(
            "a captured module is cut along operator axes, data and pipeline, met context, expert or replica"
        )
    return tuple(reasons)
