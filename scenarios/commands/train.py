"""``meshwise train``: train a user's own module on his data under a plan. It runs the user's code."""

from dataclasses import replace as change
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.executor.device import CUDA, check_device, count_gpus
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.commands.run_report import follow
from meshwise.scenarios.console import Ticker, emit, note, print_rows
from meshwise.scenarios.files.results import make_folder
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.job import TrainJob
    from meshwise.executor.user_training.run import TrainRun

STEPS = 100
PRECISIONS = ("fp32", "bf16", "fp64")


def train(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py",
            help="It has model() and data(); optionally loss(outputs, batch), optimizer(model), scheduler(optimizer), "
            "initialize(model) and BATCH, the samples of a step.",
        ),
    ],
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="A plan file, or words such as data=4,zero=3,num_microbatches=2,recompute=full or data=2,tensor=2; "
            "by default data parallelism over all processes.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training in all.")] = STEPS,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default those of the plan, else one, or one a GPU.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step, instead of BATCH of the file.")] = None,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}; bf16 has fp32 main weights.")] = "fp32",
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, where the file has no optimizer.")] = 1e-3,
    clip: Annotated[float | None, typer.Option(help="The norm to which all gradients together are clipped.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of first parameters, data order and random draws.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare first steps in fp64 with one process beforehand.")
    ] = False,
    out: Annotated[str, typer.Option(help="Folder for metrics, checkpoints and weights.")] = "meshwise-train",
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for one at the end.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out, under any plan.")] = False,
    replace: Annotated[bool, typer.Option(help="Remove the checkpoints of an earlier run in --out.")] = False,
    device: Annotated[str, typer.Option(help="cpu with gloo, or cuda with NCCL.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train your own module on your own data: data parallelism, ZeRO 1 to 3, microbatches, recompute, cut operators."""
    from meshwise.executor.user_training.job import TrainJob
    from meshwise.executor.user_training.run import train as run_training  # so that help works without torch

    if precision not in PRECISIONS:
        raise ValueError(f"--precision: {', '.join(PRECISIONS)}, met {precision}; nearest: bf16")
    if not learning_rate > 0 or (clip is not None and not clip > 0):
        raise ValueError(f"--learning-rate and --clip are above 0, met {learning_rate:g} and {clip}")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{file}: a Python file that has model() and data(), met no such file")
    check_device(device)
    layout = _choose_layout(plan, processes, device)
    target = make_folder(out)
    job = TrainJob(
        str(path.resolve()),
        layout,
        steps,
        batch=batch,
        precision=precision,
        learning_rate=learning_rate,
        max_norm=clip,
        seed=seed,
        checkpoint_every=checkpoint_every,
        resume=resume,
        device=device,
    )
    job = choose_cuts_of_job(job)
    ticker = Ticker()
    note(f"{layout.describe()}{', after a comparison in fp64 with one process' if verify else ''}")
    try:
        run = run_training(job, target, verify=verify, replace_run=replace, progress=follow(ticker))
    finally:
        ticker.clear()
    if as_json:
        emit(to_json(run))
    else:
        _print_run(run)


def _choose_layout(plan: str | None, processes: int | None, device: str) -> "ModuleLayout":
    """Return the layout of a plan file, of words, or of so many processes: by default one, or one a GPU."""
    from meshwise.executor.modules.layout import ModuleLayout, find_module_layout, parse_layout, read_plan

    default = ModuleLayout(processes or (max(count_gpus(), 1) if device == CUDA else 1))
    if plan is None:
        return default
    is_words = "=" in plan and not Path(plan).exists()
    layout = parse_layout(plan, default) if is_words else find_module_layout(read_plan(Path(plan)))
    if processes is not None and layout.num_ranks != processes:
        ranks = layout.num_ranks
        raise ValueError(f"--processes: those of the plan, {ranks}, met {processes}; nearest: {ranks}")
    return layout


def choose_cuts_of_job(job: "TrainJob") -> "TrainJob":
    """Return a job whose plan says how operators are cut, chosen where it has none; others are returned unchanged.

    The module of the file is captured, and refused where it cannot be cut.
    """
    layout = job.layout
    if layout.tensor == 1:
        return job
    from meshwise.executor.user_training.cuts import capture_job  # needs torch
    from meshwise.scenarios.inputs.operator_cuts import choose_cuts

    captured = capture_job(job)
    if layout.plan is not None:
        return job
    plan = choose_cuts(
        captured.graph,
        data=layout.data,
        tensor=layout.tensor,
        samples=captured.batch // layout.data,
        num_microbatches=layout.num_microbatches,
    )
    return change(job, layout=change(layout, plan=plan))


def to_json(run: "TrainRun") -> dict[str, Any]:
    """Return a run as JSON-ready data."""
    difference = run.difference
    return {
        "plan": run.job.layout.to_json(),
        "first_step": run.first_step,
        "loss": list(run.losses),
        "step_time": run.step_time,
        "samples_per_second": run.samples / run.step_time,
        "parameters": run.parameters,
        "blocks": run.blocks,
        "peak_memory": run.peak_memory,
        "host_memory": run.host_memory,
        "verify": None
        if difference is None
        else {
            "loss_error": difference.loss,
            "parameter_error": difference.weights,
            "reference": "single process",
            "equal": difference.is_equal,
        },
        "checkpoint": str(run.checkpoints),
        "weights": str(run.weights),
    }


def _print_run(run: "TrainRun") -> None:
    difference = run.difference
    first_loss, last_loss, last_step = run.losses[0], run.losses[-1], run.first_step + len(run.losses)
    rows = [
        ("plan", run.job.layout.describe()),
        ("module", f"{run.parameters:,} parameters, {run.blocks} blocks"),
        ("loss", f"{first_loss:.4f} at step {run.first_step}, {last_loss:.4f} at step {last_step - 1}"),
        ("step time", f"{format_time(run.step_time)} (median), {run.samples / run.step_time:.4g} samples/s"),
        ("memory of a process", format_size(run.host_memory)),
    ]
    if run.peak_memory is not None:
        rows.append(("peak memory of a device", format_size(run.peak_memory)))
    if difference is not None:
        rows.append(
            (
                "equal to one process",
                f"yes: losses {difference.loss:.0e}, weights {difference.weights:.0e} apart in fp64",
            )
        )
    print_rows([*rows, ("checkpoints", str(run.checkpoints)), ("weights", str(run.weights / "weights.pt"))])
