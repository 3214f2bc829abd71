"""Execute a user's module under a plan on this host and return what was measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from executor.device import CPU, require_device
from executor.launcher import launch, require_torch
from executor.measured_timeline import read_timeline
from executor.metrics_log import Progress
from executor.operators.job import OperatorJob
from executor.run import VERIFIED_STEPS, WARM_UP, Run, held, losses, progress_of, step_times
from executor.supported import OPTIMIZERS
from executor.verification import Verification, distance, require_equal
from simulator.operator_graph import OperatorGraph
from strategies.plan import Plan
from strategies.recomputation import Recompute
from strategies.schedule import ActionKind

WORKER = "executor.operators.worker"


def execute_module(
    module: str,
    graph: OperatorGraph,
    plan: Plan,
    *,
    steps: int,
    verify: bool,
    folder: Path,
    optimizer: str = "adamw",
    seed: int = 0,
    timeout: float = 600.0,
    progress: Progress | None = None,
    device: str = CPU,
) -> Run:
    """Return what was measured in ``steps`` steps of a module under ``plan`` on this host, one process a rank.

    Parameters
    ----------
    module
        ``FILE.py:FACTORY``; the factory's inputs are the global batch.
    graph
        That of which ``plan`` is.
    verify
        Whether the same plan first runs in fp64 against one process.
    device
        What ranks train on: one of `executor.device.DEVICES`.

    Raises
    ------
    ValueError
        Where the plan cannot be run, or this host has too few GPUs; nothing was started.
    ExecutionError
        Where a rank fails.
    VerificationError
        Where the ranks do not compute what one process computes; the steps were not begun.
    """
    if steps < 1:
        raise ValueError(f"steps is at least 1, met {steps}")
    job = OperatorJob(absolute(module), plan, steps, optimizer, seed, timeout=timeout, device=device)
    refuse(job, graph)
    require_device(device, plan.mesh.num_ranks)
    verification = None
    if verify:
        checked = replace(job, steps=VERIFIED_STEPS, double=True, dump=True, profile=False), folder / "verify"
        run_jobs([checked])
        verification = require_equal(compare(*checked))
    run_jobs([(job, folder)], progress)
    times = step_times(plan, folder)
    timeline = read_timeline(plan, folder)
    return Run(
        steps=steps,
        losses=losses(plan, steps, folder),
        step_times=times,
        step_time=median(times[WARM_UP:] or times),
        peak_memory=held(plan, folder, "peak") or timeline.peak_memory,
        timeline=timeline,
        verification=verification,
        reserved_memory=held(plan, folder, "reserved"),
    )


def absolute(module: str) -> str:
    """Return ``FILE.py:FACTORY`` with the whole path of the file.

    >>> absolute("/models/mine.py:small")
    '/models/mine.py:small'
    """
    file, colon, factory = module.rpartition(":")
    return f"{Path(file).resolve()}{colon}{factory}" if colon else module


def refuse(job: OperatorJob, graph: OperatorGraph) -> None:
    """Return where the ranks can run a job, else raise ``ValueError`` with every reason; the module is captured once.

    Raises
    ------
    ValueError
        Where the plan or its graph is not of this module or batch, or asks for what the back end does not do.
    """
    require_torch()
    if reasons := unsupported(job.plan):
        raise ValueError("the executor cannot run this plan: " + "; ".join(reasons))
    from executor.capture.capture import capture
    from executor.capture.factory import naming
    from executor.operators.layouts import Layouts
    from executor.operators.trainer import make

    if job.optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: the executor steps with {' or '.join(OPTIMIZERS)}, met {job.optimizer}")
    made = make(job)
    with naming(job.module):
        captured = capture(made.module, made.microbatches[0])
        if captured.left:
            held = (
                "the executor renews buffers point by point, each from one value of the loss, which does not read them"
            )
            raise ValueError(f"{held}; met {', '.join(captured.left)}")
        if met := _difference(graph, captured.graph):
            raise ValueError(f"the module is the one that the scenario's graph was captured from; {met}")
        Layouts(captured, {each.operator: each for each in job.plan.shardings})


def _difference(graph: OperatorGraph, other: OperatorGraph) -> str:
    """Return the first difference between two graphs in operators; empty where there is none."""
    sizes = [
        {f"{b.name}.{o.name}": (b.repeat, o.dims) for b in each.blocks for o in b.operators} for each in (graph, other)
    ]
    first, second = sizes
    if alone := [name for name in (*first, *second) if (name in first) != (name in second)]:
        return f"met {alone[0]} only in the {'graph' if alone[0] in first else 'module'}"
    for name, (repeat, dims) in first.items():
        if (repeat, dims) != second[name]:
            met = [
                ", ".join(f"{dim}({size})" for dim, size in dims) + f" x {times}"
                for times, dims in (first[name], second[name])
            ]
            return f"{name} is {met[0]} in the graph, met {met[1]}"
    return ""


def run_jobs(jobs: list[tuple[OperatorJob, Path]], progress: Progress | None = None) -> None:
    """Run jobs of as many ranks one after the other in one set of processes; progress is the first one's."""
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    first, folder = jobs[0]
    poll: Callable[[], None] = progress_of(first.plan, folder, progress)
    timeout = max(job.timeout for job, _ in jobs)
    launch(WORKER, paths, folder, first.plan.mesh.num_ranks, timeout=timeout, poll=poll)


def compare(job: OperatorJob, folder: Path) -> Verification:
    """Return how far a dumped job is from one process."""
    from executor.operators.reference import train

    expected_losses, expected = train(job)
    return distance(job.plan.mesh.num_ranks, folder, losses(job.plan, job.steps, folder), expected_losses, expected)


def unsupported(plan: Plan) -> tuple[str, ...]:
    """Return every reason why the operator back end cannot run ``plan``; empty where it can."""
    reasons = []
    if {action.kind for order in plan.schedule.orders for action in order} - {ActionKind.FORWARD, ActionKind.BACKWARD}:
        reasons.append(f"schedule: backward of a captured module is one pass, met {plan.rule.name}; nearest: 1f1b")
    if plan.asynchronous:
        reasons.append(f"schedule: steps of a captured module end with a flush, met {plan.rule.name}; nearest: 1f1b")
    if plan.recompute is not Recompute.NONE:
        reasons.append(f"recompute: a captured module keeps what backward reads, met {plan.recompute}; nearest: none")
    if plan.zero:
        met = f"met {plan.zero}; nearest: 0"
        reasons.append(f"zero: shards of a captured module's parameters are in its shardings, {met}")
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
