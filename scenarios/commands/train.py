"""``meshwise train``: train a user's own module on his data under a plan. It runs the user's code."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.executor.device import CPU, CUDA, check_device, count_gpus
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.commands.run_report import follow
from meshwise.scenarios.console import Ticker, emit, note, print_rows
from meshwise.scenarios.files.results import make_folder
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.run import TrainRun
    from meshwise.scenarios.module_plans.planning import PlannedRun

STEPS = 100
SEARCH = "search"
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
            help="A plan file, words such as data=4,zero=3,num_microbatches=2,recompute=full, or search, the default: "
            "what the simulator predicts to be fastest here.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training in all.")] = STEPS,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default those of the plan, else up to one a core or GPU.")
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
    calibrate: Annotated[
        bool, typer.Option(help="Measure the module for some seconds beforehand, from which steps are predicted.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Train your own module on your own data under a plan: data parallelism, ZeRO 1 to 3, microbatches, recompute.

    Without a plan one is searched for.
    """
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.job import TrainJob
    from meshwise.executor.user_training.run import train as run_training  # so that help works without torch
    from meshwise.scenarios.module_plans.plan_files import write_plan
    from meshwise.scenarios.module_plans.planning import plan_run

    if precision not in PRECISIONS:
        raise ValueError(f"--precision: {', '.join(PRECISIONS)}, met {precision}; nearest: bf16")
    if not learning_rate > 0 or (clip is not None and not clip > 0):
        raise ValueError(f"--learning-rate and --clip are above 0, met {learning_rate:g} and {clip}")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{file}: a Python file that has model() and data(), met no such file")
    check_device(device)
    layout = _read_layout(plan, processes, device)
    target = make_folder(out)
    job = TrainJob(
        str(path.resolve()),
        layout or ModuleLayout(processes or 1),
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
    ticker = Ticker()
    try:
        planned = plan_run(job, layout=layout, processes=processes, calibrates=calibrate, report=ticker)
    finally:
        ticker.clear()
    job = dataclasses.replace(job, layout=planned.layout)
    write_plan(planned, target)
    for line in (*planned.assumptions, *planned.list_reasons()):
        note(line)
    note(f"{planned.layout.describe()}{', after a comparison in fp64 with one process' if verify else ''}")
    try:
        run = run_training(job, target, verify=verify, replace_run=replace, progress=follow(ticker))
    finally:
        ticker.clear()
    if as_json:
        emit(to_json(run, planned))
    else:
        _print_run(run, planned)


def _read_layout(plan: str | None, processes: int | None, device: str) -> "ModuleLayout | None":
    """Return the layout of a plan file or of words; ``None`` where one is searched for."""
    from meshwise.executor.modules.layout import ModuleLayout, parse_layout
    from meshwise.scenarios.module_plans.plan_files import read_layout

    if plan is None or plan == SEARCH:
        return None
    default = ModuleLayout(processes or (max(count_gpus(), 1) if device == CUDA else 1))
    is_words = "=" in plan and not Path(plan).exists()
    layout = parse_layout(plan, default) if is_words else read_layout(Path(plan))
    if processes is not None and layout.num_ranks != processes:
        nearest = layout.num_ranks
        raise ValueError(f"--processes: those of the plan, {nearest}, met {processes}; nearest: {nearest}")
    return layout


def to_json(run: "TrainRun", planned: "PlannedRun") -> dict[str, Any]:
    """Return a run with its prediction as JSON-ready data."""
    difference, prediction = run.difference, planned.prediction
    return {
        "plan": run.job.layout.to_json(),
        "first_step": run.first_step,
        "loss": list(run.losses),
        "step_time": run.step_time,
        "predicted_step_time": None if prediction is None else prediction.step_time,
        "samples_per_second": run.samples / run.step_time,
        "tokens_per_second": None if planned.tokens is None else planned.tokens / run.step_time,
        "parameters": run.parameters,
        "blocks": run.blocks,
        "peak_memory": run.peak_memory,
        "predicted_peak_memory": None if prediction is None else prediction.peak_memory,
        "plans": planned.num_plans,
        "assumptions": list(planned.assumptions),
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


def _describe_rate(run: "TrainRun", planned: "PlannedRun") -> str:
    """Return tokens a second where data are tokens, else samples."""
    number, unit = (run.samples, "samples") if planned.tokens is None else (planned.tokens, "tokens")
    return f"{number / run.step_time:.4g} {unit}/s"


def _compare(predicted: float, measured: float | None, describe: Callable[[float], str]) -> str:
    """Return a predicted figure with its error."""
    error = "" if measured is None else f", {predicted / measured - 1:+.1%}".replace("%", " %")
    return f"{describe(predicted)}{error}"


def _print_run(run: "TrainRun", planned: "PlannedRun") -> None:
    difference, prediction = run.difference, planned.prediction
    first_loss, last_loss, last_step = run.losses[0], run.losses[-1], run.first_step + len(run.losses)
    rows = [
        ("plan", run.job.layout.describe()),
        ("module", f"{run.parameters:,} parameters, {run.blocks} blocks"),
        ("loss", f"{first_loss:.4f} at step {run.first_step}, {last_loss:.4f} at step {last_step - 1}"),
        ("step time", f"{format_time(run.step_time)} (median), {_describe_rate(run, planned)}"),
    ]
    if prediction is not None:
        rows.append(("predicted step time", _compare(prediction.step_time, run.step_time, format_time)))
    where = "of tensors of a process" if run.job.device == CPU else "of tensors on a device"
    if run.peak_memory is not None:
        rows.append(("peak memory", f"{format_size(run.peak_memory)} {where}"))
    if prediction is not None:
        rows.append(("predicted memory", _compare(prediction.peak_memory, run.peak_memory, format_size)))
    rows.append(("memory of a process", f"{format_size(run.host_memory)}, with Python and torch"))
    if difference is not None:
        rows.append(
            (
                "equal to one process",
                f"yes: losses {difference.loss:.0e}, weights {difference.weights:.0e} apart in fp64",
            )
        )
    print_rows([*rows, ("checkpoints", str(run.checkpoints)), ("weights", str(run.weights / "weights.pt"))])
