"""``meshwise execute``: run a plan on torch, on this machine or on several hosts."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshwise.executor.device import CPU, require_device
from meshwise.executor.job import checkpoints_folder
from meshwise.executor.launch.run import Run, metrics_log
from meshwise.executor.options import (
    CONSTANT_RATE,
    KEPT_CHECKPOINTS,
    MAX_SEED,
    STEPS,
    TIMEOUT,
    LearningRate,
    RunOptions,
)
from meshwise.executor.training.checkpoint import list_checkpoints
from meshwise.scenarios.commands import hosts
from meshwise.scenarios.commands.execute_top import execute_top
from meshwise.scenarios.commands.loading import load_scenario
from meshwise.scenarios.commands.options import ClusterFile, Json, PlanFile, ScenarioName
from meshwise.scenarios.commands.page import PageFile, check_page
from meshwise.scenarios.commands.run_report import follow, tell_run
from meshwise.scenarios.console import FAILED, NOTHING_FITS, Ticker, note
from meshwise.scenarios.files.results import make_folder
from meshwise.scenarios.fitting import explain_unfit_plan
from meshwise.scenarios.interchange.targets import EXECUTE
from meshwise.scenarios.scenario import Scenario


def execute(
    scenario: ScenarioName,
    plan: PlanFile = None,
    cluster: ClusterFile = None,
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training steps, in all.")] = STEPS,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="First compare the plan with one process, in fp64 on a scaled-down model; by default before runs of "
            "more than 5 steps. Where it differs the run does not start.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_SEED, help="Seed of the initial parameters and the order of the data.  [default: 0]"
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the run, its metrics and checkpoints, the plan and pictures.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="UTF-8 text to train on, one token a byte.  [default: the documentation topics of Python]",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The largest learning rate.  [default: 0.001 of adamw, 0.02 of sgd]"),
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises linearly to it.")] = 0,
    decay_steps: Annotated[
        int | None,
        typer.Option(help="Step at which a cosine decay of the learning rate ends.  [default: no decay]"),
    ] = None,
    min_learning_rate: Annotated[float, typer.Option(help="What the decay ends at.")] = 0.0,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, metavar="STEPS", help="Write a checkpoint after so many steps each, and after the last."),
    ] = 0,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Newest checkpoints that stay.")] = KEPT_CHECKPOINTS,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest good checkpoint in the folder of --out, under this or any other plan.",
        ),
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FACTORY", help="The module that the graph was captured from."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on a host, one a rank: here all ranks; fewer with --rendezvous."),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Do not run: print what each of several hosts runs; HOST is the first."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Do not run: read what the ranks of several hosts left in --out.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, max=1e6, help="Seconds that a silent rank is waited for.")] = TIMEOUT,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="What ranks train on: cores (gloo), GPUs (NCCL).")
    ] = "cpu",
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Search and run the best plans, so many, instead of one; fit the machine to what they took, rank them "
            "again, and write the fitted cluster file into --out.",
        ),
    ] = None,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Run a plan for real on this machine and set measurement against prediction.

    A run with --checkpoint-every keeps its state in the folder of --out, and --resume goes on there: with the
    same --data, and with the seed and learning rate of the checkpoint where none is given. A checkpoint that is
    damaged is named, and the one before it taken.

    On several hosts, which share the folder --out: once with --rendezvous, then on every host what that prints, and in
    the end once with --collect.
    """
    _check_folder(out, resume=resume, keeps_checkpoints=bool(resume or checkpoint_every))
    check_page(report)
    if report is not None and (top is not None or rendezvous is not None):
        raise ValueError("--report tells of one run, met it with --top or --rendezvous")
    rate = LearningRate(learning_rate, warmup_steps, decay_steps, min_learning_rate)
    options = RunOptions(
        steps=steps,
        verify=verify,
        seed=seed,
        timeout=timeout,
        device=device,
        data=data,
        learning_rate=rate if rate != CONSTANT_RATE else None,  # where nothing is said, that of the checkpoint
        checkpoint_every=checkpoint_every,
        keep=keep_checkpoints,
        resume=resume,
    )
    value = load_scenario(scenario, plan, cluster)
    if module is None:
        value.to_executable_spec()  # what cannot be run under any plan is told before a plan is asked for
    value = replace(value, problem=value.to_target_problem(EXECUTE))  # what runs is priced as what runs it
    if top is not None:
        _check_top({"--plan": plan, "--module": module, "--rendezvous": rendezvous, "--data": data})
        execute_top(value, top, RunOptions(steps, verify, seed, device=device), out=out, as_json=as_json)
        return
    rank_hosts = hosts.spread_ranks(value, processes, rendezvous, collect=collect, out=out, module=module)
    is_remote = rank_hosts is not None or collect  # whose GPUs this host does not see
    require_device(device, 0 if is_remote else value.choose_plan().mesh.num_ranks)
    if module is None and not is_remote:
        value.check_executable()
    predicted = value.simulate()
    if not predicted.fits:
        note(explain_unfit_plan(value.problem, predicted.plan))
        raise typer.Exit(NOTHING_FITS)
    if rank_hosts is not None and out is not None:
        hosts.prepare(value.make_jobs(options, make_folder(out), note), rank_hosts, as_json=as_json)
        return
    target = None if out is None else Path(out) if collect else make_folder(out)
    if collect and target is not None:
        run = hosts.collect_run(value, target)
    else:
        _note_shared_cores(predicted.plan.mesh.num_ranks, device)
        run = _run_plan(value, options, target, module)
    tell_run(value, predicted, run, target, report, as_json=as_json)
    if run.verification is not None and not run.verification.equal:  # of several hosts, whose run has begun
        note("the ranks did not compute what one process computes")
        raise typer.Exit(FAILED)


def _run_plan(value: Scenario, options: RunOptions, target: Path | None, module: str | None) -> Run:
    """Run the plan of a scenario on this machine, show its progress on the terminal, and return the run."""
    ticker = Ticker()
    try:
        return value.execute(options=options, folder=target, module=module, progress=follow(ticker), warn=note)
    except (KeyboardInterrupt, RuntimeError):
        ticker.clear()
        note(_describe_leftovers(target))
        raise
    finally:
        ticker.clear()


def _note_shared_cores(ranks: int, device: str) -> None:
    """Warn where there are more ranks than cores: the prediction assumes one core per rank."""
    cores = os.cpu_count() or 1
    if ranks > cores and device == CPU:
        note(f"{ranks} ranks share {cores} cores: the prediction, for a core a rank, will be too fast")


def _check_folder(out: str | None, *, resume: bool, keeps_checkpoints: bool) -> None:
    """Raise ``ValueError`` where a run that keeps checkpoints has no folder, or one to resume does not exist."""
    if keeps_checkpoints and out is None:
        raise ValueError("--checkpoint-every and --resume need a folder that stays: --out DIR")
    if resume and not Path(str(out)).is_dir():
        raise ValueError(f"{out}: resuming needs the folder of a run, met none")


def _check_top(options: dict[str, str | None]) -> None:
    """Raise ``ValueError`` where an option states what --top chooses itself."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"--top runs plans that it finds for the executor's own model, met {option} {value}")


def _describe_leftovers(target: Path | None) -> str:
    """Return a message on the steps and checkpoints that a stopped run has left in its folder."""
    if target is None or not metrics_log(target).exists():
        return "no steps of the run are left"
    newest = list_checkpoints(checkpoints_folder(target))[:1]
    checkpoint = f"; --resume goes on from {newest[0]}" if newest else "; no checkpoint was written"
    return f"the steps that were done are in {metrics_log(target)}{checkpoint}"
