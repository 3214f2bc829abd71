"""``meshwise execute``: run a plan on torch, on this machine or on several hosts, or the best plans of a search."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.executor.device import CPU, require_device
from meshwise.executor.job import Job, checkpoints_folder
from meshwise.executor.launch.processes import INTERRUPTED, lock_folder
from meshwise.executor.launch.run import Run, metrics_log
from meshwise.executor.launch.several_hosts import Hosts, Rendezvous, prepare_hosts, read_run, require_processes
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
from meshwise.scenarios.closed_loop import ClosedLoop, close_loop
from meshwise.scenarios.commands.loading import load_scenario, tell_usual_loads
from meshwise.scenarios.commands.options import ClusterFile, Collect, Json, MeetingPoint, PlanFile, ScenarioName
from meshwise.scenarios.commands.page import PageFile, check_page
from meshwise.scenarios.commands.run_report import follow, tell_run, to_json, write_run
from meshwise.scenarios.console import FAILED, NOTHING_FITS, Ticker, emit, note, print_rows, print_table, tell_hosts
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.fitting import explain_unfit_plan
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.interchange.targets import EXECUTE
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.units import format_time
from meshwise.strategies.plan.plan import Plan


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
        float | None, typer.Option(help="The largest learning rate.  [default: 0.001 of adamw, 0.02 of sgd]")
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises linearly to it.")] = 0,
    decay_steps: Annotated[
        int | None, typer.Option(help="Step at which a cosine decay of the learning rate ends.  [default: no decay]")
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
        str | None, typer.Option(metavar="FILE.py:FACTORY", help="The module that the graph was captured from.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on a host, one a rank: here all ranks; fewer with --rendezvous."),
    ] = None,
    rendezvous: MeetingPoint = None,
    collect: Collect = False,
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
    tell_usual_loads(value)
    if module is None:
        value.to_executable_spec()  # what cannot be run under any plan is told before a plan is asked for
    value = replace(value, problem=value.to_target_problem(EXECUTE))  # what runs is priced as what runs it
    if top is not None:
        _check_top({"--plan": plan, "--module": module, "--rendezvous": rendezvous, "--data": data})
        _execute_top(value, top, RunOptions(steps, verify, seed, device=device), out=out, as_json=as_json)
        return
    rank_hosts = _spread_ranks(value, processes, rendezvous, collect=collect, out=out, module=module)
    is_remote = rank_hosts is not None or collect  # whose GPUs this host does not see
    require_device(device, 0 if is_remote else value.choose_plan().mesh.num_ranks)
    if module is None and not is_remote:
        value.check_executable()
    predicted = value.simulate()
    if not predicted.fits:
        note(explain_unfit_plan(value.problem, predicted.plan))
        raise typer.Exit(NOTHING_FITS)
    if rank_hosts is not None and out is not None:
        _prepare_hosts(value.make_jobs(options, make_folder(out), note), rank_hosts, as_json=as_json)
        return
    target = None if out is None else Path(out) if collect else make_folder(out)
    if collect and target is not None:
        run = _collect_run(value, target)
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


def _spread_ranks(
    value: Scenario,
    processes: int | None,
    rendezvous: str | None,
    *,
    collect: bool,
    out: str | None,
    module: str | None,
) -> Hosts | None:
    """Return how the ranks of a scenario's plan are spread over hosts; None where all run on this host.

    Raises
    ------
    ValueError
        Where options contradict each other or the plan.
    """
    ranks = value.choose_plan().mesh.num_ranks
    if (rendezvous is not None or collect) and (out is None or module is not None):
        problem = "no --out" if out is None else "--module"
        needed = "--rendezvous and --collect go with --out, a folder of all hosts, and no --module"
        raise ValueError(f"{needed}; met {problem}")
    if rendezvous is not None and collect:
        raise ValueError("--rendezvous comes before a run and --collect after it, met both")
    if rendezvous is not None:
        ranks_per_host = min(value.problem.cluster.first_node.devices, ranks) if processes is None else processes
        return Hosts.from_ranks(ranks, ranks_per_host, Rendezvous.parse(rendezvous))
    if processes is not None:
        require_processes(ranks, processes)
        if processes < ranks and not collect:
            raise ValueError(
                f"processes: all {ranks} ranks are here, met {processes}; nearest: {ranks}, or --rendezvous HOST:PORT "
                f"for {ranks // processes} hosts of {processes}"
            )
    return None


def _prepare_hosts(jobs: Sequence[tuple[Job, Path]], hosts: Hosts, *, as_json: bool) -> None:
    """Write jobs into their folders and print the command of every host."""
    with lock_folder(jobs[0][1]):
        script = prepare_hosts(jobs, hosts)
    tell_hosts(script, hosts.nodes, hosts.processes, hosts.rendezvous.host, as_json=as_json)


def _collect_run(value: Scenario, folder: Path) -> Run:
    """Return the run that the ranks of a scenario's plan have left in a folder.

    Raises
    ------
    ValueError
        Where the folder has no run, or a run of another plan.
    """
    job, run = read_run(folder)
    own_text = value.choose_plan().describe()
    if job.plan != value.choose_plan():
        raise ValueError(f"{folder}: a run of this plan is collected: {own_text}; met {job.plan.describe()}")
    return run


HEAD = ("plan", "predicted", "measured", "error", "predicted after", "error after")


def _execute_top(scenario: Scenario, num_plans: int, options: RunOptions, *, out: str | None, as_json: bool) -> None:
    """Run the best plans of a scenario, fit its machine to their step times, rank them again and print the changes."""
    target = make_folder(out) if out is not None else None
    ticker = Ticker()

    def announce(words: str) -> None:
        ticker.clear()
        note(words)

    def report_plan(number: int, plan: Plan, run: Run) -> None:
        predicted = scenario.simulate(plan)
        error = f"{predicted.step_time / run.step_time - 1:+.1%}"
        announce(f"  {run.step_time * 1e3:.1f} ms a step, {predicted.step_time * 1e3:.1f} ms predicted ({error})")
        if target is not None:
            write_run(make_folder(target / f"plan-{number}"), to_json(run, predicted), predicted, run)

    loop = close_loop(
        scenario, num_plans, options, folder=target, note=announce, progress=follow(ticker), on_finished=report_plan
    )
    ticker.clear()
    document = loop.to_json() | {"cluster": str(target / "cluster.yaml") if target is not None else None}
    if target is not None:
        origin = f"the steps of {len(loop.rows)} plans that ran on this machine"
        comment = f"Fitted by `meshwise execute --top` to {origin}."
        write_cluster(loop.refit.cluster, target / "cluster.yaml", comment)
        write(target / "loop.json", json.dumps(document, indent=2) + "\n")
        if loop.best_plan is not None:
            write(target / "plan.json", json.dumps(loop.best_plan.to_json(), indent=2) + "\n")
    if as_json:
        emit(document)
    else:
        _print_loop(loop, document, target)
    if loop.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print_loop(loop: ClosedLoop, document: dict[str, Any], target: Path | None) -> None:
    print_table(
        HEAD,
        [
            (
                row.plan.describe(),
                format_time(row.time_before),
                format_time(row.measured_time),
                f"{row.time_before / row.measured_time - 1:+.1%}",
                format_time(row.time_after) if row.time_after is not None else "-",
                f"{row.time_after / row.measured_time - 1:+.1%}" if row.time_after is not None else "-",
            )
            for row in loop.rows
        ],
    )
    print()
    after = document["mean_error_after"]
    figures = {**document["device"], **document["collectives"]}
    print_rows(
        [
            ("mean error before", f"{document['mean_error_before']:.1%}"),
            ("mean error after", f"{after:.1%}, each plan from the others" if after is not None else "needs two plans"),
            ("order of plans", f"Kendall's tau {document['tau_before']:.2f} before, {document['tau_after']:.2f} after"),
            ("time now over before", ", ".join(f"{name} {factor:.2f}" for name, factor in figures.items())),
            ("ran fastest", document["fastest"]),
            *([("best on the fitted machine", document["best"])] if loop.best_plan is not None else []),
            *([("fitted machine", f"{target / 'cluster.yaml'}; give it to --cluster")] if target is not None else []),
        ]
    )
